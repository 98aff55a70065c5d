"""Values to envelopes and back, with what the extensions add and take."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from ...errors import SerializationError
from ...proto.v1 import agent_pb2
from ..channels.broadcast.sending import Broadcast
from ..channels.router import PayloadReader
from ..contracts.devices import NO_DEVICES, DeviceMap
from ..contracts.messages import Buffer, Extension, Handler, Incoming, MessageType, Outgoing
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import WorkerInfo
from ..wire.device_maps import device_map_of_answer
from ..wire.flat_pickle import can_flatten, flatten, unflatten
from ..wire.pickling import Packed, Packer
from ..wire.tensors import UnmappedDeviceError, decode_tensors, encode_tensors
from .stats import TrafficStats

if TYPE_CHECKING:
    from .network import Network

__all__ = ["Codec", "SentMessage"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SentMessage:
    """What it takes to take a message back: its envelope, and where it and its payloads went."""

    envelope: agent_pb2.Envelope
    ticket: int
    payloads: Sequence[agent_pb2.Payload]
    nbytes: int


@final
class Codec:
    """Sends and reads the messages of one agent. What they mean is not known here."""

    def __init__(
        self, me: WorkerInfo, options: RpcBackendOptions, handlers: Mapping[MessageType.ValueType, Handler]
    ) -> None:
        """Args: who sends; how to behave; which messages carry users' values. Set `network` before sending."""
        self.network: Network
        self.traffic = TrafficStats()
        self.extensions: list[Extension] = []
        self._me = me
        self._options = options
        self._handlers = handlers
        self._packer = Packer()

    def add(self, extension: Extension) -> None:
        """Has an extension take part in users' messages from now on."""
        self.extensions.append(extension)
        if extension.reference_type is not None:
            self._packer.register_reference_type(extension.reference_type)
        self._packer.register_reducers(extension.reducers())
        self._packer.detach_parameters_if(extension.detaches_parameters)

    # Sending.

    def device_map(self, worker: WorkerInfo, reply_to: Incoming | None) -> DeviceMap:
        """Where tensors go in a message to a worker, which may belong to a request of that worker."""
        if reply_to is None:
            return self._options.device_maps.get(worker.name, NO_DEVICES)
        return device_map_of_answer(reply_to.envelope.device_map)

    def pack(
        self, value: object, what: str | Sequence[str], worker: WorkerInfo, reply_to: Incoming | None
    ) -> Packed:
        """Pickles a value for a worker. Raises SerializationError."""
        try:
            return self._packer.pack(value, what, self.device_map(worker, reply_to))
        except SerializationError as error:
            if isinstance(unmapped := error.__cause__, UnmappedDeviceError):
                problem = self._how_to_map(unmapped.device, worker, reply_to)
                raise SerializationError(error.path, problem) from unmapped
            raise

    def _how_to_map(self, device: torch.device, worker: WorkerInfo, reply_to: Incoming | None) -> str:
        options = type(self._options)
        if reply_to is not None:
            return (
                f"Response device mapping is not available for a tensor on {device}: return tensor.cpu(), or have "
                f"worker {worker.name!r}, which asks for it, call `set_device_map` for {self._me.name!r} on its "
                f"`{options.__name__}` before init_rpc"
            )
        return (
            f"it is a tensor on {device}. {options.backend_name} RPC backend only supports CPU tensors by "
            f"default: send tensor.cpu(), or call `set_device_map` on `{options.__name__}` before init_rpc"
        )

    def flatten(self, value: object, what: str, worker: WorkerInfo) -> memoryview | None:
        """A value as one piece of bytes for several workers, of whom this is one; None if it must go in a message.

        Raises SerializationError.
        """
        packed = self.pack(value, what, worker, None)
        return flatten(packed) if can_flatten(packed) else None

    def unflatten(self, data: bytes | bytearray) -> Any:
        """The value that was flattened. Raises what `unpack` does."""
        body, tensors = unflatten(data)
        return self.unpack(Incoming(self._me, agent_pb2.Envelope(), body, tensors))

    def send(
        self,
        worker: WorkerInfo,
        kind: MessageType.ValueType,
        envelope: agent_pb2.Envelope,
        packed: Packed,
        reply_to: Incoming | None,
        broadcast: Broadcast | None = None,
    ) -> SentMessage:
        """Sends an envelope. `kind` is that of the request, also where the envelope answers it.

        `broadcast` is what it shares with envelopes to other workers.
        """
        device_map = self.device_map(worker, reply_to)
        message = Outgoing(worker, envelope, [*packed.tensors], packed.references, reply_to, device_map)
        message.leaves = packed.leaves
        left: list[Extension] = []
        try:
            self.network.check_present(worker)
            for extension in self._hooked(kind):
                left.append(extension)
                extension.on_send(message)
            return self.send_bare(message, packed.body, broadcast)
        except BaseException:
            if broadcast is not None:
                broadcast.not_sent(worker.id)
            for extension in left:
                extension.on_send_aborted(message)
            raise

    def send_bare(self, message: Outgoing, body: bytes, broadcast: Broadcast | None = None) -> SentMessage:
        """Sends a message of which the extensions need not know."""
        envelope = message.envelope
        writer = self.network.writer(message.destination, broadcast)
        envelope.body.CopyFrom(writer.put(memoryview(body)))
        envelope.tensors.extend(encode_tensors(message.tensors, writer.put, message.device_map, message.leaves))
        ticket = self.network.send(message.destination, envelope.SerializeToString())
        writer.start()
        self.traffic.sent(writer.nbytes)
        return SentMessage(envelope, ticket, writer.apart or (), writer.nbytes)

    def send_aborted(self, worker: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """A message was taken back before it left."""
        message = Outgoing(worker, envelope, [], [], None)
        for extension in self._hooked(envelope.type):
            extension.on_send_aborted(message)

    # Reading.

    def read(
        self, source: WorkerInfo, envelope: agent_pb2.Envelope, arrived: PayloadReader, *, users: bool
    ) -> Incoming:
        """A message that has arrived, not unpickled yet; the extensions see it if it has users' values.

        Raises:
            Exception: it is malformed, or an extension refuses it.
        """
        nbytes = 0

        def get(payload: agent_pb2.Payload) -> Buffer:
            nonlocal nbytes
            data = arrived(payload)
            nbytes += len(data)
            return data

        try:
            tensors = decode_tensors(envelope.tensors, get)
            body = get(envelope.body)
        except Exception as error:
            self.tell_unreadable(source, envelope, error)
            raise
        self.traffic.received(nbytes)
        message = Incoming(source, envelope, body, tensors, nbytes)
        for extension in self.extensions if users else []:
            extension.on_receive(message)
        return message

    def unpack(self, message: Incoming) -> Any:
        """The value of a message. Raises SerializationError, or what unpickling raises."""
        try:
            return self._packer.unpack(message.body, message.tensors, message.references)
        except (AttributeError, ImportError) as error:
            raise SerializationError(
                "the message",
                f"worker {self._me.name!r} cannot find what it names: {type(error).__name__}: {error}. "
                "RPC pickler does not serialize functions and classes, it names them: define them at the top "
                "level of a module that both workers can import",
            ) from error

    def tell_unreadable(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """Of a message there is nothing but the headers."""
        for extension in self.extensions:
            try:
                extension.on_decode_error(Incoming(source, envelope, b"", []), error)
            except Exception:
                log.exception("the headers of an unreadable message from worker %s", source.name)

    @contextlib.contextmanager
    def scopes(self, message: Incoming) -> Iterator[None]:
        """What the extensions put around the handling of a request."""
        with contextlib.ExitStack() as stack:
            for extension in self._hooked(message.envelope.type):
                stack.enter_context(extension.scope(message))
            yield

    def _hooked(self, kind: MessageType.ValueType) -> Sequence[Extension]:
        return self.extensions if self._handlers[kind].user_values else ()
