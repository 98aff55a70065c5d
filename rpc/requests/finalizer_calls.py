"""Calls that finalizers make in a garbage collection.

A collection runs at any line of any thread, which may hold any lock of the agent. A call that takes the same lock
again would hang, and with it the thread: so what a finalizer (`__del__`) calls is sent by another thread.
"""

import contextlib
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any, final

from ...errors import NotInitializedError
from ..execution.executor import Executor
from ..execution.futures import Future, error_of
from ..execution.interruptions import may_have_lock, under_finalizer

__all__ = ["FinalizerCalls"]

log = logging.getLogger(__name__)


@final
class FinalizerCalls:
    """Knows whether the calling thread collects garbage, and sends calls on another one. Takes no lock."""

    def __init__(self, executor: Executor, call_soon: Callable[..., None]) -> None:
        """Looks at collections until `close`. `call_soon` has the event loop call something; it takes no lock."""
        self.collecting: set[int] = set()
        """The threads that collect garbage now. Mostly empty."""
        self._executor = executor
        self._call_soon = call_soon
        self._callback = self._on_collection
        gc.callbacks.append(self._callback)

    def _on_collection(self, phase: str, _info: dict[str, int]) -> None:
        """Is called by Python on the thread that collects."""
        if phase == "start":
            self.collecting.add(threading.get_ident())
        else:
            self.collecting.discard(threading.get_ident())

    def is_collecting_here(self) -> bool:
        """Returns whether the calling thread runs a finalizer in a garbage collection."""
        return threading.get_ident() in self.collecting

    def send(self, send: Callable[[], Future[Any]], worker: str, operation: str) -> Future[Any]:
        """Has another thread send a call to a worker, and returns a future of the answer.

        In the collection, a wait for it gets None at once if what the collection has interrupted may hold a lock.
        """
        answer = _FinalizerFuture(self._executor, None, worker, operation)
        answer.is_collecting_here = self.is_collecting_here
        try:
            self._call_soon(self._executor.submit, _send, send, answer)
        except RuntimeError:  # the event loop has ended
            raise NotInitializedError("the RPC agent of this finalizer has shut down") from None
        return answer

    def close(self) -> None:
        """Looks at collections no longer."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._callback)


class _FinalizerFuture(Future[Any]):
    """The future of a call that a finalizer has made."""

    is_collecting_here: Callable[[], bool]

    def wait_for_answer(self, *, reads: bool = True) -> Any:  # noqa: ARG002
        """Waits, unless a finalizer would wait for what it has interrupted."""
        if not self.done() and self.is_collecting_here():
            interrupted = under_finalizer()
            if interrupted is None or may_have_lock(interrupted):
                log.debug("a finalizer does not wait for %s on worker %s", self.operation, self.worker)
                return None
        return super().wait_for_answer(reads=False)  # another thread has sent it


def _send(send: Callable[[], Future[Any]], answer: Future[Any]) -> None:
    """Sends a call, whose answer completes another future."""
    try:
        sent = send()
    except Exception as error:
        answer.set_exception(error)
    else:
        sent.add_done_callback(lambda _: _complete(answer, sent))


def _complete(answer: Future[Any], sent: Future[Any]) -> None:
    if (error := error_of(sent)) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(sent.value())
