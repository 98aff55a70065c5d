"""Values to messages and back."""

from typing import final

import torch

from ...errors import RpcError, SerializationError, WorkerSuspectError
from ...proto.v1 import agent_pb2
from ..channels.broadcast.sending import Broadcast
from ..channels.cuda.staging import DeviceStaging
from ..channels.payload_writer import PayloadWriter
from ..channels.payloads import PayloadReader, body_of, has_come, read_inline
from ..contracts.device_payloads import DeviceBuffer
from ..contracts.devices import NO_DEVICES, DeviceMap, device_map_of_answer
from ..contracts.messages import Buffer, Incoming, Outgoing, Request
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import WorkerInfo
from ..peers.control import ControlStreams
from ..peers.peer import Peer
from ..peers.traffic import INLINE
from ..wire.inline_tensors import decode_inline, encode_inline
from ..wire.pickling import Packed
from ..wire.tensors import decode_tensors, encode_tensors
from .extensions import Extensions
from .values import Values

__all__ = ["CONFIRMED", "Codec"]

CONFIRMED = "call.confirmed"
"""The kind of the control message in place of the answer None to a request, which it names by its id."""


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
        """Makes the codec of one agent."""
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
        if reply_to is None:
            maps = self._options.device_maps
            return maps.get(worker.name, NO_DEVICES) if maps else NO_DEVICES
        mappings = reply_to.envelope.device_map
        return device_map_of_answer(mappings) if mappings else NO_DEVICES

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
            peer.send(data, writer.attached)
        except RpcError:  # after what a signal handler raises, the message may be on its way
            writer.abort()
            self._put_back(peer, message, tensors)
            raise
        writer.start()

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

    def confirm(self, request: Incoming) -> None:
        """Answers a request with None, by a control message."""
        self.control.send(request.source, CONFIRMED, (request.envelope.id,), urgent=False)

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
            message = Incoming(source.info, envelope, body, tensors, nbytes)
            if (user_values or envelope.references) and (envelope.has_headers or self._extensions.observes):
                self._extensions.on_receive(message)
            return message
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
        message = Incoming(source.info, envelope, body, tensors, sum(by_channel.values()))
        if (user_values or envelope.references) and (envelope.has_headers or self._extensions.observes):
            self._extensions.on_receive(message)
        return message
