"""Profiler events: every operation is an event of torch's profiler, as torch's own groups record it.

An event is named by backend and operation (`gradwire_gloo:all_reduce`) and has the shapes of the tensors. It lasts
until the operation is done, and counts as asynchronous, which profilers assume of events that end on another
thread than they began on.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from ...torch_internals import begin_profiler_event, enable_record_function
from ..engines.collective_call import ANY_RANK, CollectiveCall
from ..engines.pending import PendingOperation, peek

__all__ = ["OperationEvent"]

_EVENT_NAMES = {
    "all_gather_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
}
"""Names under which torch's own groups record operations that are variants of others."""


def _event_name(call: CollectiveCall) -> str:
    if call.name == "recv" and call.peer == ANY_RANK:
        return "recvAnySource"
    if call.name == "all_reduce" and call.inputs[0].is_sparse:
        return "sparse_all_reduce"
    return _EVENT_NAMES.get(call.name, call.name)


@final
class OperationEvent:
    """The profiler event of one operation of a backend. It begins when it is constructed."""

    def __init__(self, backend: str, call: CollectiveCall) -> None:
        name = f"{backend}:{_event_name(call)}"
        tensors = call.outputs if call.name == "recv" else call.inputs
        self._is_ending = threading.Lock()  # acquired for good by the call that ends the event
        self._ended = threading.Event()
        self._end_future = begin_profiler_event(name, tensors)

    @contextmanager
    def without_nested_events(self) -> Iterator[None]:
        """Records no events of this thread in the `with` block, such as those that torch's Gloo records itself."""
        enable_record_function(False)  # noqa: FBT003  # torch takes it by position
        try:
            yield
        finally:
            enable_record_function(True)  # noqa: FBT003

    def end(self) -> None:
        """Ends the event, or waits for another call that does. Further calls do nothing."""
        if not self.try_end():
            self._ended.wait()

    def try_end(self) -> bool:
        """Ends the event. Returns False, without blocking, while another call ends it."""
        if self._is_ending.acquire(blocking=False):
            thread = threading.Thread(
                target=self._end_future.set_result, args=(None,), name="gradwire-profile", daemon=True
            )
            try:
                thread.start()
                thread.join()
            finally:
                self._ended.set()
        return self._ended.is_set()

    def end_with(self, pending: PendingOperation, *, is_point_to_point: bool) -> PendingOperation:
        """Ends the event when an operation is done. Returns the operation to use in its place."""
        if not is_point_to_point:  # Gloo completes those when somebody asks, so a callback would make a thread ask
            pending.on_done(self.end)
        return _ProfiledOperation(pending, self)


@final
class _ProfiledOperation:
    """An operation whose profiler event ends before anybody sees the operation as done."""

    def __init__(self, pending: PendingOperation, event: OperationEvent) -> None:
        self._pending = pending
        self._event = event

    def wait(self, timeout: float | None) -> None:
        try:
            self._pending.wait(timeout)
        except TimeoutError:  # the operation goes on
            raise
        except BaseException:
            self._event.end()
            raise
        self._event.end()

    def done(self) -> bool:
        return self._pending.done() and self._event.try_end()

    def peek(self) -> bool:
        return peek(self._pending)

    def source(self) -> int:
        return self._pending.source()

    def on_done(self, callback: Callable[[], None]) -> None:
        self._pending.on_done(callback)
