"""The Gloo engine: CPU collectives and messages over TCP, on torch's C++ ProcessGroupGloo.

Operations that only move data move bytes, so they support all dtypes. Reductions that Gloo lacks or computes
wrongly (it adds bools as bytes) are gathered by Gloo and combined by torch.

The thread that wants the result of an operation waits for it in C++. When the group fails, all waiting threads are
woken by a receive that times out at once: Gloo then closes all connections of its context.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import CollectiveTimeoutError, ProcessGroupError, UnsupportedOperationError
from ...net.addresses import INTERFACE_VARIABLE, LOOPBACK, address_for_others
from ...net.host_identity import can_share_loopback
from ...net.inheritance import keep_in_children
from ...net.socket_owners import cut_off_other_users, own_listening_ports
from ...torch_internals import AllgatherOptions
from ..rendezvous.hosts import gather_consenting_hosts
from ..stores.views import PrefixStore, store_host
from ..torch_types import TorchWork
from .base import CombinedOperation, OperationWithFinalStep, Pending, PendingOperation, Setup, Tensors
from .fingerprint import AgreeingEngine, encode, encode_parts
from .reductions import Reduction, combine_all, finish, prepare, prepared
from .staging import as_bytes, flat, join_bytes, split_bytes

__all__ = ["GlooEngine"]

log = logging.getLogger(__name__)

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

_REDUCIBLE = _FLOATS | {torch.uint8, torch.int8, torch.int32, torch.int64}
"""Dtypes that Gloo reduces correctly. It treats bools as bytes, whose sums are no bools."""

FAILURE_REASON_TIMEOUT_S = 5.0
"""Seconds that the group has to learn why a connection broke. By then each rank should have had the processor, on
a machine that is too busy."""

CLOSING_TAG = 2**31 - 1
"""Tag of the receives that time out to have Gloo close its connections. No message has this tag."""

SPIN_S = 0.0004
"""Seconds for which a thread polls, yielding the processor, before it sleeps in C++; waking up takes as long."""


@final
class GlooEngine(AgreeingEngine):
    """Connects ranks by TCP, on the interfaces of GLOO_SOCKET_IFNAME or the one that reaches the others."""

    name: ClassVar[str] = "gloo"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._store = PrefixStore("gloo", setup.store)  # C++ keeps its C++ part alive, but not its Python object
        self._failed = threading.Event()
        self._any_source_receives: weakref.WeakSet[_GlooMessage] = weakref.WeakSet()
        try:
            self._gloo: Any = _connect(self._store, setup)
        except ProcessGroupError:
            raise
        except RuntimeError as error:
            raise ProcessGroupError(f"Gloo could not connect the ranks: {_first_line(error)}") from error

    # Collectives. Each reaches an agreement with the other ranks, and then starts operations of Gloo.

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> Pending:
        """Broadcasts by Gloo."""
        self.agree(timeout, encode("broadcast", tensor.nbytes, root=root))
        return self._broadcast(tensor, root)

    def _broadcast(self, tensor: Tensor, root: int) -> Pending:
        if not tensor.numel():
            return None
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._start("broadcast", options, [_movable(tensor)])

    def all_reduce(self, tensor: Tensor, reduction: Reduction, timeout: float) -> Pending:
        """Reduces by Gloo, or else gathers and combines on every rank."""
        self.agree(timeout, encode("all_reduce", tensor.nbytes, reduction=reduction, dtype=tensor.dtype))
        if not tensor.numel():
            return None
        prepare(reduction, tensor)
        if tensor.dtype not in _REDUCIBLE:
            parts = tensor.new_empty(self.size, tensor.numel())
            pending = self._all_gather_single(parts, tensor)
            return _then(pending, lambda: combine_all(reduction, parts, flat(tensor)))
        options = dist.AllreduceOptions()
        options.reduceOp = _reduce_op(reduction, tensor)
        return self._divided(self._start("allreduce", options, [tensor]), reduction, tensor)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction, timeout: float) -> Pending:
        """Reduces by Gloo, or else gathers and combines on the root."""
        self.agree(timeout, encode("reduce", tensor.nbytes, root=root, reduction=reduction, dtype=tensor.dtype))
        if not tensor.numel():
            return None
        prepare(reduction, tensor)
        if tensor.dtype not in _REDUCIBLE:
            parts = tensor.new_empty(self.size if self.rank == root else 0, tensor.numel())
            pending = self._gather(list(parts), tensor, root)
            if self.rank != root:
                return pending
            return _then(pending, lambda: combine_all(reduction, parts, flat(tensor)))
        options = dist.ReduceOptions()
        options.reduceOp = _reduce_op(reduction, tensor)
        options.rootRank = root
        return self._divided(self._start("reduce", options, [tensor]), reduction, tensor)

    def all_gather(self, outputs: Tensors, tensor: Tensor, timeout: float) -> Pending:
        """Gathers by Gloo if the sizes are equal, or else by one broadcast per rank."""
        expected = [encode("all_gather", output.nbytes) for output in outputs]
        self.agree(timeout, expected[self.rank], expected)
        if len(set(expected)) == 1:
            if not tensor.numel():
                return None
            lists = [[_movable(output) for output in outputs]]
            return self._start("allgather", AllgatherOptions(), lists, [_movable(tensor)])
        outputs[self.rank].copy_(tensor.view_as(outputs[self.rank]))
        started = [self._broadcast(output, root) for root, output in enumerate(outputs)]
        return CombinedOperation([each for each in started if each is not None])

    def all_gather_single(self, output: Tensor, tensor: Tensor, timeout: float) -> Pending:
        """Gathers by Gloo."""
        self.agree(timeout, encode("all_gather", tensor.nbytes))
        return self._all_gather_single(output, tensor)

    def _all_gather_single(self, output: Tensor, tensor: Tensor) -> Pending:
        if not tensor.numel():
            return None
        return self._start("_allgather_base", AllgatherOptions(), _movable(output), _movable(tensor))

    def gather(self, outputs: Tensors, tensor: Tensor, root: int, timeout: float) -> Pending:
        """Gathers by Gloo; all tensors must have one size."""
        self.agree(timeout, encode("gather", tensor.nbytes, root=root))
        return self._gather(outputs, tensor, root)

    def _gather(self, outputs: Tensors, tensor: Tensor, root: int) -> Pending:
        if not tensor.numel():
            return None
        options = dist.GatherOptions()
        options.rootRank = root
        lists = [[_movable(output) for output in outputs]] if self.rank == root else []
        return self._start("gather", options, lists, [_movable(tensor)])

    def scatter(self, tensor: Tensor, inputs: Tensors, root: int, timeout: float) -> Pending:
        """Scatters by Gloo; all tensors must have one size."""
        self.agree(timeout, encode("scatter", tensor.nbytes, root=root))
        if not tensor.numel():
            return None
        options = dist.ScatterOptions()
        options.rootRank = root
        lists = [[_movable(each) for each in inputs]] if self.rank == root else []
        return self._start("scatter", options, [_movable(tensor)], lists)

    def reduce_scatter(self, tensor: Tensor, inputs: Tensors, reduction: Reduction, timeout: float) -> Pending:
        """Exchanges the inputs by all_to_all and combines them on each rank."""
        # Gloo's own reduce_scatter is an all_reduce whose result is mostly discarded.
        self.agree(timeout, encode_parts(reduction, inputs))
        parts = tensor.new_empty(self.size, tensor.numel())
        ready = [prepared(reduction, each) for each in inputs]
        pending = self._all_to_all(list(parts), ready)
        return _then(pending, lambda: combine_all(reduction, parts, flat(tensor)))

    def reduce_scatter_single(
        self, tensor: Tensor, whole: Tensor, reduction: Reduction, timeout: float
    ) -> Pending:
        """Exchanges the chunks by all_to_all and combines them on each rank."""
        self.agree(timeout, encode("reduce_scatter", whole.nbytes, reduction=reduction, dtype=whole.dtype))
        parts = tensor.new_empty(self.size, tensor.numel())
        pending = self._all_to_all_single(parts, prepared(reduction, whole))
        return _then(pending, lambda: combine_all(reduction, parts, flat(tensor)))

    def all_to_all(self, outputs: Tensors, inputs: Tensors, timeout: float) -> Pending:
        """Exchanges the tensors by Gloo, through one buffer for all inputs and one for all outputs."""
        sent = [encode("all_to_all", each.nbytes) for each in inputs]
        self.agree(timeout, sent, [encode("all_to_all", each.nbytes) for each in outputs])
        return self._all_to_all(outputs, inputs)

    def _all_to_all(self, outputs: Tensors, inputs: Tensors) -> Pending:
        sent, sizes = join_bytes(inputs), [output.nbytes for output in outputs]
        received = sent.new_empty(sum(sizes))
        options = dist.AllToAllOptions()
        sent_sizes = [each.nbytes for each in inputs]
        pending = self._start("alltoall_base", options, received, sent, sizes, sent_sizes)
        return _then(pending, lambda: split_bytes(received, outputs))

    def all_to_all_single(self, output: Tensor, whole: Tensor, timeout: float) -> Pending:
        """Exchanges the chunks by Gloo."""
        self.agree(timeout, encode("all_to_all", whole.nbytes // self.size))
        return self._all_to_all_single(output, whole)

    def _all_to_all_single(self, output: Tensor, whole: Tensor) -> Pending:
        if not output.numel():
            return None
        options = dist.AllToAllOptions()
        return self._start("alltoall_base", options, _movable(output), _movable(whole), [], [])

    def exchange_fingerprints(self, received: Tensor, sent: Tensor) -> None:
        """Exchanges them by Gloo's all_to_all."""
        self._start("alltoall_base", dist.AllToAllOptions(), received, sent, [], []).wait(None)

    def _start(self, function: str, options: Any, *tensors: Any) -> PendingOperation:
        """Calls a method of the C++ group for the collective that was agreed on last."""
        self.raise_if_failed()
        name, timeout = self.operation, self.timeout
        # Gloo counts milliseconds, and takes 0 for no timeout.
        options.timeout = timedelta(seconds=max(timeout, 0.001))
        try:
            work = getattr(self._gloo, function)(*tensors, options)
        except RuntimeError as error:
            raise self.translate_error(error, name, timeout, time.monotonic()) from error
        return _GlooCollective(self, work, name, timeout)

    def _divided(self, pending: PendingOperation, reduction: Reduction, tensor: Tensor) -> PendingOperation:
        """Divides the sums that Gloo computed for averages of integers, of which it has none."""
        if reduction.name != "avg" or tensor.dtype in _FLOATS:
            return pending
        return OperationWithFinalStep(pending, lambda: finish(reduction, tensor, self.size))

    # Point-to-point messages

    def send(self, tensor: Tensor, peer: int, tag: int, timeout: float) -> Pending:
        """Sends by Gloo; a rank cannot send to itself."""
        if peer == self.rank:  # Gloo would fail the group
            raise UnsupportedOperationError(self.name, "send", "a rank cannot send to itself; copy the tensor")
        return self._point_to_point("send", tensor, (peer, tag), timeout)

    def recv(self, tensor: Tensor, peer: int | None, tag: int, timeout: float) -> Any:
        """Receives by Gloo, from rank `peer` or from any rank if None; a rank cannot receive from itself."""
        if peer is None:
            return self._point_to_point("recv_anysource", tensor, (tag,), timeout)
        if peer == self.rank:
            raise UnsupportedOperationError(self.name, "recv", "a rank cannot receive from itself")
        return self._point_to_point("recv", tensor, (peer, tag), timeout)

    def _point_to_point(
        self, operation: str, tensor: Tensor, address: tuple[int, ...], timeout: float
    ) -> PendingOperation:
        self.raise_if_failed()
        # Gloo sends no empty messages.
        data = _movable(tensor) if tensor.numel() else torch.zeros(1, dtype=torch.uint8)
        try:
            work = getattr(self._gloo, operation)([data], *address)
        except RuntimeError as error:
            raise self.translate_error(error, operation, timeout, time.monotonic()) from error
        message = _GlooMessage(self, work, operation, timeout)
        if operation == "recv_anysource":
            self._any_source_receives.add(message)
        return message

    # Failures

    def translate_error(self, error: RuntimeError, operation: str, timeout: float, start_time: float) -> Exception:
        """Fails the group for an error of Gloo, and returns the error to raise."""
        if self.failure is not None:
            return self.failure
        text = _first_line(error)
        # Another rank whose timeout expired first closes its connections before this rank's timeout expires.
        is_late = time.monotonic() - start_time >= 0.95 * timeout
        if "Timed out" in text or (is_late and not self._failed.wait(0.1)):
            return self.fail_group(CollectiveTimeoutError(operation, timeout))
        return self.fail_group(
            self._setup.wait_for_cause(FAILURE_REASON_TIMEOUT_S)
            or ProcessGroupError(f"{operation} failed because the connection to another rank broke: {text}")
        )

    def fail(self, error: Exception) -> None:
        """Makes all operations in flight, and all later ones, raise `error`; closes Gloo's connections."""
        if self.failure is not None:
            return
        super().fail(error)
        self._failed.set()
        self._close_connections()
        for receive in list(self._any_source_receives):  # Gloo does not wake these when connections close
            receive.fail(error)

    def _close_connections(self) -> None:
        """Has Gloo close the connections of every context; there is one for each network interface."""
        gloo, buffer = self._gloo, torch.zeros(1, dtype=torch.uint8)
        for context in range(len(os.environ.get(INTERFACE_VARIABLE, "").split(","))):
            for peer in range(self.size):
                if peer != self.rank:
                    with suppress(RuntimeError):  # it times out, or this connection is closed already
                        gloo.recv([buffer], peer, CLOSING_TAG - context).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Ends Gloo's threads and closes its connections."""
        self._gloo = None


