"""The thread that polls for operations which no other thread waits for."""

import threading

from gradwire.c10d.engines.threads import MAX_IDLE_POLLS, PollingThread


class Wake(threading.Event):
    """Closes a polling thread just before it clears this event for its last poll, after which it sleeps."""

    def __init__(self, polling: PollingThread) -> None:
        super().__init__()
        self._clears = 0
        self.closing = threading.Thread(target=polling.close, daemon=True)
        self.is_closing = threading.Event()

    def clear(self) -> None:
        self._clears += 1
        if self._clears == MAX_IDLE_POLLS + 2:
            super().clear()
            self.closing.start()
            assert self.wait(20)
            self.is_closing.set()
        super().clear()


class Idle:
    def poll(self) -> float | None:
        return None


def test_a_thread_that_is_about_to_sleep_notices_that_it_is_closed():
    idle = Idle()
    polling = PollingThread("test", idle.poll, 0.0)
    polling._wake = wake = Wake(polling)
    polling.start()
    assert wake.is_closing.wait(20)
    wake.closing.join(5)  # an idle thread sleeps for 10 s
    assert not wake.closing.is_alive()
