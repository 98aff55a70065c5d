"""The futures that calls return.

torch's futures live in C++, where Python's garbage collector cannot look. An exception that is kept in one
and has a traceback with a frame that knows the future would never be freed, nor would anything else in that
frame. So exceptions are kept here without a traceback, and `wait` raises a copy.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from .kept_errors import copy_error

if TYPE_CHECKING:
    from .executor import Executor

__all__ = ["Future", "error_of", "wait_in_loop", "when_done"]

T = TypeVar("T")


class Future(torch.futures.Future[T]):
    """A torch future that tells the agent's executor when one of its threads waits.

    Waiting inside a remote function then never starves the calls that the wait depends on. In an asyncio
    program the future can be awaited; a task that is cancelled meanwhile cancels the call.
    """

    def __new__(cls, *_: object) -> Self:
        """The C++ side takes no arguments."""
        return super().__new__(cls)

    def __init__(
        self,
        executor: "Executor",
        cancel: Callable[[], bool] | None = None,
        worker: str = "",
        operation: str = "request",
    ) -> None:
        super().__init__()
        self.worker = worker
        """The name of the worker that was asked."""
        self.operation = operation
        """What it was asked, for people: such as `rpc_async add`."""
        self._executor = executor
        self._cancel = cancel

    def cancel(self) -> bool:
        """Cancels the call: the future fails at once with RpcCancelledError.

        What of the call has not been sent is not sent. Where it has been sent but has not begun to run, it is
        not run (if the cancellation gets there first). A call that runs goes on, and its result is dropped.

        Returns:
            Was the call cancelled? False if it was over already.
        """
        return self._cancel is not None and self._cancel()

    def __repr__(self) -> str:
        if not self.done():
            state = "pending"
        elif (error := error_of(self)) is not None:
            state = f"failed: {type(error).__name__}"
        else:
            state = "done"
        return f"Future({self.operation} on {self.worker!r}, {state})"

    def __await__(self) -> Generator[Any, None, T]:
        return wait_async(self).__await__()

    def wait(self) -> T:
        """The call's result, or its exception raised here. Blocks until there is one."""
        try:
            if self.done():
                return super().wait()
            with self._executor.blocking():
                if threading.current_thread() is threading.main_thread():
                    _wait_interruptibly(self)
                return super().wait()
        except Exception as error:
            error.__traceback__ = None
            raise copy_error(error) from error.__cause__

    def set_exception(self, result: Exception) -> None:  # type: ignore[override] # torch says: a value
        """Fails the future."""
        super().set_exception(result.with_traceback(None))  # type: ignore[arg-type]


def _wait_interruptibly(future: torch.futures.Future[Any]) -> None:
    """Returns when a future is done; Ctrl-C, which C++ would not notice before that, ends the wait."""
    done = threading.Lock()
    done.acquire()
    future.add_done_callback(lambda _future: done.release())
    done.acquire()


async def wait_async(future: torch.futures.Future[T]) -> T:
    """The result of a future, awaited on the running event loop. Cancelling the wait cancels a call."""
    if not future.done():
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(woken.set)

        future.add_done_callback(wake)
        try:
            await woken.wait()
        except asyncio.CancelledError:
            if isinstance(future, Future):
                future.cancel()
            raise
    return future.wait()


def error_of(future: torch.futures.Future[Any]) -> Exception | None:
    """The exception of a future that is done, without a traceback; None if it has a value."""
    try:
        future.value()
    except Exception as error:
        return error.with_traceback(None)
    return None


def as_concurrent_future(future: torch.futures.Future[T]) -> "concurrent.futures.Future[T]":
    """A future of Python's that gets the outcome of torch's."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def done(future: torch.futures.Future[T]) -> None:
        if (error := error_of(future)) is not None:
            outcome.set_exception(error)
        else:
            _order_streams()
            outcome.set_result(future.value())

    future.add_done_callback(done)
    return outcome


def _order_streams() -> None:
    """Has what default streams do from now on come after what this thread's current streams are to do.

    torch runs the callbacks of a future on streams that wait for its value; the agent's threads work on default
    streams.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    for device in range(torch.cuda.device_count()):
        current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        if current != default:
            default.wait_stream(current)
