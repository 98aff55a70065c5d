"""Values to messages and back."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

import torch

from ...errors import LimitReachedError, RemoteError, RpcError, SerializationError, WorkerSuspectError
from ...proto.v1 import agent_pb2
from ..channels.base import PayloadLostError
from ..channels.broadcast.sending import Broadcast
from ..channels.payloads import PayloadReader, body_of, has_come, read_inline
from ..contracts.device_payloads import DeviceBuffer
from ..contracts.devices import NO_DEVICES, DeviceMap
from ..contracts.messages import Buffer, Incoming, Outgoing, Request
from ..contracts.options import RpcBackendOptions
from ..contracts.pickler import BY_VALUE, SEND_CODE
from ..contracts.worker import WorkerInfo
from ..execution.kept_errors import printable_text
from ..peers import control as control_messages
from ..peers.control import RetryingControlMessages
from ..peers.network import Network
from ..policy.value_readers import make_reader
from ..wire.device_maps import device_map_of_answer
from ..wire.failures import decode_failure, encode_failure
from ..wire.inline_tensors import decode_inline, encode_inline
from ..wire.picklers import dumps
from ..wire.pickling import Packed, Packer
from ..wire.tensors import UnmappedDeviceError, decode_tensors, encode_tensors
from .extensions import Extensions
from .stats import INLINE, TrafficStats

__all__ = ["Codec"]


@final
class Codec:
    """Encodes the messages of one agent into its network, and decodes those that arrive."""

    def __init__(
        self,
        me: WorkerInfo,
        options: RpcBackendOptions,
        packer: Packer,
        extensions: Extensions,
        network: Network,
        control: RetryingControlMessages,
    ) -> None:
        """Makes the codec of one agent.

        Args:
            me: this worker.
            options: the agent's.
            packer: pickles values.
            extensions: add headers to messages and read them.
            network: carries the messages.
            control: its messages are attached to others.
        """
        self.traffic = TrafficStats()
        self._me = me
        self._options = options
        self._packer = packer
        self._audit = network.audit
        self._reader = make_reader(me, options.policy, self._audit)
        self._extensions = extensions
        self._network = network
        self._control = control
        self._waiting_control = control.waiting
        self._dumps = partial(dumps, packer.pickler)
        self._to_flush: set[int] = set()
        """The workers for which messages wait that can."""
        self._devices = network.cuda_ipc.staging
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
            return self._packer.pack(value, label, device_map)
        except SerializationError as error:
            raise self._explained(error, worker, is_answer=is_answer) from error.__cause__

    def pack_request(self, request: Request, worker: WorkerInfo, device_map: DeviceMap) -> Packed:
        """Pickles the value of a request, or what an extension puts in its place. Raises SerializationError."""
        value = request.value
        for encode in self._extensions.encode_request:
            value = encode(request.kind, value)
        try:
            return self._packer.pack(value, request.label, device_map)
        except SerializationError as error:
            raise self._explained(error, worker) from error.__cause__

    def _explained(
        self, error: SerializationError, worker: WorkerInfo, *, is_answer: bool = False
    ) -> SerializationError:
        """Returns an error that also says how to map the device of a tensor, if that is the problem."""
        if isinstance(unmapped := error.__cause__, UnmappedDeviceError):
            return SerializationError(error.path, self._how_to_map(unmapped.device, worker, is_answer=is_answer))
        return error

    def _how_to_map(self, device: torch.device, worker: WorkerInfo, *, is_answer: bool) -> str:
        options = type(self._options)
        if is_answer:
            return (
                f"Response device mapping is not available for a tensor on {device}: return tensor.cpu(), or have "
                f"worker {worker.name!r}, which asks for it, call `set_device_map` for {self._me.name!r} on its "
                f"`{options.__name__}` before init_rpc"
            )
        return (
            f"it is a tensor on {device}. {options.backend_name} RPC backend only supports CPU tensors by "
            f"default: send tensor.cpu(), or call `set_device_map` on `{options.__name__}` before init_rpc"
        )

    def send(self, message: Outgoing, broadcast: Broadcast | None = None) -> None:
        """Sends a message. If that fails, the extensions undo what they have noted of it.

        Args:
            message: what to send; its envelope is completed, and it says afterwards where it went.
            broadcast: what it shares with messages to other workers.

        Raises:
            WorkerLostError, WorkerSuspectError, SendFailedError, SerializationError: nothing was sent; see
                `Network.send`.
            Exception: an extension refuses the message; nothing was sent.
        """
        if (absence := self._network.absence(message.destination)) is not None:
            raise absence.as_error(message.destination.name)
        if not message.user_values:
            self._put(message, broadcast)
            return
        self._extensions.on_send(message)
        try:
            self._put(message, broadcast)
        except BaseException:
            self._extensions.on_send_aborted(message)
            raise

    def try_to_send(self, message: Outgoing, broadcast: Broadcast | None = None) -> bool:
        """Sends a message as `send` does, or only prepares it if its receiver does not answer and calls wait.

        Returns:
            Whether it was sent. If not, `send_prepared` sends it, or `Extensions.on_send_aborted` undoes this.
        """
        absence = self._network.absence(message.destination)
        if absence is not None and not absence.waits:
            raise absence.as_error(message.destination.name)
        if message.user_values:
            self._extensions.on_send(message)
        try:
            if absence is None:
                self._put(message, broadcast)
        except WorkerSuspectError:  # which is not known before the next attempt, or by now
            return False
        except BaseException:
            if message.user_values:
                self._extensions.on_send_aborted(message)
            raise
        return absence is None

    def send_prepared(self, message: Outgoing) -> None:
        """Sends a message that `try_to_send` has not sent. Raises what `send` raises, and undoes nothing."""
        self._network.check_present(message.destination)
        self._put(message, None)

    def _put(self, message: Outgoing, broadcast: Broadcast | None) -> None:
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
            self.traffic.sent(message.destination.wire_id, message.nbytes)
            try:
                if self._waiting_control:
                    self._control.attach(message.destination, envelope, self._dumps)
                message.ticket = self._network.send(message.destination, envelope.SerializeToString())
            except Exception:
                _put_back(message, tensors)
                raise
            return
        writer = self._network.writer(message.destination, broadcast)
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
            if self._waiting_control:
                self._control.attach(message.destination, envelope, self._dumps)
            data = envelope.SerializeToString()
            message.payloads, message.nbytes = writer.external, writer.nbytes
        except Exception:
            writer.abort()
            _put_back(message, tensors)
            raise
        try:
            # Now: the receiver may ask for the counts at once.
            self.traffic.sent_by_channel(
                message.destination.wire_id, writer.nbytes, writer.inline_nbytes, writer.external_nbytes
            )
            message.ticket = self._network.send(message.destination, data, writer.attached)
        except RpcError:  # after what a signal handler raises, the message may be on its way
            writer.abort()
            _put_back(message, tensors)
            raise
        writer.start()

    def _put_inline(self, message: Outgoing) -> int | None:
        """Puts the tensors of a message into its envelope; returns their bytes, or None if they go another way."""
        if message.device_map:
            return None
        max_bytes = self._small_bytes - len(message.body)
        nbytes = encode_inline(message.tensors, message.leaves, message.envelope, max_bytes)
        if nbytes is not None:
            message.tensors = []  # a received one gives its segment back
        return nbytes

    def send_behind(self, message: Outgoing) -> None:
        """Sends a message that can wait for another one to the same worker, to go in the same write.

        Raises what `send` raises.
        """
        worker, body = message.destination, message.body
        if message.tensors or message.references or len(body) >= self._inline_threshold:
            self.send(message)
            return
        self._network.check_present(worker)
        if message.user_values:
            self._extensions.on_send(message)
        try:
            if message.tensors:  # of an extension
                self._put(message, None)
                return
            message.envelope.body.inline = body
            self.traffic.sent(worker.wire_id, len(body))
            wait = control_messages.ATTACH_AFTER_S
            self._network.send_behind(worker, message.envelope.SerializeToString(), wait)
        except BaseException:
            self._extensions.on_send_aborted(message)
            raise
        if worker.wire_id not in self._to_flush:
            self._to_flush.add(worker.wire_id)
            self._control.run(partial(self._flush, worker), urgent=False)

    def _flush(self, worker: WorkerInfo) -> None:
        self._to_flush.discard(worker.wire_id)
        self._network.flush(worker)

    # Receiving.

    def read(
        self, source: WorkerInfo, envelope: agent_pb2.Envelope, payloads: PayloadReader, *, user_values: bool
    ) -> Incoming:
        """Returns a message that has arrived, not unpickled yet.

        Args:
            source: the sender.
            envelope: the message's.
            payloads: reads the payloads that the envelope names.
            user_values: whether it carries users' values, so that the extensions read its headers.

        Raises:
            Exception: it is malformed, or an extension refuses it.
        """
        inline: tuple[list[torch.Tensor], int] | None = None
        if payloads is read_inline:
            inline = decode_inline(envelope.tensors) if envelope.tensors else ([], 0)
        if inline is not None:
            tensors, nbytes = inline
            body: Buffer = envelope.body.inline
            nbytes += len(body)
            self.traffic.received(source.wire_id, nbytes)
            message = Incoming(source, envelope, body, tensors, nbytes)
            if user_values and (envelope.has_headers or self._extensions.observes):
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
            self.record_refusal(source, error)
            self._extensions.on_decode_error(source, envelope, error)
            raise
        self.traffic.received_by_channel(source.wire_id, by_channel)
        message = Incoming(source, envelope, body, tensors, sum(by_channel.values()))
        if user_values and (envelope.has_headers or self._extensions.observes):
            self._extensions.on_receive(message)
        return message

    def receive_control(
        self, source: WorkerInfo, envelope: agent_pb2.Envelope, *, with_answer: bool = False
    ) -> None:
        """Takes the control messages that are attached to a message: see RetryingControlMessages.receive."""
        self._control.receive(source, envelope, partial(self._reader.load, source), with_answer=with_answer)

    def unpack(self, message: Incoming) -> Any:
        """Returns the value of a message. Raises SerializationError, PolicyError, or what unpickling raises."""
        try:
            return self._reader.read(message)
        except (AttributeError, ImportError) as error:
            if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == BY_VALUE:
                raise SerializationError(
                    "the message",
                    f"it has a function or class by value, and worker {self._me.name!r} has no cloudpickle: "
                    "pip install cloudpickle there, too",
                ) from error
            raise SerializationError(
                "the message",
                f"worker {self._me.name!r} cannot find what it names: {type(error).__name__}: "
                f"{printable_text(error)}. RPC pickler does not serialize functions and classes, it names them: "
                "define them at the top level of a module that both workers can import (the program's __main__ "
                f"and the cells of a notebook are none), or {SEND_CODE}",
            ) from error

    def encode_failure(self, error: BaseException) -> bytes:
        """Returns an exception as bytes, pickled if that can be. Never raises."""
        return encode_failure(error, self._dumps)

    def decode_failure(self, worker: WorkerInfo, failure: Buffer) -> Exception:
        """Returns the exception that a worker has encoded by `encode_failure`, or its text."""
        return decode_failure(failure, worker.name, partial(self._reader.load, worker))

    def record_refusal(self, source: WorkerInfo, error: BaseException) -> None:
        """Records in the audit log why a message of a worker is refused: it is malformed, or exceeds a limit.

        Args:
            source: the worker.
            error: why; ignored if it is of another kind.
        """
        if isinstance(error, LimitReachedError):
            if not isinstance(error.__cause__, RemoteError):  # else it is a limit of another worker
                self._audit.limit("messages", error.limit, error, worker=source.name)
        elif isinstance(error, ValueError) and not isinstance(error, PayloadLostError):
            self._audit.deny("messages", error, worker=source.name)

    def traffic_by_worker(self) -> dict[str, dict[str, Any]]:
        """Returns the messages and bytes between this worker and each other, by name and channel."""
        return self.traffic.by_worker(lambda worker: self._network.incarnation(worker).name)

    @property
    def refused(self) -> Mapping[str, int]:
        """How many messages the policy has refused, by the name of their sender."""
        return self._reader.refused


def _put_back(message: Outgoing, tensors: list[torch.Tensor]) -> None:
    """Has a message, whose envelope was not sent, hold its tensors again."""
    message.tensors = tensors
    message.envelope.ClearField("tensors")
