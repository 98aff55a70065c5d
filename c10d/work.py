"""What a collective returns: a torch.distributed.Work over an operation of an engine."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
from torch.futures import Future

from .engines.base import PendingOperation
from .torch_types import OpType, TorchProcessGroup, TorchWork

__all__ = ["GroupWork"]


@final
class GroupWork(TorchWork):
    """An operation of a process group. Made by the group only.

    A `wait` whose timeout is over raises TimeoutError, and the operation goes on.

    `devices` are those on whose streams the operation goes on after `wait`; its future makes streams wait, too.
    `group` is kept until the operation is over, so that the group does not end before.
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
        self._futures_lock = threading.Lock()
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the tensors have their values; True. Raises what the operation raised.

        timeout: how long, instead of as long as the operation may take; zero and less are no limit.
        """
        if self._pending is not None:
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
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Is it over, well or badly?"""
        if self._pending is None or self._pending.done():
            self._group = None
            return True
        return False

    def is_success(self) -> bool:
        """Is it over, and well?"""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What it raised; None if nothing, or if it is not over."""
        if self._pending is None or not self._pending.done():
            return None
        try:
            self._pending.wait(None)
        except Exception as error:
            return error
        return None

    def result(self) -> Any:
        """The tensors that the operation writes to, once it has."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Of a receive: the rank of the group that sent. Waits until it is done.

        Raises:
            RuntimeError: this is no receive.
        """
        if self._operation != "recv" or self._pending is None:
            raise RuntimeError(f"sourceRank() is of receives only: {self._operation} receives from no one rank")
        self.wait()
        return self._pending.source()

    _source_rank = source_rank

    def _get_op_type(self) -> int:
        """The number of the operation among those that torch knows."""
        return int(getattr(OpType, _OP_TYPES.get(self._operation, "UNKNOWN")))

    def get_future(self) -> Future[Any]:
        """A future of `result()`. Its callbacks may wait for other operations."""
        with self._futures_lock:
            if self._future is None:
                begun: Future[None] = torch.futures.Future(devices=list(self._devices))
                self._future = begun.then(self._value)
                if self._pending is None or self._pending.done():
                    begun.set_result(None)
                else:
                    self._pending.on_done(lambda: _resolve(begun))
            return self._future

    def _value(self, _: Future[None]) -> Any:
        # Raised inside a then(): a future given the exception with set_exception holds it as a value as well, and
        # DDP's reducer reads that as tensors.
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


def _resolve(future: Future[None]) -> None:
    """Resolves it on a thread of its own: callbacks run there, and may wait for what the lane's would run."""
    threading.Thread(target=future.set_result, args=(None,), name="gradwire-work", daemon=True).start()
