"""Calls that wait for something outside this process, such as the store, one at a time."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar, final

from ..execution.executor import Executor

__all__ = ["SerialCalls"]

T = TypeVar("T")


@final
class SerialCalls:
    """Runs blocking calls on threads of the executor, one at a time. Used on the event loop only."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._running = asyncio.Lock()

    async def run(self, function: Callable[[], T]) -> T:
        """Calls a function on a thread when the calls before it have ended; returns its result.

        If the caller is cancelled, a call that has not begun is dropped. One that runs goes on, and those after it
        wait for its end: else each caller that does not wait for long would leave one more blocked thread behind.
        """
        await self._running.acquire()
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        ended = asyncio.wrap_future(result)
        ended.add_done_callback(self._on_end)
        try:
            self._executor.submit_urgent(_call, function, result)
            return await asyncio.shield(ended)
        finally:
            result.cancel()  # does nothing if the call has begun

    def _on_end(self, ended: "asyncio.Future[Any]") -> None:
        self._running.release()
        if not ended.cancelled():
            ended.exception()  # asyncio would log an error that no caller waits for


def _call(function: Callable[[], T], result: "concurrent.futures.Future[T]") -> None:
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(function())
    except Exception as error:
        result.set_exception(error)
