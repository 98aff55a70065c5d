"""The agent on gRPC.

A request's way: `request` packs the value, lets the extensions add their headers, puts tensor bytes into
channels and the envelope into the peer's transport. At the peer, `deliver` collects the payloads on the
event loop, and a thread of the executor unpacks, runs the handler and sends the answer the same way back.
"""

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, final

import grpc

from ..c10d.addresses import format_address
from ..c10d.event_loop import acquire_event_loop
from ..errors import NotInitializedError, RpcTimeoutError, UnknownWorkerError, WorkerLostError
from ..proto.v1 import agent_pb2
from .agent import Destination, RpcAgent, holder
from .channels.chunked import ChunkedChannel
from .channels.inline import InlineChannel
from .channels.local import LocalChannel
from .channels.router import Arrived, ChannelRouter
from .control import ControlMessages
from .deadlines import Deadlines
from .executor import Executor
from .failures import decode_failure, encode_failure
from .futures import Future
from .gather import Gatherings
from .handshake import Handshake
from .membership import Member
from .messages import (
    Deferred,
    Extension,
    Handler,
    Incoming,
    MessageType,
    Outgoing,
    Reply,
    extension_factories,
)
from .options import RpcBackendOptions
from .serialization import Packed, Packer
from .tensors import decode_tensor, encode_tensor
from .transports.base import Transport, TransportClosedError
from .transports.grpc_stream import GrpcStreams
from .transports.loopback import LoopbackTransport
from .transports.settings import SERVER_OPTIONS, SERVICE
from .worker import WorkerInfo

__all__ = ["GrpcAgent"]

DRAIN_SECONDS = 5.0
"""How long a closing agent waits for its peers to take what is queued for them."""

GRACE_SECONDS = 1.0
"""How long peers that are leaving too may take to end their streams; then they are cut."""

E = TypeVar("E", bound=Extension)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """A request that is not answered yet."""

    future: Future
    worker: WorkerInfo
    kind: MessageType.ValueType
    timeout: float


