"""Sends the payloads of one message, each by the first channel that takes it."""

from collections.abc import Sequence
from typing import final

import torch

from ...proto.v1 import agent_pb2
from ..transports.base import Transport
from ..wire.parsing import ALIGNMENT
from ..wire.small_tensors import Gathered
from .base import StartTransfer
from .broadcast import Broadcast
from .channels import PeerChannels
from .payloads import payloads_of

__all__ = ["PayloadWriter"]


@final
class PayloadWriter:
    """Sends the payloads of one envelope by the channels that suit them: a DeviceWriter. Used by one thread."""

    def __init__(self, channels: PeerChannels, broadcast: Broadcast | None = None) -> None:
        """Sends nothing yet. The broadcast has the large payloads that envelopes to other workers share."""
        options = channels.options
        self._channels = channels
        self._segments = channels.shared_memory.segments
        self._broadcast = broadcast
        self._threshold = options.inline_threshold
        self._shared_threshold = options.shared_memory_threshold
        self._small_body = min(self._threshold, options.max_inline_bytes, self._shared_threshold)
        self._inline_bytes_left = options.max_inline_bytes
        self.may_send_back = False
        """Whether a payload may go back in the segment that it came in, if nothing refers to it in the end."""
        self._going_back: list[agent_pb2.Payload] = []
        """Those for which that is not known yet."""
        self._count = 0
        self._transfers: list[StartTransfer] = []
        self._attached_bytes_left = options.max_attached_bytes if channels.has_socket else 0
        self.attached: list[memoryview] = []
        """The bytes that follow the envelope, in their order."""
        self.attached_nbytes = 0
        self.external: list[agent_pb2.Payload] = []
        """The payloads that are not in the envelope."""
        self.nbytes = 0
        """Bytes of all payloads so far; a broadcast payload counts in the envelope to its first receiver only."""
        self.inline_nbytes = 0
        """Those inside the envelope, and attached to it."""
        self.external_nbytes: dict[str, int] = {}
        """The others by channel; those of a broadcast count in the envelope to each receiver."""

    def put_body(self, body: bytes, description: agent_pb2.Payload) -> None:
        """Sends the body of the message, before its tensors, and fills in the description for the envelope."""
        nbytes = len(body)
        if nbytes >= self._small_body or self._broadcast is not None:
            description.CopyFrom(self.put(memoryview(body)))
            return
        description.inline = body
        self._inline_bytes_left -= nbytes
        self.nbytes += nbytes
        self.inline_nbytes += nbytes

    def put(self, data: memoryview) -> agent_pb2.Payload:
        """Chooses a channel for these bytes, and returns the description of the payload for the envelope."""
        return self._put(data) or self._send(data)

    def put_gathered(self, gathered: Gathered) -> agent_pb2.Payload:
        """Does the same for the elements of many tensors."""
        joined = None if self._broadcast is None else self._broadcast.joined(self._count, gathered)
        if (payload := self._put(gathered if joined is None else joined)) is not None:
            return payload
        return self._send(gathered.joined() if joined is None else joined)

    def _put(self, data: memoryview | Gathered) -> agent_pb2.Payload | None:
        """Sends bytes by memory that this worker shares with the receiver, or by a broadcast, if it can."""
        position, self._count = self._count, self._count + 1
        if (
            self._broadcast is not None
            and isinstance(data, memoryview)
            and (shared := self._broadcast.put(self._channels, position, data)) is not None
        ):
            payload, start, is_first = shared
            if start is not None:
                self._transfers.append(start)
            self._add_external(payload, data.nbytes)
            self.nbytes += data.nbytes if is_first else 0
            return payload
        if self.may_send_back and data.nbytes >= self._shared_threshold and isinstance(data, memoryview):
            going_back = self._segments.begin_send_back(data)
            if going_back is not None:
                self._going_back.append(going_back)
                return going_back
        self.nbytes += data.nbytes
        if data.nbytes >= self._shared_threshold:
            in_segment = self._segments.send(data)
            if in_segment is not None:
                self._add_external(in_segment, data.nbytes)
                return in_segment
        return None

    def _send(self, data: memoryview) -> agent_pb2.Payload:
        """Sends bytes inside the envelope, behind it, or apart from it."""
        if data.nbytes < self._threshold and data.nbytes <= self._inline_bytes_left:
            self._inline_bytes_left -= data.nbytes
            self.inline_nbytes += data.nbytes
            return agent_pb2.Payload(inline=bytes(data))
        if data.nbytes + (gap := -self.attached_nbytes % ALIGNMENT) <= self._attached_bytes_left:
            self.inline_nbytes += data.nbytes
            return self._attach(data, gap)
        payload, start = self._channels.send_large(data)
        self._add_external(payload, data.nbytes)
        if start is not None:
            self._transfers.append(start)
        return payload

    def settle(self, envelope: agent_pb2.Envelope) -> None:
        """Sends what cannot go back in the segment that it came in, once the message has let go of its tensors.

        The message's envelope has the new descriptions of these payloads afterwards.
        """
        self.may_send_back = False
        described: dict[int, agent_pb2.Payload] = {}
        while self._going_back:
            payload = self._going_back.pop()
            number, nbytes = payload.segment.number, payload.segment.nbytes
            kept = self._segments.mapped.end_send_back(number)
            if kept is None:
                self._add_external(payload, nbytes)
                self.nbytes += nbytes
                continue
            if not described:
                described = {each.segment.number: each for each in payloads_of(envelope) if each.segment.sent_back}
            described[number].CopyFrom(self.put(memoryview(kept).cast("B")[:nbytes]))

    def _attach(self, data: memoryview, gap: int) -> agent_pb2.Payload:
        """Has bytes follow the envelope after a gap, from an offset at which all dtypes can begin."""
        if gap:
            self.attached.append(memoryview(bytes(gap)))
        offset = self.attached_nbytes + gap
        self.attached.append(data)
        self.attached_nbytes = offset + data.nbytes
        self._attached_bytes_left -= gap + data.nbytes
        return agent_pb2.Payload(attached=agent_pb2.AttachedPayload(offset=offset, nbytes=data.nbytes))

    def put_on_device(
        self, elements: Sequence[torch.Tensor], target: torch.device
    ) -> Sequence[agent_pb2.Payload] | None:
        """Sends elements by way of device memory, where that is possible: see DeviceWriter."""
        payloads = self._channels.cuda_ipc.send(elements, target)
        if payloads is not None:
            self._count += len(payloads)
            for payload, each in zip(payloads, elements, strict=True):
                self._add_external(payload, each.numel())
                self.nbytes += each.numel()
        return payloads

    def _add_external(self, payload: agent_pb2.Payload, nbytes: int) -> None:
        self.external.append(payload)
        channel = payload.WhichOneof("location") or ""
        self.external_nbytes[channel] = self.external_nbytes.get(channel, 0) + nbytes

    def to_host(self, elements: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns copies in the memory of the host: see DeviceWriter."""
        return self._channels.staging.to_host(elements)

    def start(self, transport: Transport) -> None:
        """Starts to send the payloads that are not in the envelope, once that is queued in a transport."""
        for start in self._transfers:
            start(transport)
        self._transfers.clear()  # they hold the bytes

    def abort(self) -> None:
        """Takes back what has been put, because the envelope was not sent."""
        for payload in self._going_back:
            if self._segments.mapped.end_send_back(payload.segment.number) is None:
                self._segments.withdraw(payload)
        for payload in self.external:
            if payload.HasField("segment"):
                self._segments.withdraw(payload)
            elif payload.HasField("cuda_ipc"):
                self._channels.cuda_ipc.withdraw(payload)
