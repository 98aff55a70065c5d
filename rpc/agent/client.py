"""The requests that this worker has sent, until they are answered."""

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch

from ...errors import AnswerFailedError, RpcCancelledError, RpcTimeoutError, SendFailedError, WorkerLostError
from ...proto.v1 import agent_pb2
from ..channels.base import PayloadLostError
from ..channels.broadcast.sending import Broadcast
from ..channels.router import PayloadReader
from ..contracts.devices import Device, DeviceMap
from ..contracts.messages import CANCEL, ERROR, Handler, Outgoing, Request
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd
from ..execution.deadlines import Deadlines
from ..execution.executor import Executor
from ..execution.futures import Future
from ..wire.device_maps import device_map_to_proto
from ..wire.failures import decode_failure
from ..wire.pickling import Packed
from ..wire.tensors import make_sendable
from .codec import Codec
from .extensions import Extensions
from .factories import DeadlinesFactory
from .network import Network
from .stats import CallCounter

__all__ = ["Client", "PendingRequest"]

MAX_KEPT_BYTES = 1024
"""Bytes of the body and tensors of a pending request that may stay in its envelope; larger ones are removed."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PendingRequest:
    """A request that is not answered yet."""

    identifier: int
    future: Future[Any]
    worker: WorkerInfo
    handler: Handler
    timeout: float
    sent: Outgoing | None = None
    """Set once it is sent, if it can be cancelled."""


@dataclass(slots=True, frozen=True)
class _Encoded:
    """A request's value, pickled for one device map, and what its message shares with those to other workers."""

    packed: Packed
    device_map: DeviceMap
    broadcast: Broadcast | None = None