def _connect(store: PrefixStore, setup: Setup) -> Any:
    """Returns the C++ group, connected by an address that the other ranks can reach.

    By default Gloo takes the address of the host's name, which may not be reachable. Ranks that share a network
    use its loopback address, unless all of them allow others and name an interface.
    """
    hosts = gather_consenting_hosts(
        setup.store, setup.rank, setup.size, setup.wait_for_keys, insecure=setup.insecure, what="Gloo"
    )
    interfaces = os.environ.get(INTERFACE_VARIABLE, "") if all(host.insecure for host in hosts) else ""
    is_local = not interfaces and can_share_loopback(hosts)
    ports = own_listening_ports() if is_local else set()
    gloo: Any = dist.ProcessGroupGloo  # some attributes are missing in the stubs
    options = gloo._Options()
    options._timeout = timedelta(seconds=setup.timeout)
    if interfaces:
        options._devices = [gloo.create_device(interface=each) for each in interfaces.split(",")]
    else:
        address = LOOPBACK if is_local else address_for_others(store_host(setup.store))
        options._devices = [gloo.create_device(hostname=address)]
    setup.exchange("ready", "")  # in what follows, Gloo does not notice that a rank does not come
    group = keep_in_children(gloo(store, setup.rank, setup.size, options))
    if is_local and len({host.user for host in hosts}) == 1:
        # Gloo's ports let in everybody who says a number. If another user has taken the place of a rank, the group
        # fails with its first operation.
        users = set(cut_off_other_users(ports))
        if users:
            log.warning("users %s of this host have connected to a process group, and are cut off", sorted(users))
    return group


