"""The futures that calls return.

torch's futures are C++ objects, which Python's garbage collector cannot traverse. An exception in a future, with a
traceback that has a frame which refers to the future, is a cycle that would never be freed. So futures store
exceptions without frames, and `wait` raises a copy. So does whatever else keeps an error to raise it later.
"""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import copy
import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar

import torch

from ...errors import rebuild_exception
from ...net.security import printable
from ...torch_internals import AnyFuture
from .executor import Executor
from .interruptions import acquire
from .poller import SocketWaiter, Wakeable

__all__ = [
    "Future",
    "ReadAnswer",
    "as_concurrent_future",
    "copy_error",
    "error_of",
    "is_plain",
    "printable_text",
    "text_of",
    "wait_async",
    "without_frames",
]

S = TypeVar("S")
T = TypeVar("T")

ReadAnswer = Callable[["Future[Any]", SocketWaiter], None]
"""Has the calling thread, which waits for a future, read the socket that its answer comes by.

Returns when the future is done or about to be, or when the executor's threads are to read the socket. Takes the
future, and what is released when another thread completes it."""

MAX_SHOWN = 500
"""Characters of the text of an error that a line of a log shows."""


class Future(torch.futures.Future[T]):
    """A torch future that tells the agent's executor when one of its threads waits for it.

    So a wait inside a remote function never starves the calls that it depends on. In an asyncio program the future
    can be awaited; cancelling the task that awaits it cancels the call.
    """

    _callback: "Callable[[Future[T]], None] | None" = None
    """The function of `call_when_done`, until it has been called."""

    def __init__(
        self,
        executor: Executor,
        cancel: Callable[[], bool] | None = None,
        worker: str = "",
        operation: str = "request",
        read_answer: ReadAnswer | None = None,
    ) -> None:
        """Makes a pending future. Without `cancel` and `read_answer`, neither is possible.

        `cancel` returns whether the call was pending. `operation` is what it does, unless `describe` is set.
        """
        # As all methods of C++ that are hot: not by torch.futures.Future, whose Python takes half of the time.
        AnyFuture.__init__(self, [])
        self.worker = worker
        """The name of the worker that the call was sent to."""
        self.describe: Callable[[], str] = lambda: operation
        """Returns the operation of the call, for people: such as `rpc_async add`."""
        self._executor = executor
        self._cancel = cancel
        self._read_answer = read_answer
        self._waiters: list[Wakeable] = []
        """What each thread waits for: it is released when the future is done or about to be."""
        self.is_completing = False
        """Whether the future is done or about to be. Set before the waiters are looked at."""
        self.has_callbacks = False
        """Whether completing the future may run a function of the user."""
        self._complete: Callable[[], None] | None = None
        """What the thread that has read the answer, and waits for it, has to call."""

    @property
    def operation(self) -> str:
        """The name of the call, for people: such as `rpc_async add`."""
        return self.describe()

    def cancel(self) -> bool:
        """Cancels the call: the future fails at once with RpcCancelledError.

        A call that has not been sent is not sent. A call that was sent but has not started at the other worker
        does not start, provided that the cancellation arrives in time. A running call continues, and its result
        is dropped.

        Returns:
            Whether the call was cancelled; False if it was done already, or was made by a process that this one
            was forked from.
        """
        return self._cancel is not None and not self._executor.is_inherited and self._cancel()

    def set_cancel(self, cancel: Callable[[], bool] | None) -> None:
        """Sets what cancels the call: see the constructor."""
        self._cancel = cancel

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
        """Blocks until the call is done; returns its result or raises its exception."""
        return self.wait_for_answer(reads=False)

    def wait_for_answer(self, *, reads: bool = True) -> T:
        """Waits as `wait` does. If it `reads`, this thread may read the answer itself.

        It may not if another thread has the future, or if there are callbacks, which torch runs where a future is
        completed: they would hold it up.
        """
        try:
            if not self.done():
                executor = self._executor
                if executor.here.is_worker:
                    with executor.blocking():
                        self._wait_interruptibly(reads=reads)
                else:
                    here = executor.poller.here
                    if here.reads_here or here.must_not_wait or executor.is_inherited:
                        executor.poller.stop_reading_here()
                    self._wait_interruptibly(reads=reads)
            value: T = AnyFuture.wait(self)
            return value
        except Exception as error:
            raise copy_error(without_frames(error)) from error.__cause__  # torch has added those of this call

    done = AnyFuture.done

    def value(self) -> T:
        """Returns the result of a call that is done, or raises its exception."""
        try:
            value: T = AnyFuture.value(self)
            return value
        except Exception as error:
            raise copy_error(without_frames(error)) from error.__cause__

    def _wait_interruptibly(self, *, reads: bool) -> None:
        """Returns when the future is done or about to be. Ctrl-C interrupts it, unlike a wait in C++."""
        poller = self._executor.poller
        if reads and self._read_answer is not None and (waiter := poller.here.waiter or poller.waiter) is not None:
            self._waiters.append(waiter)
            try:
                self._read_answer(self, waiter)
            finally:
                if (complete := self._complete) is not None:
                    self._complete = None
                    if waiter in self._waiters:
                        try:  # noqa: SIM105 - in each call, and `suppress` makes three more
                            self._waiters.remove(waiter)
                        except ValueError:  # another thread has taken it, because the call has failed
                            pass
                    complete()
            if self.is_completing:
                return
        woken = threading.Lock()
        woken.acquire()
        self._waiters.append(woken)
        if not self.is_completing:  # else whoever completes it may have looked at the waiters before
            acquire(woken)

    def check_completable(self) -> None:
        """Raises NotInitializedError in a forked child, in which an inherited future is never done."""
        if self._executor.is_inherited:
            self._executor.poller.stop_reading_here()

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> torch.futures.Future[S]:
        """Returns a future of what a function returns, which is called when this future is done: see torch's.

        The function runs with the context variables of the caller.
        """
        self.has_callbacks = True
        return super().then(_in_this_context(callback))

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Calls a function when the future is done, with the context variables of the caller: see torch's."""
        self.has_callbacks = True
        super().add_done_callback(_in_this_context(callback))

    def call_when_done(self, callback: "Callable[[Future[T]], None]") -> None:
        """Calls a function of gradwire, which does not block, when the future is done; one function at most.

        Not by way of torch, which takes twice as long. It may be called twice, if the future becomes done
        meanwhile.
        """
        self._callback = callback
        if self.done():
            self._call_back()

    def _call_back(self) -> None:
        """Calls the function of `call_when_done`, if it has not been called."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(self)

    def set_result(self, result: T) -> None:
        """Completes the future with a value."""
        self.is_completing = True
        if self._waiters:
            self._wake()
        AnyFuture.set_result(self, result)  # runs callbacks, for which nobody else should wait
        if self._callback is not None:
            self._call_back()

    def set_exception(self, result: Exception) -> None:  # type: ignore[override] # torch's type is a value's
        """Completes the future with an exception."""
        self._wake()
        super().set_exception(without_frames(result))  # type: ignore[arg-type] # calls `set_result`

    def complete_here(self, complete: Callable[..., None], *args: Any) -> bool:
        """Has the calling thread complete this future when it has read on. Returns False if another waits."""
        if self._read_answer is None or self._executor.poller.here.expected is not self:
            return False
        self._complete = partial(complete, *args)
        self.is_completing = True
        return True

    def _wake(self) -> None:
        self.is_completing = True
        while self._waiters:
            try:
                waiter = self._waiters.pop()
            except IndexError:  # another thread has taken it
                return
            self._executor.release(waiter)


def _in_this_context(callback: Callable[..., S]) -> Callable[..., S]:
    """Returns a function that runs another one with the context variables that this thread has now."""
    context = contextvars.copy_context()
    if not context or not callable(callback):  # which torch refuses
        return callback
    return partial(context.run, callback)


async def wait_async(future: torch.futures.Future[T]) -> T:
    """Awaits a future on the running event loop; returns its result or raises its exception.

    Cancelling the task that awaits cancels the call, if the future is one of a call.
    """
    if not future.done():
        if isinstance(future, Future):
            future.check_completable()
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks have ended
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
    """Returns the exception of a future that is done, without frames; None if it has a value."""
    try:
        future.value()
    except Exception as error:
        return without_frames(error)
    return None


def as_concurrent_future(future: torch.futures.Future[T]) -> "concurrent.futures.Future[T]":
    """Returns a `concurrent.futures.Future` that gets the outcome of a torch future."""
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
    """Makes the default CUDA streams wait for this thread's current streams.

    torch runs the callbacks of a future on streams that wait for its value, while the agent's threads use the
    value on default streams.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    for device in range(torch.cuda.device_count()):
        current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        if current != default:
            default.wait_stream(current)


