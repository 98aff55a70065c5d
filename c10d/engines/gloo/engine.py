"""The Gloo engine: torch's C++ ProcessGroupGloo, and what it lacks made from what it has.

What is only moved is moved as bytes, whatever its dtype. Reductions that Gloo does not know, or gets wrong (it
adds bools as numbers), are gathered and combined here.

An operation is waited for in C++, by the thread that wants its result. All of a group that fails is woken by a
receive that times out at once: Gloo then closes all connections of its context, and whoever waits on one is told.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from ....errors import CollectiveTimeoutError, ProcessGroupError, UnsupportedOperationError
from ....torch_internals import AllgatherOptions
from ...host_identity import INTERFACES, LOOPBACK, address_for_others, hosts_of, share_network
from ...pending import All, Finishing
from ...reductions import Reduction, combine, finish, prepare
from ...stores.prefix import PrefixStore
from ..base import Engine, PendingOperation, Setup
from ..memory import as_bytes, flat, join, spread
from .pending import GlooCollective, GlooMessage

__all__ = ["GlooEngine"]

_OPS: dict[str, Any] = {
    name: getattr(dist.ReduceOp, name.upper())
    for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
}

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_KNOWN = _FLOATS | {torch.uint8, torch.int8, torch.int32, torch.int64}
"""What Gloo reduces. It takes bools for bytes, and the sums of bytes are no bools."""

REASON_SECONDS = 1.0
"""A broken connection says nothing of why. The watch over the group does, mostly at once."""

POISON_TAG = 2**31 - 1
"""Of the receive that is to time out. Nobody sends with it."""


@final
class GlooEngine(Engine):
    """Gloo, over TCP: on the interfaces of GLOO_SOCKET_IFNAME, or where others reach this host."""

    name: ClassVar[str] = "gloo"
    blocking: ClassVar[bool] = False

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        # C++ holds stores, but not what makes one a Python object.
        self._stores = (setup.store, PrefixStore("gloo", setup.store))
        self._failure: Exception | None = None
        self._failed = threading.Event()
        self._tell_group = setup.failed
        self._from_anyone: weakref.WeakSet[GlooMessage] = weakref.WeakSet()
        limit = timedelta(seconds=setup.timeout)
        try:
            self._gloo: Any = _connected(self._stores[-1], setup, limit)
        except RuntimeError as error:
            raise ProcessGroupError(f"Gloo could not connect the ranks: {_first_line(error)}") from error

    # Collectives

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> PendingOperation | None:
        """Every rank's `tensor` becomes the root's."""
        if not tensor.numel():
            return None
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._start("broadcast", timeout, options, [_known(tensor)])

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: float) -> PendingOperation | None:
        """Every rank's `tensor` becomes the reduction of all."""
        if not tensor.numel():
            return None
        prepare(reduction, tensor)
        if tensor.dtype not in _KNOWN:
            parts = tensor.new_empty(self.size, tensor.numel())
            pending = self.all_gather_single(parts, tensor, timeout)
            return self._then(pending, lambda: _combine(reduction, parts, tensor.view(-1)))
        options = dist.AllreduceOptions()
        options.reduceOp = _op(reduction, tensor)
        return self._averaged(self._start("allreduce", timeout, options, [tensor]), reduction, tensor)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, timeout: float) -> PendingOperation | None:
        """The root's `tensor` becomes the reduction of all; the others' may change."""
        if not tensor.numel():
            return None
        prepare(reduction, tensor)
        if tensor.dtype not in _KNOWN:
            parts = tensor.new_empty(self.size if self.rank == root else 0, tensor.numel())
            pending = self.gather(list(parts), tensor, root, timeout)
            if self.rank != root:
                return pending
            return self._then(pending, lambda: _combine(reduction, parts, tensor.view(-1)))
        options = dist.ReduceOptions()
        options.reduceOp = _op(reduction, tensor)
        options.rootRank = root
        return self._averaged(self._start("reduce", timeout, options, [tensor]), reduction, tensor)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, timeout: float) -> PendingOperation | None:
        """`outputs[i]` becomes the tensor of rank i; the sizes may differ."""
        if len({output.numel() for output in outputs}) == 1:
            if not tensor.numel():
                return None
            lists = [[_known(output) for output in outputs]]
            return self._start("allgather", timeout, AllgatherOptions(), lists, [_known(tensor)])
        outputs[self.rank].copy_(tensor.view_as(outputs[self.rank]))
        begun = [self.broadcast(output, root, timeout) for root, output in enumerate(outputs)]
        return _all(begun)

    def all_gather_single(self, output: Tensor, tensor: Tensor, timeout: float) -> PendingOperation | None:
        """`output` becomes the tensors of all ranks, which have one size."""
        if not tensor.numel():
            return None
        return self._start("_allgather_base", timeout, AllgatherOptions(), _known(output), _known(tensor))

    def gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, root: int, timeout: float
    ) -> PendingOperation | None:
        """On the root, `outputs[i]` becomes the tensor of rank i."""
        if not tensor.numel():
            return None
        options = dist.GatherOptions()
        options.rootRank = root
        lists = [[_known(output) for output in outputs]] if self.rank == root else []
        return self._start("gather", timeout, options, lists, [_known(tensor)])

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], root: int, timeout: float
    ) -> PendingOperation | None:
        """Rank i's `tensor` becomes the root's `inputs[i]`."""
        if not tensor.numel():
            return None
        options = dist.ScatterOptions()
        options.rootRank = root
        lists = [[_known(each) for each in inputs]] if self.rank == root else []
        return self._start("scatter", timeout, options, [_known(tensor)], lists)

    def reduce_scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], reduction: Reduction, timeout: float
    ) -> PendingOperation | None:
        """Rank i's `tensor` becomes the reduction of all ranks' `inputs[i]`; the sizes may differ."""
        # Gloo's own reduces all to all ranks, and throws most of it away.
        parts = tensor.new_empty(self.size, tensor.numel())
        pending = self.all_to_all(list(parts), _prepared(reduction, inputs), timeout)
        return self._then(pending, lambda: _combine(reduction, parts, tensor.view(-1)))

    def reduce_scatter_single(
        self, tensor: Tensor, whole: Tensor, reduction: Reduction, timeout: float
    ) -> PendingOperation | None:
        """As reduce_scatter of the equal parts of `whole`."""
        parts = tensor.new_empty(self.size, tensor.numel())
        pending = self.all_to_all_single(parts, _prepared(reduction, [whole])[0], timeout)
        return self._then(pending, lambda: _combine(reduction, parts, tensor.view(-1)))

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout: float
    ) -> PendingOperation | None:
        """Rank i's `outputs[j]` becomes rank j's `inputs[i]`; the sizes may differ."""
        sent, sizes = join(inputs), [output.nbytes for output in outputs]
        received = sent.new_empty(sum(sizes))
        options = dist.AllToAllOptions()
        pending = self._start(
            "alltoall_base", timeout, options, received, sent, sizes, [each.nbytes for each in inputs]
        )
        return self._then(pending, lambda: spread(received, outputs))

    def all_to_all_single(self, output: Tensor, whole: Tensor, timeout: float) -> PendingOperation | None:
        """As all_to_all of equal parts of two tensors."""
        if not output.numel():
            return None
        return self._start("alltoall_base", timeout, dist.AllToAllOptions(), _known(output), _known(whole), [], [])

    def barrier(self, timeout: float) -> PendingOperation | None:
        """Done once all ranks have called it."""
        return self._start("barrier", timeout, dist.BarrierOptions())

    def _start(self, operation: str, timeout: float, options: Any, *tensors: Any) -> PendingOperation:
        """Calls a method of the C++ group."""
        if self._failure is not None:
            raise self._failure
        options.timeout = timedelta(seconds=max(timeout, 0.001))  # Gloo counts milliseconds, and 0 is none
        try:
            if operation == "alltoall_base":
                work = self._gloo.alltoall_base(*tensors, options)
            else:
                work = getattr(self._gloo, operation)(*tensors, options)
        except RuntimeError as error:
            raise self.explain(error, operation.strip("_"), timeout, time.monotonic()) from error
        return GlooCollective(self.explain, work, operation.strip("_"), timeout)

    def _averaged(self, pending: PendingOperation, reduction: Reduction, tensor: Tensor) -> PendingOperation:
        """Gloo has averages of floating-point numbers only; of integers there is the sum so far."""
        if reduction.name != "avg" or tensor.dtype in _FLOATS:
            return pending
        return Finishing(pending, lambda: finish(reduction, tensor, self.size))

    def _then(self, pending: PendingOperation | None, function: Callable[[], None]) -> PendingOperation | None:
        return None if pending is None else Finishing(pending, function)

    # Point to point

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> PendingOperation | None:
        """Sends to `peer`'s `recv` with this tag."""
        if peer == self.rank:  # Gloo would break
            raise UnsupportedOperationError(self.name, "send", "a rank cannot send to itself; copy the tensor")
        return self._point_to_point("send", tensor, (peer, tag), timeout)

    def recv(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> Any:
        """Receives what `peer`, or anyone if it is None, sends with this tag."""
        if peer is None:
            return self._point_to_point("recv_anysource", tensor, (tag,), timeout)
        if peer == self.rank:
            raise UnsupportedOperationError(self.name, "recv", "a rank cannot receive from itself")
        return self._point_to_point("recv", tensor, (peer, tag), timeout)

    def _point_to_point(
        self, operation: str, tensor: Tensor, where: tuple[int, ...], timeout: float
    ) -> PendingOperation:
        if self._failure is not None:
            raise self._failure
        data = _known(tensor) if tensor.numel() else torch.zeros(1, dtype=torch.uint8)  # Gloo sends something
        try:
            work = getattr(self._gloo, operation)([data], *where)
        except RuntimeError as error:
            raise self.explain(error, operation, timeout, time.monotonic()) from error
        message = GlooMessage(self.explain, work, operation, timeout)
        if operation == "recv_anysource":
            self._from_anyone.add(message)
        return message

    # Faults

    def explain(self, error: RuntimeError, operation: str, seconds: float, begun: float) -> Exception:
        """What an error of Gloo means. The group fails with it."""
        if self._failure is None:
            text = _first_line(error)
            late = time.monotonic() - begun >= 0.95 * seconds  # the others were as late
            if "Timed out" in text or (late and not self._failed.wait(0.1)):
                self._report(CollectiveTimeoutError(operation, seconds))
            elif not self._failed.wait(REASON_SECONDS):
                self._report(
                    ProcessGroupError(
                        f"{operation} failed, as the connection to another rank broke; that rank may have timed "
                        f"out or aborted its group: {text}"
                    )
                )
        assert self._failure is not None
        return self._failure

    def _report(self, error: Exception) -> None:
        self._tell_group(error)
        self.fail(error)  # if the group has not done so, perhaps with another error

    def fail(self, error: Exception) -> None:
        """Makes all that is under way, and all that comes, raise `error`."""
        if self._failure is not None:
            return
        self._failure = error
        self._failed.set()
        self._poison()
        for message in list(self._from_anyone):  # these wait on no connection
            message.give_up(error)

    def _poison(self) -> None:
        """Has Gloo close the connections of every context; there is one for each network interface."""
        gloo, nothing = self._gloo, torch.zeros(1, dtype=torch.uint8)
        for context in range(len(os.environ.get(INTERFACES, "").split(","))):
            for peer in range(self.size):
                if peer != self.rank:
                    with suppress(RuntimeError):  # that it timed out, or that this connection is closed already
                        gloo.recv([nothing], peer, POISON_TAG - context).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Ends Gloo's threads and closes its connections."""
        self._gloo = None


def _connected(store: PrefixStore, setup: Setup, limit: timedelta) -> Any:
    """The C++ group. Left to itself it takes the address of the host's name, which may lead nowhere."""
    hosts = hosts_of(setup.store, setup.rank, setup.size, setup.timeout)
    if os.environ.get(INTERFACES):
        return dist.ProcessGroupGloo(store, setup.rank, setup.size, limit)
    address = LOOPBACK if share_network(hosts) else address_for_others(setup.store)
    gloo: Any = dist.ProcessGroupGloo  # the stubs lack half of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = limit
    return gloo(store, setup.rank, setup.size, options)


def _prepared(reduction: Reduction, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """What is combined, without a change to what the user gave."""
    if reduction.factor is None:
        return tensors
    copies = [tensor.clone() for tensor in tensors]
    for copy in copies:
        prepare(reduction, copy)
    return copies


def _op(reduction: Reduction, tensor: Tensor) -> Any:
    """Gloo's name of it."""
    if reduction.name == "premul_sum" or (reduction.name == "avg" and tensor.dtype not in _FLOATS):
        return dist.ReduceOp.SUM
    return _OPS[reduction.name]


def _combine(reduction: Reduction, parts: Tensor, into: Tensor) -> None:
    """The reduction of the rows of `parts`, which are as large as `into`."""
    into.copy_(parts[0])
    for part in parts[1:]:
        combine(reduction, into, part, into)
    finish(reduction, into, len(parts))


def _known(tensor: Tensor) -> Tensor:
    """Its elements in one dimension, or its bytes if Gloo does not know the dtype."""
    return flat(tensor) if tensor.dtype in _KNOWN else as_bytes(tensor)


def _all(pending: Sequence[PendingOperation | None]) -> PendingOperation | None:
    begun = [each for each in pending if each is not None]
    return All(begun) if begun else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