class _Activity:
    """How many users' calls are under way here, and how many there have been."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.running = 0
        self.total = 0

    def begin(self) -> None:
        with self._changed:
            self.running += 1
            self.total += 1

    def end(self) -> None:
        with self._changed:
            self.running -= 1
            if not self.running:
                self._changed.notify_all()

    def wait_for_none(self, seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self.running, seconds)


@final
class GrpcAgent(RpcAgent):
    """Made in three steps: the constructor, `listen`, and `open` once all members are known."""

    def __init__(self, info: WorkerInfo, options: RpcBackendOptions, group: str) -> None:
        self.info = info
        self.options = options
        self._closed = False
        self._shutdown = threading.Lock()
        self._members: dict[int, Member] = {}
        self._by_name: dict[str, WorkerInfo] = {}
        self._lost: dict[int, str] = {}
        self._transports: dict[int, Transport] = {}
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)
        self._counts: Counter[str] = Counter()
        self._activity = _Activity()
        self._packer = Packer()
        self._extensions: list[Extension] = []
        self.control = ControlMessages(self)
        self._gatherings = Gatherings(self)
        self._handlers: dict[int, Handler] = {
            MessageType.CONTROL: self.control.handler(),
            MessageType.GATHER: self._gatherings.handler(),
        }
        self._executor = Executor(
            options.num_worker_threads, f"gradwire-{info.name}", lambda: holder.bind_thread(self)
        )
        self._deadlines = Deadlines(
            self._expire, self._pending.__contains__, self._pending.__len__, f"gradwire-deadlines-{info.name}"
        )
        self._events = acquire_event_loop()
        self._events.run(self._build(group))

    async def _build(self, group: str) -> None:
        loop = self._events.loop
        self._handshake = Handshake(group, self.info)
        self._streams = GrpcStreams(loop, self._handshake, self)
        self._chunks = ChunkedChannel(
            loop, self._handshake, lambda peer: self._members[peer].address, self.options.channels
        )
        self._router = ChannelRouter(
            self.options.channels,
            self.info.id,
            small=InlineChannel(),
            large=self._chunks,
            local=LocalChannel(),
        )
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        methods = {
            "Exchange": grpc.stream_stream_rpc_method_handler(self._streams.serve),
            "Transfer": grpc.stream_unary_rpc_method_handler(self._chunks.serve),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    def listen(self) -> str:
        """Starts serving on an ephemeral port; returns the address, host:port."""

        async def start() -> int:
            port = self._server.add_insecure_port(format_address(self.options.host, 0))
            await self._server.start()
            return cast(int, port)

        return format_address(self.options.host, self._events.run(start()))

    def open(self, members: Sequence[Member]) -> None:
        """Lets the members of the group in, and makes the extensions."""
        self._members = {member.info.id: member for member in members}
        self._by_name = {member.info.name: member.info for member in members}
        loop = self._events.loop
        for member in members:
            if member.info.id == self.info.id:
                self._transports[member.info.id] = LoopbackTransport(loop, self.info, self)
            else:
                self._transports[member.info.id] = self._streams.add(member.info, member.address)
        for factory in extension_factories():
            extension = factory(self)
            self._extensions.append(extension)
            self._handlers.update(extension.handlers())
            if extension.reference_type is not None:
                self._packer.take_out(extension.reference_type)
        loop.call_soon_threadsafe(
            self._handshake.open, {member.info.id: member.info for member in members}
        )

    # Who is there.

    def worker(self, destination: Destination) -> WorkerInfo:
        """The worker meant."""
        if isinstance(destination, WorkerInfo):
            member = self._members.get(destination.id)
            found = member.info if member is not None and member.info.name == destination.name else None
        elif isinstance(destination, str):
            found = self._by_name.get(destination)
        elif isinstance(destination, int) and not isinstance(destination, bool):
            member = self._members.get(destination)
            found = member.info if member is not None else None
        else:
            raise TypeError(f"destination is {destination!r}: give a worker's name, id or WorkerInfo")
        if found is None:
            raise UnknownWorkerError(destination, [member.info.name for member in self._members.values()])
        return found

    def workers(self) -> Sequence[WorkerInfo]:
        """All workers of the group, by id."""
        return [member.info for _, member in sorted(self._members.items())]

    def why_lost(self, worker: int) -> str | None:
        """Why a worker is lost, if it is."""
        return self._lost.get(worker)

    def connect(self, worker: WorkerInfo) -> None:
        """Connects to a worker now."""
        self._transports[worker.id].connect()

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
    ) -> Future:
        """Sends a request; a future of its answer."""
        if self._closed:
            raise NotInitializedError(f"worker {self.info.name!r} has shut down its RPC agent")
        seconds = self.options.rpc_timeout if timeout is None else timeout
        packed = self._packer.pack(value, what)
        envelope = agent_pb2.Envelope(id=next(self._ids), type=kind)
        if header is not None:
            header(envelope)
        future = Future(self._executor)
        if self._handlers[kind].user_values:
            self._activity.begin()
        self._pending[envelope.id] = _Pending(future, worker, kind, seconds)
        try:
            self._dispatch(worker, kind, envelope, packed, None)
        except WorkerLostError as error:
            self._fail(self._take(envelope.id), error)
        except BaseException:
            self._take(envelope.id)
            self._ended(kind)
            raise
        else:
            if seconds:
                self._deadlines.add(envelope.id, seconds)
        return future

    def post(self, worker: WorkerInfo, kind: MessageType.ValueType, value: object) -> None:
        """Sends a message that gets no answer."""
        self._dispatch(worker, kind, agent_pb2.Envelope(type=kind), self._packer.pack(value, "the value"), None)

    def run_later(self, task: Any, *args: Any) -> None:
        """Runs a task on a thread of the executor."""
        self._executor.submit(task, *args)

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
    ) -> None:
        """Sends an envelope. `kind` is that of the request, also where the envelope answers it."""
        message = Outgoing(worker, envelope, packed.tensors, packed.references, reply_to)
        hooked = self._extensions if self._handlers[kind].user_values else []
        left: list[Extension] = []
        try:
            for extension in hooked:
                left.append(extension)
                extension.leaving(message)
            self._send(message, packed.body)
        except BaseException:
            for extension in left:
                extension.withdrawn(message)
            raise

    def _send(self, message: Outgoing, body: bytes) -> None:
        worker, envelope = message.destination, message.envelope
        if worker.id in self._lost:
            raise WorkerLostError(worker.name, self._lost[worker.id])
        write = self._router.writer(worker.id)

        def put(data: memoryview) -> agent_pb2.Payload:
            self._counts["bytes_sent"] += data.nbytes
            return write(data)

        envelope.body.CopyFrom(put(memoryview(body)))
        envelope.tensors.extend(encode_tensor(tensor, put) for tensor in message.tensors)
        try:
            self._transports[worker.id].send(envelope.SerializeToString())
        except TransportClosedError as error:
            raise WorkerLostError(worker.name, str(error)) from None
        self._counts["messages_sent"] += 1

    # Receiving, on the event loop: nothing here may block.

    def deliver(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """An envelope has arrived."""
        self._counts["messages_received"] += 1
        try:
            arrived = self._router.collect(source.id, envelope)
        except ValueError as error:
            self._executor.submit(self._refuse, source, envelope, error)
            return
        if isinstance(arrived, asyncio.Future):
            arrived.add_done_callback(lambda done: self._collected(source, envelope, done))
        else:
            self._executor.submit(self._process, source, envelope, arrived)

    def closed(self, peer: WorkerInfo, reason: str) -> None:
        """The connection to a worker is over."""
        if self._closed or peer.id in self._lost:
            return
        self._lost[peer.id] = reason
        for channel in self._router.channels:
            channel.drop(peer.id, reason)
        self._executor.submit(self._worker_lost, peer, reason)

    def _collected(
        self, source: WorkerInfo, envelope: agent_pb2.Envelope, done: "asyncio.Future[Arrived]"
    ) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._executor.submit(self._process, source, envelope, done.result())
        elif isinstance(error, ValueError):
            self._executor.submit(self._refuse, source, envelope, error)
        # else the worker is lost, which fails what waits for this message

    def _expire(self, identifier: int) -> None:
        if (pending := self._take(identifier)) is not None:
            kind = MessageType.Name(pending.kind)
            error = RpcTimeoutError(pending.worker.name, pending.timeout, f"a {kind} request")
            self._executor.submit(self._fail, pending, error)

    # Receiving, on the executor's threads.

    def _process(self, source: WorkerInfo, envelope: agent_pb2.Envelope, arrived: Arrived) -> None:
        if envelope.type in (MessageType.RESULT, MessageType.ERROR):
            self._complete(source, envelope, arrived)
        else:
            self._serve(source, envelope, arrived)

    def _complete(self, source: WorkerInfo, envelope: agent_pb2.Envelope, arrived: Arrived) -> None:
        pending = self._take(envelope.id)
        try:
            if envelope.type == MessageType.ERROR:
                raise decode_failure(arrived(envelope.body), source.name)
            # An answer that comes too late is read all the same: references in it must be counted.
            message = self._read(source, envelope, arrived, hooked=True)
            message.value = self._packer.unpack(arrived(envelope.body), message.tensors, message.references)
        except Exception as error:
            self._fail(pending, error)
            return
        if pending is not None:
            pending.future.set_result(message.value)
            self._ended(pending.kind)

    def _serve(self, source: WorkerInfo, envelope: agent_pb2.Envelope, arrived: Arrived) -> None:
        handler = self._handlers.get(envelope.type)
        if handler is None:
            self._refuse(source, envelope, ValueError(f"message type {envelope.type} has no handler here"))
            return
        if handler.user_values:
            self._activity.begin()
        then = None
        message = None
        deferred = False
        try:
            message = self._read(source, envelope, arrived, hooked=handler.user_values)
            with self._scopes(message, handler):
                try:
                    message.value = self._packer.unpack(
                        arrived(envelope.body), message.tensors, message.references
                    )
                    result = handler.run(message)
                    if isinstance(result, Deferred):
                        deferred = True
                        result.future.add_done_callback(self._answer_later(message))
                        return
                    if isinstance(result, Reply):
                        result, then = result.value, result.then
                    self._answer(message, result)
                except BaseException as error:
                    message.error = error
                    self._answer_error(source, envelope, error)
                if then is not None:
                    then()
        except BaseException as error:
            self._answer_error(source, envelope, error)
        finally:
            if message is not None:
                message.error = None  # its traceback leads back to this frame
            if handler.user_values and not deferred:
                self._activity.end()

    def _read(
        self, source: WorkerInfo, envelope: agent_pb2.Envelope, arrived: Arrived, *, hooked: bool
    ) -> Incoming:
        tensors = [decode_tensor(tensor, arrived) for tensor in envelope.tensors]
        self._counts["bytes_received"] += len(arrived(envelope.body)) + sum(t.nbytes for t in tensors if not t.is_sparse)
        message = Incoming(source, envelope, tensors)
        for extension in self._extensions if hooked else []:
            extension.arriving(message)
        return message

    @contextlib.contextmanager
    def _scopes(self, message: Incoming, handler: Handler) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for extension in self._extensions if handler.user_values else []:
                stack.enter_context(extension.scope(message))
            yield

    def _answer(self, request: Incoming, value: object) -> None:
        if not request.envelope.id:
            return
        envelope = agent_pb2.Envelope(id=request.envelope.id, type=MessageType.RESULT)
        packed = self._packer.pack(value, "the result")
        # A caller that is gone needs no answer.
        with contextlib.suppress(WorkerLostError):
            self._dispatch(request.source, request.envelope.type, envelope, packed, request)

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
                if self._handlers[request.envelope.type].user_values:
                    self._activity.end()

        return done

    def _answer_error(self, source: WorkerInfo, request: agent_pb2.Envelope, error: BaseException) -> None:
        if not request.id:
            log.error("a message from worker %s failed", source.name, exc_info=error)
            return
        envelope = agent_pb2.Envelope(id=request.id, type=MessageType.ERROR)
        with contextlib.suppress(WorkerLostError):
            self._send(Outgoing(source, envelope, [], [], None), encode_failure(error))

    def _refuse(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: ValueError) -> None:
        """A message that cannot be read: its sender, or who waits for it here, gets the error."""
        if envelope.type in (MessageType.RESULT, MessageType.ERROR):
            self._fail(self._take(envelope.id), error)
        else:
            self._answer_error(source, envelope, error)

    def _worker_lost(self, worker: WorkerInfo, reason: str) -> None:
        log.info("worker %s is lost: %s", worker.name, reason)
        for identifier, pending in list(self._pending.items()):
            if pending.worker.id == worker.id:
                self._fail(self._take(identifier), WorkerLostError(worker.name, reason))
        self._gatherings.worker_lost(worker)
        self.control.forget(worker.id)
        for extension in self._extensions:
            extension.worker_lost(worker)

    def _take(self, identifier: int) -> _Pending | None:
        """Who waits for an answer; nobody else gets it."""
        return self._pending.pop(identifier, None)

    def _fail(self, pending: _Pending | None, error: Exception) -> None:
        if pending is not None:
            pending.future.set_exception(error)
            self._ended(pending.kind)

    def _ended(self, kind: MessageType.ValueType) -> None:
        if self._handlers[kind].user_values:
            self._activity.end()

    # The rest.

    def extension(self, kind: type[E]) -> E:
        """The agent's extension of this class."""
        return next(extension for extension in self._extensions if isinstance(extension, kind))

    def debug_info(self) -> Mapping[str, Any]:
        """Counts of what is alive and of what has been sent (bytes of bodies and tensors)."""
        info: dict[str, Any] = {
            "name": self.info.name,
            "pending_calls": len(self._pending),
            "active_calls": self._activity.running,
            "pending_control_messages": self.control.pending(),
            "executor_threads": self._executor.threads,
            "lost_workers": {self._members[worker].info.name: why for worker, why in self._lost.items()},
            **{
                name: self._counts[name]
                for name in ("messages_sent", "messages_received", "bytes_sent", "bytes_received")
            },
            "transports": {self._members[peer].info.name: t.name for peer, t in self._transports.items()},
        }
        for extension in self._extensions:
            info.update(extension.live_objects())
        return info

    def all_gather(
        self, topic: str, value: object, workers: Sequence[WorkerInfo], timeout: float
    ) -> dict[int, Any]:
        """See `Gatherings.all_gather`."""
        return self._gatherings.all_gather(topic, value, workers, timeout)

    def shutdown(self, *, graceful: bool, timeout: float) -> None:
        """Leaves the group, when everybody does if `graceful`."""
        with self._shutdown:
            if self._closed:
                return
            try:
                if graceful:
                    self._wait_for_all(timeout)
            finally:
                self._close()

    def _wait_for_all(self, timeout: float) -> None:
        """Returns when no worker has calls under way and none can arise.

        Every worker waits until nothing runs on it and tells how many calls there have been. Two rounds with
        the same numbers mean that nothing happened in between. (After Mattern's four-counter method.)
        """
        deadline = time.monotonic() + timeout if timeout else None
        before = None
        while True:
            if not self._activity.wait_for_none(deadline and max(0.0, deadline - time.monotonic())):
                raise RpcTimeoutError(self.info.name, timeout, "shutdown: calls from or")
            left = max(1e-3, deadline - time.monotonic()) if deadline else 0.0
            totals = self.all_gather("shutdown", self._activity.total, self.workers(), left)
            if totals == before:
                return
            before = totals

    def _close(self) -> None:
        self._closed = True
        for extension in self._extensions:
            extension.close()
        self._events.run(self._disconnect())
        self.control.close()
        self._deadlines.close()
        for identifier in list(self._pending):
            error = NotInitializedError(f"worker {self.info.name!r} has shut down its RPC agent")
            self._fail(self._take(identifier), error)
        self._executor.close(DRAIN_SECONDS)
        self._events.release()

    async def _disconnect(self) -> None:
        await asyncio.gather(*(t.close(DRAIN_SECONDS) for t in self._transports.values()))
        await asyncio.gather(*(channel.close() for channel in self._router.channels))
        await self._server.stop(GRACE_SECONDS)