def _reduce_op(reduction: Reduction, tensor: Tensor) -> Any:
    if reduction.name == "premul_sum" or (reduction.name == "avg" and tensor.dtype not in _FLOATS):
        return dist.ReduceOp.SUM
    return getattr(dist.ReduceOp, reduction.name.upper())


def _movable(tensor: Tensor) -> Tensor:
    """Returns a one-dimensional view in a dtype that Gloo knows: the tensor's own, or bytes."""
    return flat(tensor) if tensor.dtype in _REDUCIBLE else as_bytes(tensor)


def _then(pending: Pending, function: Callable[[], None]) -> Pending:
    return None if pending is None else OperationWithFinalStep(pending, function)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


class _GlooOperation:
    def __init__(self, engine: GlooEngine, work: TorchWork, operation: str, timeout: float) -> None:
        self._engine = engine
        self._work: Any = work  # dropped when done, as it holds the tensors
        self._operation = operation
        self._timeout = timeout
        self._start_time = time.monotonic()
        self._error: Exception | None = None

    def _translated(self, error: RuntimeError) -> Exception:
        translated = self._engine.translate_error(error, self._operation, self._timeout, self._start_time)
        return translated.with_traceback(None)


@final
class _GlooCollective(_GlooOperation):
    """A collective in flight, a PendingOperation."""

    def wait(self, timeout: float | None) -> None:
        work = self._work
        if work is not None:
            _spin(work)
            try:
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=max(timeout, 0.001)))
            except RuntimeError as error:
                if not work.is_completed():
                    raise TimeoutError from None
                self._error = self._translated(error)
            self._work = None
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        work = self._work
        if work is None or work.is_completed():
            with suppress(Exception):  # `wait` raises it again
                self.wait(None)
        return self._work is None

    def peek(self) -> bool:
        """Returns whether the operation has finished, but does not fail the group if it has failed."""
        work = self._work
        return work is None or work.is_completed()

    def source(self) -> int:
        raise NotImplementedError

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on one of Gloo's threads when the operation is done, or immediately if it is done."""
        work = self._work
        if work is None:
            callback()
        else:
            work.get_future().add_done_callback(lambda _: callback())


