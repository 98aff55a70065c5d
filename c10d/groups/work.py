"""An operation as torch sees it: its Work, and its event in torch's profiler, as torch's own groups record it.

An event is named by backend and operation (`gradwire_gloo:all_reduce`) and has the shapes of the tensors. It lasts
until the operation is done, and counts as asynchronous, which profilers assume of events that end on another
thread than they began on.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

import torch
from torch.futures import Future

from ...errors import ProcessGroupError
from ...torch_internals import begin_profiler_event, enable_record_function
from ..engines.base import PendingOperation, peek
from ..engines.collective_call import ANY_RANK, CollectiveCall
from ..torch_types import OpType, TorchProcessGroup, TorchWork

__all__ = ["GroupWork", "OperationEvent"]

_OP_TYPES = {
    "all_gather": "ALLGATHER",
    "all_gather_coalesced": "ALLGATHER_COALESCED",
    "all_gather_into_tensor": "_ALLGATHER_BASE",
    "all_gather_into_tensor_coalesced": "COALESCED",
    "all_reduce": "ALLREDUCE",
    "all_reduce_coalesced": "ALLREDUCE_COALESCED",
    "all_to_all": "ALLTOALL",
    "all_to_all_single": "ALLTOALL_BASE",
    "barrier": "BARRIER",
    "broadcast": "BROADCAST",
    "gather": "GATHER",
    "recv": "RECV",
    "reduce": "REDUCE",
    "reduce_scatter": "REDUCE_SCATTER",
    "reduce_scatter_tensor": "_REDUCE_SCATTER_BASE",
    "reduce_scatter_tensor_coalesced": "COALESCED",
    "scatter": "SCATTER",
    "send": "SEND",
}

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


@final
class GroupWork(TorchWork):
    """An operation of a process group, as its methods return it to the caller.

    A `wait` that runs into its own timeout raises TimeoutError; the operation goes on.

    Args:
        outputs: what `result()` returns.
        pending: the operation; None if it is done already.
        devices: GPUs on which `wait`, here and of the future, has the current streams wait for the operation.
        group: kept alive until the operation is done.
    """

    def __init__(
        self,
        operation: str,
        outputs: Any,
        pending: PendingOperation | None,
        devices: Sequence[torch.device] = (),
        group: TorchProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self._operation = operation
        self._outputs = outputs
        self._pending = pending
        self._devices = devices
        self._group = None if pending is None else group
        self._process = os.getpid()
        self._future_lock = threading.Lock()
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the output tensors have their values, and returns True. Raises what the operation raised.

        With a `timeout` of None, zero or less it waits as long as the operation may take.
        """
        if self._pending is not None:
            self._require_own_process()
            seconds = None if timeout is None else timeout.total_seconds()
            try:
                self._pending.wait(seconds if seconds is not None and seconds > 0 else None)
            except TimeoutError:
                raise TimeoutError(f"{self._operation} is not done after {seconds:g} s; it goes on") from None
            except Exception:
                self._group = None
                raise
            self._group = None
        return True

    def synchronize(self) -> None:
        """Calls `wait()`."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether the operation has finished, successfully or not."""
        if self._pending is None:
            return True
        self._require_own_process()
        if self._pending.done():
            self._group = None
            return True
        return False

    def _require_own_process(self) -> None:
        """Raises ProcessGroupError if the operation was in flight when this process was forked."""
        if self._group is not None and self._process != os.getpid():
            raise ProcessGroupError(
                f"{self._operation} was started in process {self._process}, of which this process is a fork: wait "
                "for it there"
            )

    def is_success(self) -> bool:
        """Returns whether the operation has succeeded."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Returns what the operation raised; None if it has succeeded or is still in flight."""
        if self._pending is None or not self._pending.done():
            return None
        try:
            self._pending.wait(None)
        except Exception as error:
            return error
        return None

    def result(self) -> Any:
        """Waits until the operation is done, and returns the tensors that it has written."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Waits until a receive is done, and returns the rank in the group that sent."""
        if self._operation != "recv" or self._pending is None:
            raise RuntimeError(
                f"sourceRank() is for receives only: {self._operation} does not receive from one rank"
            )
        self.wait()
        return self._pending.source()

    _source_rank = source_rank

    def _get_op_type(self) -> int:
        return int(getattr(OpType, _OP_TYPES.get(self._operation, "UNKNOWN")))

    def get_future(self) -> Future[Any]:
        """Returns a future of `result()`. Its callbacks may wait for other operations."""
        with self._future_lock:
            if self._future is None:
                done: Future[None] = torch.futures.Future(devices=list(self._devices))
                self._future = done.then(self._value)
                if self._pending is None or self._pending.done():
                    done.set_result(None)
                else:
                    # The callbacks of the future run on the thread. They may wait for operations that the current
                    # one, that of a serial queue or an engine, would have to run.
                    thread = threading.Thread(
                        target=done.set_result, args=(None,), name="gradwire-work", daemon=True
                    )
                    self._pending.on_done(thread.start)
            return self._future

    def _value(self, _: Future[None]) -> Any:
        # An error must be raised inside a then(). A future whose exception is set with set_exception has it as its
        # value as well, which DDP's reducer reads as tensors.
        self.wait()
        return self._outputs


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
