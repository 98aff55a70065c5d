"""Values to messages and back, with what the extensions add to them.

On the way down `Values` pickles, the hooks of the `Extensions` add their headers, and `Codec` puts payloads into
channels and the envelope into the transport. On the way up `Codec` collects the payloads, the hooks read the
headers, and `Values` unpickles.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

import torch

from ...errors import LimitReachedError, Outcome, RemoteError, RpcError, SerializationError, WorkerSuspectError
from ...net.security import Audit
from ...proto.v1 import agent_pb2
from ..channels.base import PayloadLostError
from ..channels.broadcast import Broadcast
from ..channels.cuda.devices import DeviceStaging
from ..channels.payload_writer import PayloadWriter
from ..channels.payloads import PayloadReader, body_of, has_come, read_inline
from ..contracts.devices import NO_DEVICES, DeviceBuffer, DeviceMap, device_map_of_answer
from ..contracts.extension import Awaited, Extension
from ..contracts.messages import Buffer, Handler, Incoming, MessageType, Outgoing, Request
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import WorkerInfo
from ..peers.control import ControlStreams
from ..peers.peer import INLINE, Peer
from ..wire.failures import decode_failure, encode_failure
from ..wire.pickling import Packed, Packer, PickleReader, dumps
from ..wire.plain_pickle import RestrictedReader
from ..wire.small_tensors import decode_inline, encode_inline
from ..wire.tensors import UnmappedDeviceError, decode_tensors, encode_tensors

__all__ = ["Codec", "Extensions", "Values"]

log = logging.getLogger(__name__)


class _Handlers(dict[MessageType.ValueType, Handler]):
    def __missing__(self, kind: MessageType.ValueType) -> Handler:
        name = MessageType.Name(kind) if kind in MessageType.values() else str(kind)
        raise ValueError(f"message type {name} has no handler here: list its extension in gradwire.extensions")


@final
class Extensions:
    """Calls the hooks of an agent's extensions, in the order in which they were added.

    The hooks are described in contracts/extension.py.
    """

    def __init__(self, packer: Packer) -> None:
        """Args: packer: pickles messages; the extensions are added to it, too."""
        self.handlers: dict[MessageType.ValueType, Handler] = _Handlers()
        """The handlers of all extensions, by message type."""
        self._packer = packer
        self._collecting = threading.Lock()
        """Held while the hooks are collected: of two threads, the later one must see what both have changed."""
        self._extensions: Sequence[Extension] = ()
        self._added: list[tuple[Extension, Mapping[MessageType.ValueType, Handler]]] = []
        """The extensions with their handlers, as no other one observes them."""
        self._basic: dict[MessageType.ValueType, Handler] = {}
        """The handlers of messages that need no extension."""
        self.by_class: dict[type, Any] = {}
        """The extensions by their classes, and the bases of these."""
        # The hooks that some extension overrides. Those of requests are called from where there is no message yet.
        self.on_request: Sequence[Callable[[int, WorkerInfo, Request], None]] = ()
        self.encode_request: Sequence[Callable[[MessageType.ValueType, object], object]] = ()
        self.on_arrival: Sequence[Callable[[WorkerInfo, agent_pb2.Envelope], None]] = ()
        self.wait_before_run: Sequence[Callable[[agent_pb2.Envelope], Sequence[Awaited]]] = ()
        self._on_send: Sequence[tuple[Extension, Callable[[Outgoing], None]]] = ()
        self._on_receive: Sequence[tuple[Extension, Callable[[Incoming], None]]] = ()
        self._scope: Sequence[Callable[[Incoming], AbstractContextManager[None] | None]] = ()
        self.end_hooks: Sequence[Callable[[int], None]] = ()
        """`on_complete` of the extensions that are told of the ends of calls."""
        self.observes = False
        """Whether some extension looks at messages without headers."""

    def add_handlers(self, of_collectives: Mapping[MessageType.ValueType, Handler]) -> None:
        """Adds the handlers of messages that need no extension: greetings, and those of collectives."""
        greeting = Handler(lambda _message: None, description="the announcement of a new worker to worker")
        self._basic = {MessageType.GREETING: greeting, **of_collectives}
        self.handlers.update(self._basic)

    def add(self, extension: Extension) -> None:
        """Adds an extension: its handlers, and its hooks on messages that carry users' values."""
        self._added.append((extension, extension.handlers()))
        self._packer.add(extension)
        self._extensions = (*self._extensions, extension)
        for kind in type(extension).__mro__:
            self.by_class.setdefault(kind, extension)
        extension.on_enabled = self._collect
        self._collect()

    def _collect(self) -> None:
        """Collects the handlers and the hooks of the extensions that are on."""
        with self._collecting:
            handlers = dict(self._basic)
            for extension, own in self._added:
                handlers.update(own)
                if extension.is_on:
                    handlers = {kind: extension.observe(each) for kind, each in handlers.items()}
            self.handlers.update(handlers)
            self.on_request = self._overridden("on_request")
            self.encode_request = self._overridden("encode_request")
            self.on_arrival = self._overridden("on_arrival")
            self.wait_before_run = self._overridden("wait_before_run")
            self._on_send = [(each.__self__, each) for each in self._overridden("on_send")]
            self._on_receive = [(each.__self__, each) for each in self._overridden("on_receive")]
            self._scope = self._overridden("scope")
            self.end_hooks = [each for each in self._overridden("on_complete") if each.__self__.watches_ends]
            self.observes = any(each.is_on and each.observes_requests for each in self._extensions)

    def _overridden(self, hook: str) -> Sequence[Any]:
        """Returns this method of each extension that overrides it."""
        default = getattr(Extension, hook)
        return [
            getattr(each, hook)
            for each in self._extensions
            if each.is_on and getattr(type(each), hook) is not default
        ]

    # Sending.

    def on_send(self, message: Outgoing) -> None:
        """Calls `on_send` of the extensions, which add their headers to a message that is about to be sent.

        If one raises, so does this, after `on_send_aborted` of this extension and of those before it.
        """
        envelope, references, request = message.envelope, message.references, message.reply_to
        try:
            for extension, on_send in self._on_send:
                if references and extension.adds_to_references:
                    pass
                elif not message.user_values:
                    continue
                elif request is not None:
                    if type(extension) not in request.state:
                        continue
                elif extension.adds_if is not None and not extension.adds_if():
                    continue
                on_send(message)
                envelope.has_headers = True
        except BaseException:
            self.on_send_aborted(message, extension)
            raise

    def on_send_aborted(self, message: Outgoing, last: Extension | None = None) -> None:
        """Has the extensions, up to the last one that was called, undo `on_send`: the message was not sent."""
        for extension in self._extensions:
            extension.on_send_aborted(message)
            if extension is last:
                return

    def on_send_postponed(self, message: Outgoing) -> None:
        """Tells the extensions that a message is not sent before its receiver is back."""
        for extension in self._extensions:
            extension.on_send_postponed(message)

    def on_postponed_sent(self, message: Outgoing) -> None:
        """Tells the extensions that a message which was postponed is sent."""
        for extension in self._extensions:
            extension.on_postponed_sent(message)

    def on_complete(self, identifier: int) -> None:
        """Tells the extensions that a request of this worker, given by its id, has an answer or has failed.

        What one of them raises is logged: the request ends all the same.
        """
        for on_complete in self.end_hooks:
            try:
                on_complete(identifier)
            except Exception:
                log.exception("the end of a call cannot be noted")

    def on_failure(self, identifier: int, error: BaseException, outcome: Outcome) -> None:
        """Tells the extensions why a request of this worker has failed; see `on_complete`."""
        for extension in self._extensions:
            try:
                extension.on_failure(identifier, error, outcome)
            except Exception:
                log.exception("the failure of a call cannot be noted")

    def map_error(self, error: Exception, worker: WorkerInfo) -> Exception:
        """Returns the exception to raise in the caller for the one that a worker has answered with."""
        for extension in self._extensions:
            error = extension.map_error(error, worker)
        return error

    # Receiving.

    def on_receive(self, message: Incoming) -> None:
        """Calls `on_receive` of the extensions, which read the headers of a message before it is unpickled.

        Called if there are headers, or some extension `observes`. If one of them raises, the handler of the
        message is told first: what waits for the message must end.
        """
        has_header, references = message.envelope.HasField, message.envelope.references
        try:
            for extension, on_receive in self._on_receive:
                if (
                    extension.header is None
                    or extension.observes_requests
                    or (references and extension.adds_to_references)
                    or has_header(extension.header)
                ):
                    on_receive(message)
        except Exception as error:
            handler = self.handlers.get(message.envelope.type)  # an answer has none
            if handler is not None and handler.on_error is not None:
                handler.on_error(message, error)
            raise

    def may_repeat(self) -> bool:
        """Returns whether a request that this thread sends may be sent again by another one."""
        return all(extension.may_repeat() for extension in self._extensions)

    def on_decode_error(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """Tells the extensions of a message that will not be decoded, and why; logs what they raise."""
        for extension in self._extensions:
            try:
                extension.on_decode_error(Incoming(source, envelope, b"", []), error)
            except Exception:
                log.exception("the headers of a message from worker %s cannot be processed", source.name)

    def scope(self, message: Incoming) -> AbstractContextManager[object] | None:
        """Returns the context for running a request's handler, if the extensions have one."""
        if not message.state or not self.handlers[message.envelope.type].user_values:
            return None
        scopes = []
        for scope in self._scope:
            if (found := scope(message)) is not None:
                scopes.append(found)
        if len(scopes) > 1:
            return _nested(scopes)
        return scopes[0] if scopes else None

    # Lifecycle.

    def live_objects(self) -> Mapping[str, int]:
        """Returns the extensions' counts of live objects, by name, for the agent's debug info."""
        return {name: count for extension in self._extensions for name, count in extension.live_objects().items()}

    def close(self) -> None:
        """Closes the extensions. Called when the agent has shut down."""
        for extension in self._extensions:
            extension.close()

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:
        """Tells the extensions that this process is a forked child."""
        self._collecting = threading.Lock()  # which another thread of the parent may have held
        for extension in self._extensions:
            extension.leave_to_parent(why_useless)


@contextlib.contextmanager
def _nested(scopes: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    """Context manager that enters several, and leaves them in the opposite order."""
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope)
        yield


@final
class Values:
    """Pickles and unpickles for one agent. Safe to use from any thread."""

    def __init__(self, me: WorkerInfo, options: RpcBackendOptions, packer: Packer, audit: Audit) -> None:
        """The policy of the options says what is unpickled, and the audit log has what is not."""
        self.me = me
        self.packer = packer
        self._options = options
        self._audit = audit
        policy = options.policy
        self._reader = RestrictedReader(me, policy, audit) if policy.restricts else PickleReader(me)
        self.unpack = self._reader.read
        """Returns the value of a message: see `RestrictedReader.read`."""
        # Pickles without tensors or references apart: of control messages and errors.
        self.dumps = partial(dumps, packer.pickler)
        """Returns a pickle of a value with all that is in it."""
        self.load = self._reader.load
        """Returns the value of a pickle of a worker. Raises PolicyError, or what unpickling raises."""

    def pack(
        self,
        value: object,
        label: str | Sequence[str],
        worker: WorkerInfo,
        device_map: DeviceMap,
        *,
        is_answer: bool = False,
    ) -> Packed:
        """Pickles a value for a worker. Raises SerializationError."""
        try:
            return self.packer.pack(value, label, device_map)
        except SerializationError as error:
            raise self.explained(error, worker, is_answer=is_answer) from error.__cause__

    def explained(
        self, error: SerializationError, worker: WorkerInfo, *, is_answer: bool = False
    ) -> SerializationError:
        """Returns an error that also says how to map the device of a tensor, if that is the problem."""
        if not isinstance(unmapped := error.__cause__, UnmappedDeviceError):
            return error
        options = type(self._options)
        if is_answer:
            how = (
                f"Response device mapping is not available for a tensor on {unmapped.device}: return "
                f"tensor.cpu(), or have worker {worker.name!r}, which asks for it, call `set_device_map` for "
                f"{self.me.name!r} on its `{options.__name__}` before init_rpc"
            )
        else:
            how = (
                f"it is a tensor on {unmapped.device}. {options.backend_name} RPC backend only supports CPU "
                "tensors by default: send tensor.cpu(), or call `set_device_map` on "
                f"`{options.__name__}` before init_rpc"
            )
        return SerializationError(error.path, how)

    def encode_failure(self, error: BaseException) -> bytes:
        """Returns an exception as bytes, pickled if that can be. Never raises."""
        return encode_failure(error, self.dumps)

    def decode_failure(self, worker: WorkerInfo, failure: Buffer) -> Exception:
        """Returns the exception that a worker has encoded by `encode_failure`, or its text."""
        return decode_failure(failure, worker.name, partial(self.load, worker))

    def record_refusal(self, source: WorkerInfo, error: BaseException) -> None:
        """Records in the audit log why a message of a worker is refused: it is malformed, or exceeds a limit.

        Errors of other kinds are ignored.
        """
        if isinstance(error, LimitReachedError):
            if not isinstance(error.__cause__, RemoteError):  # else it is a limit of another worker
                self._audit.limit("messages", error.limit, error, worker=source.name)
        elif isinstance(error, ValueError) and not isinstance(error, PayloadLostError):
            self._audit.deny("messages", error, worker=source.name)

    @property
    def refused(self) -> Mapping[str, int]:
        """How many messages the policy has refused, by the name of their sender."""
        return self._reader.refused


@final
class Codec:
    """Encodes the messages of one agent for its peers, and decodes those that arrive."""

    def __init__(
        self,
        options: RpcBackendOptions,
        values: Values,
        extensions: Extensions,
        control: ControlStreams,
        devices: DeviceStaging,
    ) -> None:
        self.values = values
        self._options = options
        self._extensions = extensions
        self.control = control
        self._devices = devices
        channels = options.channels
        self._inline_threshold = min(channels.inline_threshold, channels.max_inline_bytes)
        self._small_bytes = min(self._inline_threshold, channels.shared_memory_threshold)

    # Sending.

    @property
    def maps_devices(self) -> bool:
        """Whether there is a device map for any worker."""
        return bool(self._options.device_maps)

    def device_map(self, worker: WorkerInfo, reply_to: Incoming | None = None) -> DeviceMap:
        """Returns the device map of messages to a worker, or of the answer to a request of that worker."""
        if reply_to is not None:
            mappings = reply_to.envelope.device_map
            return device_map_of_answer(mappings) if mappings else NO_DEVICES
        maps = self._options.device_maps
        return maps.get(worker.name, NO_DEVICES) if maps else NO_DEVICES

    def pack_request(self, request: Request, worker: WorkerInfo, device_map: DeviceMap) -> Packed:
        """Pickles the value of a request, or what an extension puts in its place. Raises SerializationError."""
        value = request.value
        for encode in self._extensions.encode_request:
            value = encode(request.kind, value)
        try:
            return self.values.packer.pack(value, request.label, device_map)
        except SerializationError as error:
            raise self.values.explained(error, worker) from error.__cause__

    def send(self, peer: Peer, message: Outgoing, broadcast: Broadcast | None = None) -> None:
        """Sends a message, which says then where it went. If that fails, the extensions undo what they noted.

        Raises what `Peer.send` does, or an extension that refuses the message: nothing was sent.
        """
        if peer.absence is not None:
            peer.check_present()
        request = message.reply_to
        if not message.references and (not message.user_values or (request is not None and not request.state)):
            # Extensions add to messages with references, and to answers of which they have noted the call.
            self._put(peer, message, broadcast)
            return
        self._extensions.on_send(message)
        try:
            self._put(peer, message, broadcast)
        except BaseException:
            self._extensions.on_send_aborted(message)
            raise

    def try_to_send(self, peer: Peer, message: Outgoing, broadcast: Broadcast | None = None) -> bool:
        """Sends a message as `send` does, or only prepares it if its receiver does not answer and calls wait.

        Returns:
            Whether it was sent. If not, `send_prepared` sends it, or `Extensions.on_send_aborted` undoes this.
        """
        absence = peer.absence
        if absence is not None and not absence.waits:
            raise absence.as_error(peer.info.name)
        has_hooks = message.user_values or message.references
        if has_hooks:
            self._extensions.on_send(message)
        try:
            if absence is None:
                self._put(peer, message, broadcast)
        except WorkerSuspectError:  # which is not known before the next attempt, or by now
            return False
        except BaseException:
            if has_hooks:
                self._extensions.on_send_aborted(message)
            raise
        return absence is None

    def send_prepared(self, peer: Peer, message: Outgoing) -> None:
        """Sends a message that `try_to_send` has not sent. Raises what `send` raises, and undoes nothing."""
        peer.check_present()
        self._put(peer, message, None)

    def _put(self, peer: Peer, message: Outgoing, broadcast: Broadcast | None) -> None:
        """Puts the payloads of a message into channels, and its envelope into the transport."""
        envelope = message.envelope
        nbytes = len(message.body)
        tensors = message.tensors if message.reply_to is None else []  # of an answer, which is not sent again
        inline: int | None
        if message.tensors:
            inline = self._put_inline(message) if broadcast is None else None
        else:
            inline = 0 if nbytes < self._inline_threshold else None
        if inline is not None:
            envelope.body.inline = message.body
            message.nbytes = nbytes + inline
            traffic = peer.traffic
            with traffic.lock:
                traffic.messages_sent += 1
                traffic.bytes_sent += message.nbytes
                traffic.inline_sent += message.nbytes
            try:
                if peer.control.is_waiting:
                    self.control.take_along(peer.control, envelope)
                peer.send(envelope.SerializeToString())
            except Exception:
                self._put_back(peer, message, tensors)
                raise
            return
        writer = PayloadWriter(peer.channels, broadcast)
        writer.may_send_back = message.reply_to is not None
        try:
            writer.put_body(message.body, envelope.body)
            envelope.tensors.extend(
                encode_tensors(
                    message.tensors, writer.put, message.device_map, message.leaves, writer, writer.put_gathered
                )
            )
            message.tensors = []  # a received one gives its segment back, with this envelope or in it
            writer.settle(envelope)
            envelope.attached_nbytes = writer.attached_nbytes
            envelope.has_payloads = bool(writer.external or writer.attached)
            if peer.control.is_waiting:
                self.control.take_along(peer.control, envelope)
            data = envelope.SerializeToString()
            message.payloads, message.nbytes = writer.external, writer.nbytes
        except Exception:
            writer.abort()
            self._put_back(peer, message, tensors)
            raise
        try:
            # Now: the receiver may ask for the counts at once.
            peer.traffic.sent_by_channel(writer.nbytes, writer.inline_nbytes, writer.external_nbytes)
            transport = peer.send(data, writer.attached)
        except RpcError:  # after what a signal handler raises, the message may be on its way
            writer.abort()
            self._put_back(peer, message, tensors)
            raise
        writer.start(transport)

    def _put_back(self, peer: Peer, message: Outgoing, tensors: list[torch.Tensor]) -> None:
        """Has a message, whose envelope was not sent, hold its tensors again."""
        message.tensors = tensors
        message.envelope.ClearField("tensors")
        self.resend_control(peer, message)

    def resend_control(self, peer: Peer, message: Outgoing) -> None:
        """Has the control messages sent again that a message has taken along, and that will not arrive with it."""
        if message.envelope.HasField("control"):
            message.envelope.ClearField("control")
            self.control.send_again(peer.control)

    def _put_inline(self, message: Outgoing) -> int | None:
        """Puts the tensors of a message into its envelope; returns their bytes, or None if they go another way."""
        if message.device_map:
            return None
        max_bytes = self._small_bytes - len(message.body)
        nbytes = encode_inline(message.tensors, message.leaves, message.envelope, max_bytes)
        if nbytes is not None:
            message.tensors = []  # a received one gives its segment back
        return nbytes

    # Receiving.

    def read(
        self, source: Peer, envelope: agent_pb2.Envelope, payloads: PayloadReader, *, user_values: bool
    ) -> Incoming:
        """Returns a message, not unpickled yet. Raises if it is malformed, or an extension refuses it.

        The extensions read its headers if it carries users' values, or references.
        """
        inline: tuple[list[torch.Tensor], int] | None = None
        if payloads is read_inline:
            inline = decode_inline(envelope.tensors) if envelope.tensors else ([], 0)
        if inline is not None:
            tensors, nbytes = inline
            body: Buffer = envelope.body.inline
            nbytes += len(body)
            traffic = source.traffic
            with traffic.lock:
                traffic.messages_received += 1
                traffic.inline_received += nbytes
        else:
            tensors, body, nbytes = self._read_payloads(source, envelope, payloads)
        message = Incoming(source.info, envelope, body, tensors, nbytes)
        if (user_values or envelope.references) and (envelope.has_headers or self._extensions.observes):
            self._extensions.on_receive(message)
        return message

    def _read_payloads(
        self, source: Peer, envelope: agent_pb2.Envelope, payloads: PayloadReader
    ) -> tuple[list[torch.Tensor], Buffer, int]:
        """Returns the tensors and the body of a message, and their bytes; counts these by their channels."""
        by_channel: dict[str, int] = {}

        def get(payload: agent_pb2.Payload) -> Buffer | DeviceBuffer:
            data = payloads(payload)
            channel = INLINE if has_come(payload) else payload.WhichOneof("location") or INLINE
            by_channel[channel] = by_channel.get(channel, 0) + len(data)
            return data

        try:
            tensors = decode_tensors(envelope.tensors, get, self._devices)
            body = body_of(envelope, get)
        except Exception as error:
            self.values.record_refusal(source.info, error)
            self._extensions.on_decode_error(source.info, envelope, error)
            raise
        source.traffic.received_by_channel(by_channel)
        return tensors, body, sum(by_channel.values())
