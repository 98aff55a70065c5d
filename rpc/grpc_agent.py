"""The agent on gRPC.

A request's way: `request` packs the value, lets the extensions add their headers, puts tensor bytes into
channels and the envelope into the peer's transport. At the peer, `deliver` collects the payloads on the
event loop, and a thread of the executor unpacks, runs the handler and sends the answer the same way back.
"""

import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, final

from ..errors import (
    AnswerFailedError,
    NotInitializedError,
    RpcCancelledError,
    RpcTimeoutError,
    SendFailedError,
    SerializationError,
    WorkerLostError,
)
from ..proto.v1 import agent_pb2
from .accounting import Activity, Traffic
from .agent import Destination, RpcAgent, holder
from .arrivals import Arrivals
from .channels.router import Arrived
from .control import ControlMessages
from .device_maps import NO_DEVICES, DeviceMap, device_map_of_answer, device_map_to_proto
from .failures import decode_failure, encode_failure
from .futures import Future
from .gather import Gatherings
from .membership import Member
from .messages import (
    Deferred,
    Extension,
    Handler,
    Incoming,
    MessageType,
    Outgoing,
    extension_factories,
)
from .options import RpcBackendOptions
from .parts import Parts
from .quiescence import Quiescence
from .roster import RosterLog
from .serialization import Packed, Packer
from .tensors import Buffer, decode_tensor, encode_tensor
from .worker import WorkerInfo

__all__ = ["GrpcAgent"]

CLOSE_SECONDS = 5.0
"""How long a closing agent waits for threads that still run users' functions."""

DOING = {
    MessageType.CALL: "a call to worker",
    MessageType.RREF_CREATE: "RRef creation via remote() on worker",
    MessageType.RREF_FETCH: "to_here() of a value on worker",
}
"""What a request does, in words."""

E = TypeVar("E", bound=Extension)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sent:
    """What it takes to take a message back: its headers, without its bytes, and where it went."""

    envelope: agent_pb2.Envelope
    ticket: int
    payloads: Sequence[agent_pb2.Payload]
    nbytes: int


@dataclass(slots=True)
class _Pending:
    """A request that is not answered yet."""

    identifier: int
    future: Future
    worker: WorkerInfo
    kind: MessageType.ValueType
    timeout: float
    sent: _Sent | None = None


