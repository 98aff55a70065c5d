"""What this worker has asked of others, until it is answered."""

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

from ...errors import RpcCancelledError, RpcTimeoutError, SendFailedError, WorkerLostError
from ...proto.v1 import agent_pb2
from ..channels.broadcast.sending import Broadcast
from ..channels.router import PayloadReader
from ..contracts.devices import Device
from ..contracts.messages import Handler, MessageType
from ..contracts.worker import WorkerInfo
from ..execution.futures import Future
from ..wire.device_maps import device_map_to_proto
from ..wire.failures import decode_failure
from ..wire.pickling import Packed
from ..wire.tensors import make_sendable
from .codec import Codec, SentMessage
from .stats import CallCounter

if TYPE_CHECKING:
    from ..execution.deadlines import Deadlines
    from ..execution.executor import Executor

__all__ = ["Client", "PendingRequest"]

log = logging.getLogger(__name__)

OPERATIONS = {
    MessageType.CALL: "rpc_async",
    MessageType.RREF_CREATE: "remote",
    MessageType.RREF_FETCH: "to_here",
    MessageType.STREAM_OPEN: "rpc_stream",
}
"""The functions that users call for each request."""

DOING = {
    MessageType.CALL: "a call to worker",
    MessageType.CONTROL: "a control message to worker",
    MessageType.ALL_GATHER: "the value for a collective, sent to worker",
    MessageType.ALL_GATHER_STATUS: "the question who is missing in a collective, to worker",
    MessageType.GREETING: "the announcement of a new worker to worker",
    MessageType.RREF_CREATE: "RRef creation via remote() on worker",
    MessageType.RREF_FETCH: "to_here() of a value on worker",
    MessageType.RREF_BACKWARD: "RRef.backward() from a value on worker",
    MessageType.BACKWARD: "the part of a backward pass on worker",
    MessageType.CLOSURE: "the preparation of a backward pass on worker",
    MessageType.SENDS: "the preparation of a backward pass on worker",
    MessageType.STREAM_OPEN: "the request of a stream from worker",
}
"""What each request does, in words that users know."""


@dataclass(slots=True)
class PendingRequest:
    """A request that is not answered yet."""

    identifier: int
    future: Future[Any]
    worker: WorkerInfo
    kind: MessageType.ValueType
    timeout: float
    sent: SentMessage | None = None
    """Set where it can be cancelled."""