@final
class _GlooMessage(_GlooOperation):
    """A send or receive in flight, a PendingOperation.

    Gloo makes progress by itself, but reports the end of a message only to a thread that waits for it. So the
    first `wait` without a timeout waits in C++ itself. A thread is started for that if `done` or `on_done` is
    called before, if `wait` has a timeout, or for a receive from any rank.
    """

    def __init__(self, engine: GlooEngine, work: TorchWork, operation: str, timeout: float) -> None:
        super().__init__(engine, work, operation, timeout)
        self._lock = threading.Lock()
        self._has_waiter = threading.Lock()  # acquired for good by whoever waits in C++, without blocking
        self._is_done = False
        self._source = -1
        self._callbacks: list[Callable[[], None]] = []

    def wait(self, timeout: float | None) -> None:
        # A failure of the group would not wake a thread that waits in C++ for a message from any rank.
        may_wait = not self._is_done and timeout is None and self._operation != "recv_anysource"
        if may_wait and self._has_waiter.acquire(blocking=False):
            self._wait_in_gloo()
        if not self._is_done:
            event = threading.Event()
            self.on_done(event.set)
            if not event.wait(timeout):
                raise TimeoutError
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        if not self._is_done:
            self._ensure_waiter()
        return self._is_done

    def peek(self) -> bool:
        """Returns whether the operation is known to have finished. It is not before some thread waits for it."""
        return self._is_done

    def source(self) -> int:
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_done:
                self._callbacks.append(callback)
                callback = self._ensure_waiter
        callback()

    def fail(self, error: Exception) -> None:
        """Ends the operation with an error at once, although Gloo may still be working on it."""
        self._finish(error.with_traceback(None))

    def _ensure_waiter(self) -> None:
        if self._has_waiter.acquire(blocking=False):
            name = f"gradwire-gloo-{self._operation}"
            threading.Thread(target=self._wait_in_gloo, name=name, daemon=True).start()

    def _wait_in_gloo(self) -> None:
        remaining = self._start_time + self._timeout - time.monotonic()
        work = self._work
        if work is None:  # `fail` was called
            return
        try:
            work.wait(timedelta(seconds=max(remaining, 0.001)))
        except RuntimeError as error:
            self._finish(self._translated(error))
            return
        if self._operation != "send":
            self._source = int(work._source_rank())
        self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        with self._lock:
            if self._is_done:
                return
            self._error = error
            self._work = None  # it holds the tensor
            self._is_done = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def _spin(work: TorchWork) -> None:
    deadline = time.monotonic() + SPIN_S
    while not work.is_completed() and time.monotonic() < deadline:
        os.sched_yield()