@final
class GrpcAgent(RpcAgent):
    """Made in three steps: the constructor, `listen`, and `open` once all members are known."""

    def __init__(
        self,
        info: WorkerInfo,
        options: RpcBackendOptions,
        group: str,
        roster: RosterLog | None = None,
        parts: Parts = Parts(),  # noqa: B008 - a frozen value
    ) -> None:
        """Args: who this is; how to behave; which group it joins, and the roster if it is dynamic; its parts."""
        self._process = os.getpid()
        self.info = info
        self.options = options
        self.rpc_timeout = options.rpc_timeout
        self._dynamic = roster is not None
        self._closed = False
        self._shutdown = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._kept: dict[int, tuple[int, object]] = {}
        """What requests that are not over keep, and the workers they went to."""
        self._ids = itertools.count(1)
        self._arrivals = Arrivals()
        self._traffic = Traffic()
        self._activity = Activity()
        self._serving = Activity()
        self._deferred = Activity()
        self._packer = Packer()
        self._extensions: list[Extension] = []
        self.control = ControlMessages(self, parts.scheduler)
        self._gatherings = Gatherings(self)
        self._handlers: dict[MessageType.ValueType, Handler] = {
            MessageType.CONTROL: self.control.handler(),
            **self._gatherings.handlers(),
            MessageType.GREETING: Handler(lambda _message: None),
        }
        self._executor = parts.executor(
            options.num_worker_threads, f"gradwire-{info.name}", lambda: holder.bind_thread(self)
        )
        self._deadlines = parts.deadlines(
            self._expire, self._pending.__contains__, self._pending.__len__, f"gradwire-deadlines-{info.name}"
        )
        self._network = parts.network(info, options, group, self, roster)

    def listen(self) -> str:
        """Starts serving on an ephemeral port; returns the address, host:port."""
        return self._network.listen()

    def open(self, members: Sequence[Member]) -> None:
        """Makes the extensions, and lets the members of the group in."""
        self._network.open(members)
        for factory in extension_factories():
            extension = factory(self)
            self._extensions.append(extension)
            self._handlers.update(extension.handlers())
            if extension.reference_type is not None:
                self._packer.take_out(extension.reference_type)
            self._packer.reduce_with(extension.reducers())
        self._network.admit()

    def worker(self, destination: Destination) -> WorkerInfo:
        """The worker meant."""
        return self._network.worker(destination)

    def workers(self) -> Sequence[WorkerInfo]:
        """All workers of the group, by id."""
        return self._network.workers()

    def why_lost(self, worker: int) -> str | None:
        """Why a worker is lost, if it is."""
        return self._network.lost.get(worker)

    def connect(self, worker: WorkerInfo) -> None:
        """Connects to a worker now."""
        self._network.connect(worker)

    # Sending.

    def request(
        self,
        worker: WorkerInfo,
        kind: MessageType.ValueType,
        value: object,
        *,
        timeout: float | None = None,
        what: str | Sequence[str] = "the value",
        header: Callable[[agent_pb2.Envelope], None] | None = None,
        keep: object = None,
    ) -> Future:
        """Sends a request; a future of its answer."""
        if self._closed:
            raise NotInitializedError(f"worker {self.info.name!r} has shut down its RPC agent")
        seconds = self.rpc_timeout if timeout is None else timeout
        device_map = self._device_map(worker, None)
        packed = self._packer.pack(value, what, device_map)
        envelope = agent_pb2.Envelope(id=next(self._ids), type=kind, device_map=device_map_to_proto(device_map))
        if header is not None:
            header(envelope)
        handler = self._handlers[kind]
        future = Future(self._executor, partial(self._cancel, envelope.id) if handler.cancellable else None)
        if handler.user_values:
            self._activity.begin()
        pending = self._pending[envelope.id] = _Pending(envelope.id, future, worker, kind, seconds)
        if keep is not None:
            self._kept[envelope.id] = worker.id, keep
        try:
            sent = self._dispatch(worker, kind, envelope, packed, None)
            if handler.cancellable:
                envelope.ClearField("body")
                envelope.ClearField("tensors")
                pending.sent = sent
        except (WorkerLostError, SendFailedError) as error:
            self._kept.pop(envelope.id, None)
            if isinstance(error, SendFailedError):
                error = SendFailedError(worker.name, error.reason, _doing(kind))
            self._fail(self._take(envelope.id), error)
        except BaseException:
            self._kept.pop(envelope.id, None)
            self._take(envelope.id)
            self._ended(kind)
            raise
        else:
            if seconds:
                self._deadlines.add(envelope.id, seconds)
        return future

    def post(
        self,
        worker: WorkerInfo,
        kind: MessageType.ValueType,
        value: object,
        *,
        what: str = "the value",
        header: Callable[[agent_pb2.Envelope], None] | None = None,
        reply_to: Incoming | None = None,
    ) -> int:
        """Sends a message that gets no answer; bytes of its body and tensors."""
        packed = self._packer.pack(value, what, self._device_map(worker, reply_to))
        envelope = agent_pb2.Envelope(type=kind)
        if header is not None:
            header(envelope)
        return self._dispatch(worker, kind, envelope, packed, reply_to).nbytes

    def blocking(self) -> contextlib.AbstractContextManager[None]:
        """Around a wait for other workers."""
        return self._executor.blocking()

    def _dispatch(
        self,
        worker: WorkerInfo,
        kind: MessageType.ValueType,
        envelope: agent_pb2.Envelope,
        packed: Packed,
        reply_to: Incoming | None,
    ) -> _Sent:
        """Sends an envelope. `kind` is that of the request, also where the envelope answers it."""
        self._network.check_present(worker)
        device_map = self._device_map(worker, reply_to)
        message = Outgoing(worker, envelope, packed.tensors, packed.references, reply_to, device_map)
        hooked = self._extensions if self._handlers[kind].user_values else []
        left: list[Extension] = []
        try:
            for extension in hooked:
                left.append(extension)
                extension.leaving(message)
            return self._send(message, packed.body)
        except BaseException:
            for extension in left:
                extension.withdrawn(message)
            raise

    def _device_map(self, worker: WorkerInfo, reply_to: Incoming | None) -> DeviceMap:
        if reply_to is None:
            return self.options.device_maps.get(worker.name, NO_DEVICES)
        return device_map_of_answer(reply_to.envelope.device_map)

    def _send(self, message: Outgoing, body: bytes) -> _Sent:
        envelope = message.envelope
        writer = self._network.writer(message.destination)
        envelope.body.CopyFrom(writer.put(memoryview(body)))
        envelope.tensors.extend(
            encode_tensor(tensor, writer.put, message.device_map) for tensor in message.tensors
        )
        ticket = self._network.send(message.destination, envelope.SerializeToString())
        writer.start()
        self._traffic.sent(writer.nbytes)
        return _Sent(envelope, ticket, writer.apart or (), writer.nbytes)

    def _cancel(self, identifier: int) -> bool:
        """Ends a request at its caller's wish; False if it is over."""
        pending = self._take(identifier)
        if pending is None:
            return False
        if pending.sent is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whatever was queued
                self._network.call_soon(self._withdraw, pending.worker, pending.sent)
        self._fail(pending, RpcCancelledError(pending.worker.name))
        return True

    def _withdraw(self, worker: WorkerInfo, sent: _Sent) -> None:
        """Takes a request back; if it is on its way, has the other side not begin it. Called on the loop."""
        if self._network.withdraw(worker, sent.ticket, sent.payloads):
            self._kept.pop(sent.envelope.id, None)
            self._executor.submit(self._withdrawn, Outgoing(worker, sent.envelope, [], [], None))
            return
        cancel = agent_pb2.Envelope(id=sent.envelope.id, type=MessageType.CANCEL)
        with contextlib.suppress(WorkerLostError, SendFailedError):
            self._network.send(worker, cancel.SerializeToString())

    def _withdrawn(self, message: Outgoing) -> None:
        for extension in self._extensions if self._handlers[message.envelope.type].user_values else []:
            extension.withdrawn(message)

    # Receiving, on the event loop and the deadlines' thread: nothing here may block.

    def coming(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """A message is here, but for its payloads."""
        handler = self._handlers.get(envelope.type)
        if handler is not None and handler.cancellable:
            self._arrivals.add(source, envelope)

    def vanished(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """The payloads of a message will not come."""
        self._arrivals.forget(source, envelope)

    def arrived(self, source: WorkerInfo, envelope: agent_pb2.Envelope, payloads: Arrived) -> None:
        """A message is here."""
        if envelope.type == MessageType.CANCEL:
            # Now: on a thread it would come after the calls that wait for one.
            self._arrivals.cancel(source, envelope)
            return
        answers = envelope.type in (MessageType.RESULT, MessageType.ERROR)
        self._executor.submit(self._complete if answers else self._serve, source, envelope, payloads)

    def refused(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """A message cannot be read."""
        self._executor.submit(self._refuse, source, envelope, error)

    def lost(self, worker: WorkerInfo, reason: str) -> None:
        """A worker is gone for good."""
        self._executor.submit(self._worker_lost, worker, reason)

    def _expire(self, identifier: int) -> None:
        # Not taken here: what is still pending when the executor closes is failed then.
        self._executor.submit(self._time_out, identifier)

    # Receiving, on the executor's threads.

    def _complete(self, source: WorkerInfo, envelope: agent_pb2.Envelope, arrived: Arrived) -> None:
        pending = self._take(envelope.id)
        self._kept.pop(envelope.id, None)
        try:
            if envelope.type == MessageType.ERROR:
                error = decode_failure(arrived(envelope.body), source.name)
                for extension in self._extensions:
                    error = extension.failed(error, source)
                raise error
            # An answer that comes too late is read all the same: references in it must be counted.
            message = self._read(source, envelope, arrived, hooked=True)
            message.value = self._unpack(message)
        except Exception as error:
            self._fail(pending, error)
            return
        if pending is not None:
            self._tell_answered(pending)
            pending.future.set_result(message.value)
            self._ended(pending.kind)

    def _serve(self, source: WorkerInfo, envelope: agent_pb2.Envelope, arrived: Arrived) -> None:
        handler = self._handlers.get(envelope.type)
        if handler is None:
            self._refuse(source, envelope, ValueError(f"message type {envelope.type} has no handler here"))
            return
        if handler.cancellable and not self._arrivals.begin(source, envelope):
            cancelled = RpcCancelledError(self.info.name)
            self._tell_unreadable(source, envelope, cancelled)
            self._answer_error(source, envelope, cancelled)  # so that its caller knows that it is over
            return
        if handler.user_values:
            self._activity.begin()
            self._serving.begin()
        message = None
        deferred = False
        try:
            message = self._read(source, envelope, arrived, hooked=handler.user_values)
            self._await_ready(message, handler)
            with self.serving(message):
                try:
                    message.value = self._unpack(message)
                    result = handler.run(message)
                    if isinstance(result, Deferred):
                        deferred = True
                        self._deferred.begin()
                        result.future.add_done_callback(self._answer_later(message))
                        return
                    self._answer(message, result)
                except BaseException as error:
                    message.error = error
                    self._answer_error(source, envelope, error)
        except BaseException as error:
            self._answer_error(source, envelope, error)
        finally:
            if message is not None:
                message.error = None  # its traceback leads back to this frame
            if handler.user_values:
                self._serving.end()
                if not deferred:
                    self._activity.end()

    def _time_out(self, identifier: int) -> None:
        if (pending := self._take(identifier)) is not None:
            self._fail(pending, RpcTimeoutError(pending.worker.name, pending.timeout, _doing(pending.kind)))

    def _read(
        self, source: WorkerInfo, envelope: agent_pb2.Envelope, arrived: Arrived, *, hooked: bool
    ) -> Incoming:
        nbytes = 0

        def get(payload: agent_pb2.Payload) -> Buffer:
            nonlocal nbytes
            data = arrived(payload)
            nbytes += len(data)
            return data

        try:
            tensors = [decode_tensor(tensor, get) for tensor in envelope.tensors]
            body = get(envelope.body)
        except Exception as error:
            self._tell_unreadable(source, envelope, error)
            raise
        self._traffic.received(nbytes)
        message = Incoming(source, envelope, body, tensors, nbytes)
        for extension in self._extensions if hooked else []:
            extension.arriving(message)
        return message

    def _tell_unreadable(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        for extension in self._extensions:
            try:
                extension.unreadable(Incoming(source, envelope, b"", []), error)
            except Exception:
                log.exception("the headers of an unreadable message from worker %s", source.name)

    def _unpack(self, message: Incoming) -> Any:
        try:
            return self._packer.unpack(message.body, message.tensors, message.references)
        except (AttributeError, ImportError) as error:
            raise SerializationError(
                "the message",
                f"worker {self.info.name!r} cannot find what it names: {type(error).__name__}: {error}. "
                "RPC pickler does not serialize functions and classes, it names them: define them at the top "
                "level of a module that both workers can import",
            ) from error

    @contextlib.contextmanager
    def serving(self, message: Incoming) -> Iterator[None]:
        """The scopes in which a request is handled."""
        handler = self._handlers[message.envelope.type]
        with contextlib.ExitStack() as stack:
            for extension in self._extensions if handler.user_values else []:
                stack.enter_context(extension.scope(message))
            yield

    def _await_ready(self, message: Incoming, handler: Handler) -> None:
        for extension in self._extensions if handler.user_values else []:
            if (ready := extension.not_ready(message)) is not None:
                self._executor.wait(ready)

    def _answer(self, request: Incoming, value: object) -> None:
        if not request.envelope.id:
            return
        envelope = agent_pb2.Envelope(id=request.envelope.id, type=MessageType.RESULT)
        packed = self._packer.pack(value, "the result", self._device_map(request.source, request))
        try:
            self._dispatch(request.source, request.envelope.type, envelope, packed, request)
        except WorkerLostError:
            pass  # a caller that is gone needs no answer
        except SendFailedError as error:
            raise AnswerFailedError(self.info.name, error.reason) from None

    def _answer_later(self, request: Incoming) -> Any:
        def done(future: "concurrent.futures.Future[Any]") -> None:
            self._executor.submit(answer, future)

        def answer(future: "concurrent.futures.Future[Any]") -> None:
            try:
                # Not raised here: every raise would add a frame to an error that is kept.
                if (error := future.exception()) is not None:
                    self._answer_error(request.source, request.envelope, error)
                else:
                    self._answer(request, future.result())
            except BaseException as error:
                self._answer_error(request.source, request.envelope, error)
            finally:
                self._deferred.end()
                if self._handlers[request.envelope.type].user_values:
                    self._activity.end()

        return done

    def _answer_error(self, source: WorkerInfo, request: agent_pb2.Envelope, error: BaseException) -> None:
        if not request.id:
            log.error("a message from worker %s failed", source.name, exc_info=error)
            return
        envelope = agent_pb2.Envelope(id=request.id, type=MessageType.ERROR)
        with contextlib.suppress(WorkerLostError, SendFailedError):
            self._send(Outgoing(source, envelope, [], [], None), encode_failure(error))

    def _refuse(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """A message that cannot be read: its sender, or who waits for it here, gets the error."""
        self._tell_unreadable(source, envelope, error)
        if envelope.type in (MessageType.RESULT, MessageType.ERROR):
            self._kept.pop(envelope.id, None)
            self._fail(self._take(envelope.id), error)
        else:
            self._arrivals.forget(source, envelope)  # an answer may have the number of another request
            self._answer_error(source, envelope, error)

    def _worker_lost(self, worker: WorkerInfo, reason: str) -> None:
        log.info("worker %s is lost: %s", worker.name, reason)
        for identifier, pending in list(self._pending.items()):
            if pending.worker.id == worker.id:
                self._fail(self._take(identifier), WorkerLostError(worker.name, reason))
        for identifier, (destination, _) in list(self._kept.items()):
            if destination == worker.id:
                self._kept.pop(identifier, None)
        self._gatherings.worker_lost(worker)
        for extension in self._extensions:
            extension.worker_lost(worker)

    def _take(self, identifier: int) -> _Pending | None:
        """Who waits for an answer; nobody else gets it."""
        return self._pending.pop(identifier, None)

    def _fail(self, pending: _Pending | None, error: Exception) -> None:
        if pending is not None:
            self._tell_answered(pending)
            pending.future.set_exception(error)
            self._ended(pending.kind)

    def _tell_answered(self, pending: _Pending) -> None:
        if self._handlers[pending.kind].user_values:
            for extension in self._extensions:
                extension.answered(pending.identifier)

    def _ended(self, kind: MessageType.ValueType) -> None:
        if self._handlers[kind].user_values:
            self._activity.end()

    # The rest.

    def submit(self, task: Callable[..., None], *args: Any) -> None:
        """Runs a task on a thread of the executor."""
        self._executor.submit(task, *args)

    def extension(self, kind: type[E]) -> E:
        """The agent's extension of this class."""
        return next(extension for extension in self._extensions if isinstance(extension, kind))

    def debug_info(self) -> Mapping[str, Any]:
        """Counts of what is alive and of what has been sent (bytes of bodies and tensors)."""
        info: dict[str, Any] = {
            "name": self.info.name,
            "agent.thread_pool_size": self.options.num_worker_threads,
            "agent.num_idle_threads": self._executor.idle,
            "agent.num_pending_requests": self._executor.queued,
            "agent.client_active_calls": len(self._pending),
            "agent.server_active_calls": self._serving.running,
            "agent.server_active_async_calls": self._deferred.running,
            "executor_threads": self._executor.threads,
            "lost_workers": {self.worker(lost).name: why for lost, why in self._network.lost.items()},
            **self._traffic.counts(),
            "transports": self._network.transport_names(),
        }
        for extension in self._extensions:
            info.update(extension.live_objects())
        return info

    def all_gather(
        self, topic: str, value: object, workers: Sequence[WorkerInfo], timeout: float
    ) -> dict[int, Any]:
        """See `Gatherings.all_gather`."""
        return self._gatherings.all_gather(topic, value, workers, timeout)

    @property
    def dynamic(self) -> bool:
        """Do workers join and leave at any time?"""
        return self._dynamic

    def join(self, timeout: float) -> None:
        """Returns when nothing would be lost by leaving."""
        quiescence = Quiescence(self, self._activity, self._gatherings, self._unanswered)
        if self._dynamic:
            quiescence.wait_here(timeout)
        else:
            quiescence.wait_everywhere(timeout)

    def shutdown(self, *, graceful: bool, timeout: float) -> None:
        """Leaves the group, when everybody does if `graceful`."""
        if os.getpid() != self._process:
            return  # in a forked child, which has none of the threads
        with self._shutdown:
            if self._closed:
                return
            try:
                if graceful:
                    self.join(timeout)
            finally:
                self._close()

    def _unanswered(self) -> Mapping[str, int]:
        """How many users' calls to whom are not answered."""
        pending = [p for p in list(self._pending.values()) if self._handlers[p.kind].user_values]
        return Counter(p.worker.name for p in pending)

    def _close(self) -> None:
        self._closed = True
        self._network.leave()
        for extension in self._extensions:
            extension.close()
        self._network.disconnect()
        self.control.close()
        self._deadlines.close()
        for identifier in list(self._pending):
            error = NotInitializedError(f"worker {self.info.name!r} has shut down its RPC agent")
            self._fail(self._take(identifier), error)
        self._kept.clear()
        self._executor.close(CLOSE_SECONDS)
        self._network.release()


def _doing(kind: MessageType.ValueType) -> str:
    return DOING.get(kind) or f"a {MessageType.Name(kind)} request to worker"
