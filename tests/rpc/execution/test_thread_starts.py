"""Threads whose start is interrupted by the handler of a signal, or fails."""

import threading

import pytest
from gradwire.rpc.execution.interruptions import start_thread


class Interrupted(threading.Thread):
    """Ctrl-C comes while its start waits for it, where the wait has given up its lock."""

    def start(self) -> None:
        super().start()
        lock = threading.Lock()
        try:
            raise KeyboardInterrupt
        finally:
            lock.release()  # what a Condition does at the end


class Refused(threading.Thread):
    """The system has no thread for it."""

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def start_while_handling(thread: threading.Thread, handled: BaseException) -> bool:
    try:
        raise handled
    except BaseException:
        return start_thread(thread)


def test_an_interrupt_is_raised_and_the_thread_runs():
    ran = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        start_thread(Interrupted(target=ran.set))
    assert ran.wait(20)


def test_so_is_one_that_comes_while_another_error_is_handled():
    ran = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        start_while_handling(Interrupted(target=ran.set), ValueError("no bread"))
    assert ran.wait(20)


@pytest.mark.parametrize("handled", [None, ValueError("no bread"), KeyboardInterrupt()])
def test_a_thread_that_cannot_start_is_none(handled):
    if handled is None:
        assert not start_thread(Refused())
    else:
        assert not start_while_handling(Refused(), handled)


def test_others_start():
    ran = threading.Event()
    assert start_thread(threading.Thread(target=ran.set))
    assert ran.wait(20)
