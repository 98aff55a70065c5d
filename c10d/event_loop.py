"""The one asyncio loop on which this process's gRPC runs.

gRPC's asyncio layer has one poller for the process, and complains when several loops share it. So stores
and agents run their coroutines here, on one daemon thread that starts with its first user and ends with
its last.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar, final

__all__ = ["EventLoop", "acquire_event_loop"]

T = TypeVar("T")


@final
class EventLoop:
    """A user's hold on the shared loop. `release` it when done. Any thread but the loop's own may wait."""

    def __init__(self, shared: "_SharedLoop") -> None:
        self._shared = shared
        self._released = threading.Lock()
        self.loop = shared.loop

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Runs a coroutine on the loop and waits for its result.

        Raises:
            RuntimeError: called on the loop's own thread, which would wait for itself.
            TimeoutError: it took more than `seconds`; it is cancelled.
        """
        if threading.current_thread() is self._shared.thread:
            coroutine.close()
            raise RuntimeError("the event loop's own thread cannot wait for the event loop")
        future = self.spawn(coroutine)
        try:
            return future.result(seconds)
        except BaseException:  # too late, or Ctrl-C in this thread; a coroutine's own error cancels nothing
            future.cancel()
            raise

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Has the loop's thread call `callback`, which must not wait. Takes no lock: finalizers may call this."""
        with suppress(RuntimeError):  # the loop is closed, as the process ends
            self.loop.call_soon_threadsafe(callback)

    def release(self) -> None:
        """Gives the hold back. The last one stops the loop and ends its thread. Repeating it does nothing."""
        if self._released.acquire(blocking=False):
            self._shared.drop()


class _SharedLoop:
    """The loop, its thread, and how many hold it."""

    current: "_SharedLoop | None" = None
    guard = threading.Lock()

    def __init__(self) -> None:
        self.holders = 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="gradwire-loop", daemon=True)
        self.thread.start()

    @classmethod
    def forget_in_child(cls) -> None:
        """In a process that was forked, where the thread is not: the next user starts another loop."""
        cls.current = None
        cls.guard = threading.Lock()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            leftover = asyncio.all_tasks(self.loop)
            for task in leftover:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*leftover, return_exceptions=True))
        finally:
            self.loop.close()

    def drop(self) -> None:
        with _SharedLoop.guard:
            self.holders -= 1
            if self.holders:
                return
            if _SharedLoop.current is self:  # which it is not in a forked process
                _SharedLoop.current = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self.thread:
            self.thread.join()


os.register_at_fork(after_in_child=_SharedLoop.forget_in_child)


def acquire_event_loop() -> EventLoop:
    """Takes a hold on the shared loop, starting it if nobody has one."""
    with _SharedLoop.guard:
        shared = _SharedLoop.current
        if shared is None:
            shared = _SharedLoop.current = _SharedLoop()
        shared.holders += 1
        return EventLoop(shared)
