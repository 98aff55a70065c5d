"""GroupWork, the torch.distributed.Work of an engine's operation."""

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
from torch.futures import Future

from ...errors import ProcessGroupError
from ..engines.pending import PendingOperation
from ..torch_types import OpType, TorchProcessGroup, TorchWork

__all__ = ["GroupWork"]


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

        Args:
            timeout: how long to wait; None, zero or less to wait as long as the operation may take.
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
        """Returns torch's number for the operation."""
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