@final
class Client:
    """The requests of one agent. Who takes one out of `pending` ends it: an answer, a timeout, a loss."""

    def __init__(
        self,
        codec: Codec,
        handlers: Mapping[MessageType.ValueType, Handler],
        executor: "Executor",
        activity: CallCounter,
    ) -> None:
        """Args: what sends them; what is known of their types; who is told of waits; what counts users' calls."""
        self.deadlines: Deadlines
        """To be set before the first request."""
        self.pending: dict[int, PendingRequest] = {}
        self.kept: dict[int, tuple[int, object]] = {}
        """What requests that are not over keep, and the workers they went to."""
        self._codec = codec
        self._handlers = handlers
        self._executor = executor
        self._activity = activity
        self._ids = itertools.count(1)

    def send(
        self,
        worker: WorkerInfo,
        kind: MessageType.ValueType,
        value: object,
        seconds: float,
        *,
        what: str | Sequence[str],
        header: Callable[[agent_pb2.Envelope], None] | None,
        keep: object,
    ) -> Future[Any]:
        """Sends a request: see `RpcAgent.request`."""
        packed = self._codec.pack(value, what, worker, None)
        return self._send(worker, kind, packed, seconds, header, keep, None)

    def send_to_all(
        self,
        workers: Sequence[WorkerInfo],
        kind: MessageType.ValueType,
        value: object,
        seconds: float,
        *,
        what: str | Sequence[str],
        around: Callable[[WorkerInfo], contextlib.AbstractContextManager[None]],
    ) -> list[Future[Any]]:
        """Sends a request to several workers: see `RpcAgent.request_all`."""
        packs: dict[frozenset[tuple[Device, Device]], Packed] = {}  # by device map
        devices = [frozenset(self._codec.device_map(worker, None).items()) for worker in workers]
        for worker, key in zip(workers, devices, strict=True):
            if key not in packs:
                packs[key] = self._codec.pack(value, what, worker, None)
        broadcast = self._codec.network.broadcast(workers) if len(packs) == 1 else None
        try:
            if broadcast is not None:
                for packed in packs.values():
                    packed.tensors[:] = map(make_sendable, packed.tensors)
            futures = []
            for worker, key in zip(workers, devices, strict=True):
                with around(worker):
                    try:
                        future = self._send(worker, kind, packs[key], seconds, None, broadcast, broadcast)
                    except Exception as error:  # to the other workers it goes all the same
                        future = Future(self._executor, None, worker.name, _operation(kind))
                        future.set_exception(error)
                futures.append(future)
            return futures
        finally:
            if broadcast is not None:
                broadcast.sent()

    def _send(
        self,
        worker: WorkerInfo,
        kind: MessageType.ValueType,
        packed: Packed,
        seconds: float,
        header: Callable[[agent_pb2.Envelope], None] | None,
        keep: object,
        broadcast: Broadcast | None,
    ) -> Future[Any]:
        device_map = device_map_to_proto(self._codec.device_map(worker, None))
        envelope = agent_pb2.Envelope(id=next(self._ids), type=kind, device_map=device_map)
        if header is not None:
            header(envelope)
        handler = self._handlers[kind]
        cancel = partial(self.cancel, envelope.id) if handler.cancellable else None
        future: Future[Any] = Future(self._executor, cancel, worker.name, _operation(kind))
        if handler.user_values:
            self._activity.begin()
        pending = self.pending[envelope.id] = PendingRequest(envelope.id, future, worker, kind, seconds)
        if keep is not None:
            self.kept[envelope.id] = worker.id, keep
        try:
            sent = self._codec.send(worker, kind, envelope, packed, None, broadcast)
            if handler.cancellable:
                envelope.ClearField("body")
                envelope.ClearField("tensors")
                pending.sent = sent
        except (WorkerLostError, SendFailedError) as error:
            self.kept.pop(envelope.id, None)
            if isinstance(error, SendFailedError):
                error = SendFailedError(worker.name, error.reason, _doing(kind))
            self._fail(self._take(envelope.id), error)
        except BaseException:
            self.kept.pop(envelope.id, None)
            if self._take(envelope.id) is not None:  # else it has ended with the loss of its worker
                self._ended(kind)
            raise
        else:
            if seconds:
                self.deadlines.add(envelope.id, seconds)
        return future

    def complete(self, source: WorkerInfo, envelope: agent_pb2.Envelope, arrived: PayloadReader) -> None:
        """An answer is here."""
        if self._is_of_another(source, envelope):
            return
        pending = self._take(envelope.id)
        self.kept.pop(envelope.id, None)
        try:
            if envelope.type == MessageType.ERROR:
                error = decode_failure(arrived(envelope.body), source.name)
                for extension in self._codec.extensions:
                    error = extension.map_error(error, source)
                raise error
            # An answer that comes too late is read all the same: references in it must be counted.
            message = self._codec.read(source, envelope, arrived, users=True)
            message.value = self._codec.unpack(message)
        except Exception as error:
            self._fail(pending, error)
            return
        if pending is not None:
            self._tell_answered(pending)
            pending.future.set_result(message.value)
            self._ended(pending.kind)

    def refuse(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """An answer cannot be read."""
        if self._is_of_another(source, envelope):
            return
        self.kept.pop(envelope.id, None)
        self._fail(self._take(envelope.id), error)

    def time_out(self, identifier: int) -> None:
        """A request's time is up."""
        if (pending := self._take(identifier)) is not None:
            self._fail(pending, RpcTimeoutError(pending.worker.name, pending.timeout, _doing(pending.kind)))

    def cancel(self, identifier: int) -> bool:
        """Ends a request at its caller's wish; False if it is over."""
        pending = self._take(identifier)
        if pending is None:
            return False
        if pending.sent is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whatever was queued
                self._codec.network.call_soon(self._withdraw, pending.worker, pending.sent)
        self._fail(pending, RpcCancelledError(pending.worker.name))
        return True

    def on_worker_lost(self, worker: WorkerInfo, reason: str) -> None:
        """Nobody will answer what a lost worker was asked."""
        for identifier, pending in list(self.pending.items()):
            if pending.worker.id == worker.id:
                self._fail(self._take(identifier), WorkerLostError(worker.name, reason))
        for identifier, (destination, _) in list(self.kept.items()):
            if destination == worker.id:
                self.kept.pop(identifier, None)

    def unanswered(self) -> Mapping[str, int]:
        """How many users' calls to whom are not answered."""
        pending = [p for p in list(self.pending.values()) if self._handlers[p.kind].user_values]
        return Counter(p.worker.name for p in pending)

    def close(self, error: Exception) -> None:
        """Fails all of them."""
        for identifier in list(self.pending):
            self._fail(self._take(identifier), error)
        self.kept.clear()

    def _withdraw(self, worker: WorkerInfo, sent: SentMessage) -> None:
        """Takes a request back; if it is on its way, has the other side not begin it. Called on the loop."""
        network = self._codec.network
        if network.withdraw(worker, sent.ticket, sent.payloads):
            self.kept.pop(sent.envelope.id, None)
            self._executor.submit(self._codec.send_aborted, worker, sent.envelope)
            return
        cancel = agent_pb2.Envelope(id=sent.envelope.id, type=MessageType.CANCEL)
        with contextlib.suppress(WorkerLostError, SendFailedError):
            network.send(worker, cancel.SerializeToString())

    def _is_of_another(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> bool:
        """Was another worker asked what this one answers? Such an answer is dropped."""
        pending = self.pending.get(envelope.id)
        if pending is None or pending.worker.id == source.id:
            return False
        log.warning("worker %s answers a request to %s; dropped", source.name, pending.worker.name)
        return True

    def _take(self, identifier: int) -> PendingRequest | None:
        """Who waits for an answer; nobody else gets it."""
        return self.pending.pop(identifier, None)

    def _fail(self, pending: PendingRequest | None, error: Exception) -> None:
        if pending is not None:
            self._tell_answered(pending)
            pending.future.set_exception(error)
            self._ended(pending.kind)

    def _tell_answered(self, pending: PendingRequest) -> None:
        if self._handlers[pending.kind].user_values:
            for extension in self._codec.extensions:
                extension.on_complete(pending.identifier)

    def _ended(self, kind: MessageType.ValueType) -> None:
        if self._handlers[kind].user_values:
            self._activity.end()


def _operation(kind: MessageType.ValueType) -> str:
    return OPERATIONS.get(kind, "request")


def _doing(kind: MessageType.ValueType) -> str:
    return DOING.get(kind, "a request to worker")
