"""The asyncio event loop that all of this process's gRPC runs on.

gRPC's asyncio layer has one poller for the process, and fails when several loops share it. So stores and agents
run their coroutines on one loop, on a daemon thread that starts with its first user and ends with the last.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn, TypeVar, final

from .inheritance import at_fork, keep_in_children

__all__ = ["EventLoop", "acquire_event_loop"]

T = TypeVar("T")


@final
class EventLoop:
    """One user's handle on the shared loop. Made by `acquire_event_loop`; call `release` when done with it.

    Any thread but the loop's own may wait for coroutines.
    """

    def __init__(self, shared: "_SharedLoop") -> None:
        self._shared = shared
        self._released = threading.Lock()
        self.loop = shared.loop

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.current_thread() is self._shared.thread

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Runs a coroutine on the loop, and waits for its result, for so many seconds at most.

        Raises:
            RuntimeError: called on the loop's own thread, which would wait for itself.
            TimeoutError: the coroutine took longer, and has been cancelled.
        """
        if self.is_current:
            coroutine.close()
            raise RuntimeError("the event loop's own thread cannot wait for the event loop")
        future = self.spawn(coroutine)
        try:
            return future.result(seconds)
        finally:  # after a timeout or Ctrl-C in this thread; if it is done, this does nothing
            future.cancel()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Calls `callback`, which must not block, on the loop's thread. Takes no lock, for finalizers."""
        with suppress(RuntimeError):  # the loop is closed, because the process is ending
            self.loop.call_soon_threadsafe(callback)

    def release(self) -> None:
        """Releases the loop. The last release stops it and ends its thread. Further calls do nothing."""
        if self._released.acquire(blocking=False):
            self._shared.release()


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: "Coroutine[Any, Any, T] | Generator[Any, None, T]", **options: Any
) -> "asyncio.Task[T]":
    """Makes a task of the loop, without the context variables of the thread that has asked for it.

    A task such as that of a connection may live much longer than what they hold.
    """
    if options.get("context") is None:
        options["context"] = contextvars.Context()
    return asyncio.Task(coroutine, loop=loop, **options)


class _SharedLoop:
    """The loop, its thread, and the number of its users."""

    current: "_SharedLoop | None" = None
    lock = threading.Lock()

    def __init__(self) -> None:
        self.user_count = 0
        self.loop = keep_in_children(asyncio.new_event_loop())  # its end would take the parent's loop its sockets
        self.loop.set_task_factory(_make_task)
        self.thread = threading.Thread(target=self._run, name="gradwire-loop", daemon=True)
        self.thread.start()

    @classmethod
    def reset_after_fork(cls) -> None:
        """In a forked process, which does not have the thread, makes the next user start another loop."""
        inherited, cls.current = cls.current, None
        cls.lock = threading.Lock()
        if inherited is not None:  # which would wake up the parent
            inherited.loop.call_soon_threadsafe = _refuse  # type: ignore[method-assign]

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self.loop.close()

    def release(self) -> None:
        with _SharedLoop.lock:
            self.user_count -= 1
            if self.user_count:
                return
            if _SharedLoop.current is self:  # not in a forked process
                _SharedLoop.current = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self.thread:
            self.thread.join()


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("the event loop runs in the process that this one was forked from")


at_fork(in_child=_SharedLoop.reset_after_fork)


def acquire_event_loop() -> EventLoop:
    """Returns a handle on the shared loop, and starts the loop if nobody uses it yet."""
    with _SharedLoop.lock:
        shared = _SharedLoop.current
        if shared is None:
            shared = _SharedLoop.current = _SharedLoop()
        shared.user_count += 1
        return EventLoop(shared)