def copy_error(error: Exception) -> Exception:
    """Returns a copy of a stored error, to be raised; the error itself if its class cannot be copied."""
    try:
        if is_plain(error):
            return rebuild_exception(type(error), error.args, error.__dict__)
        copied = copy.copy(error)
    except Exception:
        return error
    return copied if type(copied) is type(error) else error


def is_plain(error: Exception) -> bool:
    """Returns whether an error's state is in `args` and `__dict__`, and its class does not define its pickling."""
    has_c_fields = isinstance(error, OSError | UnicodeError | ImportError | SyntaxError | StopIteration)
    is_reduced_by_class = (
        type(error).__reduce__ is not BaseException.__reduce__
        or type(error).__reduce_ex__ is not object.__reduce_ex__
    )
    return not has_c_fields and not is_reduced_by_class


def without_frames(error: Exception) -> Exception:
    """Returns the exception without its traceback and context, and those of its causes.

    Their frames, and the callers of those, would keep all of their local variables as long as it is stored.
    """
    each: BaseException | None = error
    seen = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        each.__context__ = each.__traceback__ = None
        each = each.__cause__
    return error


def text_of(error: BaseException) -> str:
    """Returns the text of an exception. Never raises."""
    try:
        return str(error)
    except Exception:
        return "(its text cannot be shown)"


def printable_text(error: BaseException) -> str:
    """Returns the text of an exception that another worker may have made, for a log. Never raises."""
    return printable(text_of(error), MAX_SHOWN)
