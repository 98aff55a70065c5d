"""Events of profilers: every operation is one, as torch's own groups record it.

It has the backend's name (`gradwire_gloo:all_reduce`) and the shapes of the tensors, lasts until the operation is
over, and counts as asynchronous, for which profilers take what ends on another thread than it began on.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from ..torch_internals import begin_profiler_event, enable_record_function
from .call import CollectiveCall
from .engines.base import PendingOperation

__all__ = ["OperationEvent"]

_NAMES = {
    "all_gather_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
}
"""What torch's own groups call operations that are forms of others."""


def _name(call: CollectiveCall) -> str:
    if call.name == "recv" and call.peer == -1:
        return "recvAnySource"
    if call.name == "all_reduce" and call.inputs[0].is_sparse:
        return "sparse_all_reduce"
    return _NAMES.get(call.name, call.name)


@final
class OperationEvent:
    """The event of one operation. It begins when it is made.

    Args:
        backend: by which the group is registered.
        call: the operation.
    """

    def __init__(self, backend: str, call: CollectiveCall) -> None:
        name = f"{backend}:{_name(call)}"
        tensors = call.outputs if call.name == "recv" else call.inputs
        self._ending = threading.Lock()
        self._over = begin_profiler_event(name, tensors)
        self._ended = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps what this thread does meanwhile out of the profile, such as what a library records for itself."""
        enable_record_function(False)  # noqa: FBT003  # torch takes it by position
        try:
            yield
        finally:
            enable_record_function(True)  # noqa: FBT003

    def end(self) -> None:
        """Ends it. Repeating it does nothing."""
        with self._ending:
            if not self._ended:
                self._ended = True
                thread = threading.Thread(
                    target=self._over.set_result, args=(None,), name="gradwire-profile", daemon=True
                )
                thread.start()
                thread.join()

    def follow(self, pending: PendingOperation, *, message: bool) -> PendingOperation:
        """Ends with an operation; gives what is to be used instead of it.

        message: it is over only when somebody asks, and nobody is to be made to ask.
        """
        if not message:
            pending.on_done(self.end)
        return _Recorded(pending, self.end)


@final
class _Recorded:
    """An operation whose event has ended before anybody sees that it is over."""

    def __init__(self, pending: PendingOperation, end: Callable[[], None]) -> None:
        self._pending = pending
        self._end = end

    def wait(self, timeout: float | None) -> None:
        """Waits for it; see Pending."""
        try:
            self._pending.wait(timeout)
        except TimeoutError:  # it goes on
            raise
        except BaseException:
            self._end()
            raise
        self._end()

    def done(self) -> bool:
        """Is it over, well or badly?"""
        over = self._pending.done()
        if over:
            self._end()
        return over

    def source(self) -> int:
        """Of a receive that is done: the rank that sent."""
        return self._pending.source()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Has `callback` called once when it is over, at once if it is."""
        self._pending.on_done(callback)