@final
class Client:
    """Sends the requests of one agent, and completes their futures.

    A request is completed by what takes it out of `pending` first: its answer, its timeout, its cancellation or
    the loss of its worker. Taking it out is one operation on a dict, so exactly one of them succeeds.
    """

    def __init__(
        self,
        codec: Codec,
        network: Network,
        extensions: Extensions,
        executor: Executor,
        calls: CallCounter,
        make_deadlines: DeadlinesFactory,
        name: str,
    ) -> None:
        """Makes the client of one agent.

        Args:
            codec: encodes requests and decodes answers.
            network: takes messages back that are cancelled.
            extensions: know the message types, and have hooks.
            executor: runs what an expired deadline causes, and is told of threads that wait for an answer.
            calls: counts users' calls in flight.
            make_deadlines: makes the clock of the timeouts.
            name: of this worker, for the clock's thread.
        """
        self.pending: dict[int, PendingRequest] = {}
        """The requests without an answer, by id."""
        self.kept: dict[int, tuple[int, object]] = {}
        """The worker and the `keep` of each request that has not been answered, even if it has failed here."""
        self._codec = codec
        self._network = network
        self._extensions = extensions
        self._executor = executor
        self._calls = calls
        self._ids = itertools.count(1)
        self._deadlines: Deadlines = make_deadlines(
            self._expire, self.pending.__contains__, self.pending.__len__, f"gradwire-deadlines-{name}"
        )

    # Sending: on any thread.

    def send(self, worker: WorkerInfo, request: Request, timeout: float) -> Future[Any]:
        """Sends a request: see `RpcAgent.request`.

        Args:
            worker: the receiver.
            request: what to send.
            timeout: seconds, 0 for none.
        """
        device_map = self._codec.device_map(worker)
        packed = self._codec.pack(request.value, request.label, worker, device_map)
        return self._send(worker, request, timeout, packed, packed.tensors, device_map)

    def send_all(
        self,
        workers: Sequence[WorkerInfo],
        request: Request,
        timeout: float,
        around: Callable[[WorkerInfo], contextlib.AbstractContextManager[None]],
    ) -> list[Future[Any]]:
        """Sends a request to several workers: see `RpcAgent.request_all`."""
        encoded = self._encode_all(workers, request)
        same_for_all = all(each.packed is encoded[0].packed for each in encoded)
        broadcast = self._network.broadcast(workers) if same_for_all else None
        if broadcast is None:
            return [self._try_send(*each, request, timeout, around) for each in zip(workers, encoded, strict=True)]
        encoded[0].packed.tensors[:] = map(make_sendable, encoded[0].packed.tensors)
        request = replace(request, keep=broadcast)
        try:
            return [
                self._try_send(worker, replace(each, broadcast=broadcast), request, timeout, around)
                for worker, each in zip(workers, encoded, strict=True)
            ]
        finally:
            broadcast.release()

    def _encode_all(self, workers: Sequence[WorkerInfo], request: Request) -> "list[_Encoded]":
        """Pickles a request for several workers: once for each device map."""
        by_map: dict[frozenset[tuple[Device, Device]], _Encoded] = {}
        encoded = []
        for worker in workers:
            device_map = self._codec.device_map(worker)
            key = frozenset(device_map.items())
            if key not in by_map:
                packed = self._codec.pack(request.value, request.label, worker, device_map)
                by_map[key] = _Encoded(packed, device_map)
            encoded.append(by_map[key])
        return encoded

    def _try_send(
        self,
        worker: WorkerInfo,
        encoded: "_Encoded",
        request: Request,
        timeout: float,
        around: Callable[[WorkerInfo], contextlib.AbstractContextManager[None]],
    ) -> Future[Any]:
        """Sends a request to one of several workers; an error fails this future only."""
        with around(worker):
            try:
                packed = encoded.packed
                tensors = [*packed.tensors]  # extensions replace some of them, for this worker only
                return self._send(worker, request, timeout, packed, tensors, encoded.device_map, encoded.broadcast)
            except Exception as error:
                operation = self._extensions.handlers[request.kind].operation
                future: Future[Any] = Future(self._executor, None, worker.name, operation)
                future.set_exception(error)
                return future

    def _send(
        self,
        worker: WorkerInfo,
        request: Request,
        timeout: float,
        packed: Packed,
        tensors: list[torch.Tensor],
        device_map: DeviceMap,
        broadcast: Broadcast | None = None,
    ) -> Future[Any]:
        handler = self._extensions.handlers[request.kind]
        identifier = next(self._ids)
        envelope = agent_pb2.Envelope(id=identifier, type=request.kind)
        if device_map:
            envelope.device_map.extend(device_map_to_proto(device_map))
        if request.header is not None:
            request.header(envelope)
        message = Outgoing(
            worker,
            envelope,
            packed.body,
            tensors,
            packed.references,
            None,
            handler.user_values,
            device_map,
            packed.leaves,
        )
        pending = self._register(worker, identifier, handler, timeout, request.keep)
        try:
            self._codec.send(message, broadcast)
        except BaseException as error:
            if not self._roll_back(pending, error):
                raise
        else:
            if handler.cancellable:
                self._keep_for_cancel(pending, message)
            if timeout:
                self._deadlines.add(identifier, timeout)
        return pending.future

    def _keep_for_cancel(self, pending: PendingRequest, message: Outgoing) -> None:
        """Keeps what is needed to take a request back: not its value."""
        if message.nbytes > MAX_KEPT_BYTES:
            message.envelope.ClearField("body")
            message.envelope.ClearField("tensors")
        message.body, message.tensors, message.references = b"", [], []
        pending.sent = message

    def _register(
        self, worker: WorkerInfo, identifier: int, handler: Handler, timeout: float, keep: object
    ) -> PendingRequest:
        """Registers a request before it is sent: the answer may arrive before `send` returns."""
        cancel = partial(self.cancel, identifier) if handler.cancellable else None
        future: Future[Any] = Future(self._executor, cancel, worker.name, handler.operation)
        if handler.user_values:
            self._calls.begin()
        pending = self.pending[identifier] = PendingRequest(identifier, future, worker, handler, timeout)
        if keep is not None:
            self.kept[identifier] = worker.id, keep
        return pending

    def _roll_back(self, pending: PendingRequest, error: BaseException) -> bool:
        """Undoes `_register` for a request that was not sent.

        Returns:
            Whether the error fails the future. Else the caller gets it at once.
        """
        self.kept.pop(pending.identifier, None)
        if isinstance(error, SendFailedError):
            error = SendFailedError(pending.worker.name, error.reason, pending.handler.description)
        if isinstance(error, WorkerLostError | SendFailedError):
            self._fail(self._take(pending.identifier), error)
            return True
        if self._take(pending.identifier) is not None:  # else the loss of its worker has completed it
            self._count_end(pending)
        return False

    # Completing: on the executor's threads.

    def on_answer(self, source: WorkerInfo, envelope: agent_pb2.Envelope, payloads: PayloadReader) -> None:
        """Completes the request that a message answers."""
        identifier = envelope.id
        if self._is_from_another(source, identifier):
            return
        pending = self.pending.pop(identifier, None)
        if self.kept:
            self.kept.pop(identifier, None)
        try:
            if envelope.type == ERROR:
                error = decode_failure(payloads(envelope.body), source.name)
                raise self._extensions.map_error(error, source)
            # An answer that arrives after the timeout is read all the same: references in it must be counted.
            message = self._codec.read(source, envelope, payloads, user_values=True)
            message.value = self._codec.unpack(message)
        except Exception as error:
            self._fail(pending, error)
            return
        if pending is not None:
            self._tell_complete(pending)
            pending.future.set_result(message.value)
            self._count_end(pending)

    def on_rejected_answer(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """Fails the request whose answer cannot be read."""
        if self._is_from_another(source, envelope.id):
            return
        self.kept.pop(envelope.id, None)
        if isinstance(error, PayloadLostError):
            error = AnswerFailedError(source.name, str(error))
        self._fail(self._take(envelope.id), error)

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Fails the requests to a worker that is lost."""
        for identifier, pending in list(self.pending.items()):
            if pending.worker.id == worker.id:
                self._fail(self._take(identifier), end.as_error(worker.name))
        for identifier, (destination, _) in list(self.kept.items()):
            if destination == worker.id:
                self.kept.pop(identifier, None)

    def cancel(self, identifier: int) -> bool:
        """Fails a request with RpcCancelledError; returns False if it is complete. Called on any thread."""
        pending = self._take(identifier)
        if pending is None:
            return False
        if pending.sent is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and with it what was queued
                self._network.call_soon(self._withdraw, pending.worker, pending.sent)
        self._fail(pending, RpcCancelledError(pending.worker.name))
        return True

    def unanswered(self) -> Mapping[str, int]:
        """Returns the number of users' calls without an answer, by the name of the worker called."""
        pending = [each for each in list(self.pending.values()) if each.handler.user_values]
        return Counter(each.worker.name for each in pending)

    def stop_deadlines(self) -> None:
        """Ends the clock: no request times out from now on."""
        self._deadlines.close()

    def fail_all(self, error: Exception) -> None:
        """Fails all requests that are pending."""
        for identifier in list(self.pending):
            self._fail(self._take(identifier), error)
        self.kept.clear()

    def _expire(self, identifier: int) -> None:
        """Handles an expired timeout. Called on the thread of the deadlines; must not block."""
        # The request is not taken here: if the executor closes first, `fail_all` completes it.
        self._executor.submit(self._time_out, identifier)

    def _time_out(self, identifier: int) -> None:
        if (pending := self._take(identifier)) is not None:
            error = RpcTimeoutError(pending.worker.name, pending.timeout, pending.handler.description)
            self._fail(pending, error)

    def _withdraw(self, worker: WorkerInfo, sent: Outgoing) -> None:
        """Takes a request back, or asks its worker not to begin it. Called on the event loop."""
        if self._network.withdraw(worker, sent.ticket, sent.payloads):
            self.kept.pop(sent.envelope.id, None)
            self._executor.submit(self._extensions.on_send_aborted, sent)
            return
        cancel = agent_pb2.Envelope(id=sent.envelope.id, type=CANCEL)
        with contextlib.suppress(WorkerLostError, SendFailedError):
            self._network.send(worker, cancel.SerializeToString())

    def _is_from_another(self, source: WorkerInfo, identifier: int) -> bool:
        """Returns whether an answer comes from a worker that was not asked."""
        pending = self.pending.get(identifier)
        if pending is None or pending.worker.id == source.id:
            return False
        log.warning("worker %s answers a request to %s; dropped", source.name, pending.worker.name)
        return True

    def _take(self, identifier: int) -> PendingRequest | None:
        """Takes a request out of `pending`; None if it is complete."""
        return self.pending.pop(identifier, None)

    def _fail(self, pending: PendingRequest | None, error: Exception) -> None:
        if pending is not None:
            self._tell_complete(pending)
            pending.future.set_exception(error)
            self._count_end(pending)

    def _tell_complete(self, pending: PendingRequest) -> None:
        if pending.handler.user_values:
            self._extensions.on_complete(pending.identifier)

    def _count_end(self, pending: PendingRequest) -> None:
        if pending.handler.user_values:
            self._calls.end()
