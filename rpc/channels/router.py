"""Chooses the channel of each payload, and collects the payloads of received envelopes."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

from ...proto.v1 import agent_pb2
from ..contracts.device_payloads import DeviceBuffer
from ..contracts.messages import Buffer
from ..contracts.options import ChannelOptions
from ..wire.attached import AttachedReader, find_misplaced
from .announced import AnnouncedPayloads, TooMuchAnnouncedError
from .base import Arriving, Channel
from .broadcast.sending import Broadcast
from .channels import Channels
from .payload_writer import PayloadWriter
from .payloads import HERE, PayloadReader, external_bytes, has_come, payloads_of, read_inline
from .shared_memory.peer import SegmentPlace, segment_place

__all__ = ["ChannelRouter", "Collecting"]

Collecting = asyncio.Future[PayloadReader] | concurrent.futures.Future[PayloadReader]
"""The payloads of an envelope, some of which have not arrived."""


_COLLECTED_AT_ONCE = frozenset({"segment", "bulk", "cuda_ipc"})
"""The locations of payloads that the thread which reads an envelope collects."""


@final
class ChannelRouter:
    """The channels of one agent, and which of them carries which payload."""

    def __init__(
        self, options: ChannelOptions, self_id: int, channels: Channels, has_socket: Callable[[int], bool]
    ) -> None:
        """Routes by size and receiver.

        Args:
            options: the sizes of small payloads.
            self_id: the id of this worker.
            channels: of this agent.
            has_socket: tells by the id of a worker whether its envelopes travel by a socket, where payloads can be
                attached to them.
        """
        self._options = options
        self._has_socket = has_socket
        self._self_id = self_id
        self._channels = channels
        self._small, self._local = channels.small, channels.local
        self._bulk, self._chunked = channels.bulk, channels.chunked
        self._shared_memory, self._cuda_ipc = channels.shared_memory, channels.cuda_ipc
        self._by_name = {channel.name: channel for channel in channels.all}
        self.announced = AnnouncedPayloads(options.max_payload_bytes)

    @property
    def channels(self) -> Sequence[Channel]:
        """All channels."""
        return tuple(self._by_name.values())

    def name_for(self, peer: int) -> str:
        """Returns the name of the channel that large payloads to a worker go by now."""
        if peer == self._self_id:
            return self._local.name
        if self._shared_memory.is_connected(peer):
            return self._shared_memory.name
        return self._bulk.name if self._bulk.is_connected(peer) else self._chunked.name

    def queued_bytes(self, peer: int) -> int:
        """Returns the bytes of payloads for a worker that are in this worker's own memory until they are sent."""
        return self._bulk.queued_bytes(peer) + self._chunked.queued_bytes(peer)

    def writer(self, peer: int, broadcast: Broadcast | None = None) -> PayloadWriter:
        """Returns a writer for the payloads of one envelope to `peer`; see PayloadWriter."""
        large = self._local if peer == self._self_id else self._bulk
        return PayloadWriter(
            self._options, peer, self._channels, large, broadcast, attaches=self._has_socket(peer)
        )

    def can_withdraw(self, peer: int, payloads: Sequence[agent_pb2.Payload]) -> bool:
        """Returns whether nothing of any of these payloads has been sent to `peer`. Called on the loop."""
        return all(self._channel(peer, payload).can_withdraw(peer, payload) for payload in payloads)

    def withdraw(self, peer: int, payloads: Sequence[agent_pb2.Payload]) -> None:
        """Removes payloads for which `can_withdraw` holds from the channels' queues. Called on the loop."""
        for payload in payloads:
            self._channel(peer, payload).withdraw(peer, payload)

    def collect(
        self, peer: int, envelope: agent_pb2.Envelope, attached: memoryview | None = None
    ) -> "PayloadReader | asyncio.Future[PayloadReader]":
        """Collects the payloads of a received envelope. Called on the loop.

        Args:
            peer: the sender.
            envelope: the envelope.
            attached: the bytes that followed it, if they are not in it.

        Returns:
            The reader of the payloads if all have arrived; else a future of the reader.

        Raises:
            Exception: a payload is refused, or there is no memory for it. All of the envelope's payloads are
                discarded.
        """
        payloads = payloads_of(envelope)
        external = [payload for payload in payloads if not has_come(payload)]
        read_here = self._reader_here(peer, payloads, envelope, attached)
        if not external:
            return read_here
        collection = _Collection(read_here)
        count, nbytes = len(external), external_bytes(envelope)
        try:
            self.announced.begin(peer, count, nbytes)
            for payload in external:
                collection.add(payload, self._channel(peer, payload).receive(peer, payload))
        except Exception as error:
            if not isinstance(error, TooMuchAnnouncedError):
                self.announced.end(peer, count, nbytes)
            self._discard(peer, external)
            raise
        if not collection.pending:
            self.announced.end(peer, count, nbytes)
            return collection.read
        complete = asyncio.ensure_future(collection.complete())
        complete.add_done_callback(lambda _: self.announced.end(peer, count, nbytes))
        return complete

    def collect_now(
        self, peer: int, envelope: agent_pb2.Envelope, attached: memoryview | None = None
    ) -> "tuple[PayloadReader | concurrent.futures.Future[PayloadReader] | None, int]":
        """Collects the payloads of a received envelope. Called by the thread that reads.

        Args:
            peer: the sender.
            envelope: the envelope.
            attached: the bytes that followed it, if they are not in it.

        Returns:
            The reader of the payloads if all have arrived, else a future of it, or None if some of them have to be
            collected on the loop; and the bytes of the payloads outside the envelope, as it tells them.

        Raises:
            ValueError: a payload is refused. All of the envelope's payloads are discarded.
            RuntimeError: there is no memory for one; as well.
        """
        external = []
        nbytes = 0
        payloads = payloads_of(envelope)
        read_here = self._reader_here(peer, payloads, envelope, attached)
        for payload in payloads:
            location = payload.WhichOneof("location")
            if location in _COLLECTED_AT_ONCE:
                external.append(payload)
                nbytes += getattr(payload, location).nbytes
            elif location not in HERE:
                return None, external_bytes(envelope)
        if not external:
            return read_here, 0
        # Memory for what comes by bulk connections is allocated before it arrives.
        bulk = [payload.bulk.nbytes for payload in external if payload.HasField("bulk")]
        count, bulk_bytes = len(bulk), sum(bulk)
        segments: dict[SegmentPlace, Buffer] = {}
        on_devices: dict[tuple[int, int], DeviceBuffer] = {}
        pending: dict[int, concurrent.futures.Future[Buffer]] = {}
        try:
            self.announced.begin(peer, count, bulk_bytes)
            for payload in external:
                if payload.HasField("segment"):
                    segments[segment_place(payload)] = self._shared_memory.receive(peer, payload)
                elif payload.HasField("cuda_ipc"):
                    on_devices[_place(payload)] = self._cuda_ipc.receive(peer, payload)
                else:
                    pending[payload.bulk.transfer_id] = self._bulk.receive(peer, payload)
        except (ValueError, RuntimeError) as error:
            if not isinstance(error, TooMuchAnnouncedError):
                self.announced.end(peer, count, bulk_bytes)
            self._discard(
                peer, [p for p in external if segment_place(p) not in segments and _place(p) not in on_devices]
            )
            raise
        transfers: dict[int, Buffer] = {}

        def read(payload: agent_pb2.Payload) -> Buffer | DeviceBuffer:
            # Kept no longer: a segment goes back when nothing refers to its bytes.
            if payload.HasField("segment"):
                return segments.pop(segment_place(payload))
            if payload.HasField("cuda_ipc"):
                return on_devices.pop(_place(payload))
            return transfers.pop(payload.bulk.transfer_id) if payload.HasField("bulk") else read_here(payload)

        if not pending:
            return read, nbytes
        collected = _when_all_arrived(pending, transfers, read)
        collected.add_done_callback(lambda _: self.announced.end(peer, count, bulk_bytes))
        return collected, nbytes

    def _reader_here(
        self,
        peer: int,
        payloads: Sequence[agent_pb2.Payload],
        envelope: agent_pb2.Envelope,
        attached: memoryview | None,
    ) -> PayloadReader:
        """Returns what reads the payloads that came with an envelope.

        Raises ValueError if one is refused; then all others are discarded.
        """
        if attached is None and not envelope.attached:
            return read_inline
        nbytes = len(envelope.attached if attached is None else attached)
        if problem := find_misplaced(payloads, nbytes, self._options.max_payload_bytes):
            self._discard(peer, [payload for payload in payloads if not has_come(payload)])
            raise ValueError(problem)
        return AttachedReader(envelope, attached).read

    def _discard(self, peer: int, payloads: Sequence[agent_pb2.Payload]) -> None:
        for payload in payloads:
            self._channel(peer, payload).discard(peer, payload)

    def _channel(self, peer: int, payload: agent_pb2.Payload) -> Channel:
        channel = self._by_name[payload.WhichOneof("location") or self._small.name]
        # A local payload of another worker is malformed; the other channel refuses it.
        return self._chunked if channel is self._local and peer != self._self_id else channel


@final
class _Collection:
    """The payloads of one received envelope that are not inside it, by their serialized descriptions."""

    def __init__(self, read_here: PayloadReader) -> None:
        """Args: read_here: reads those that came with the envelope."""
        self._read_here = read_here
        self.received: dict[bytes, Buffer | DeviceBuffer] = {}
        self.pending: dict[bytes, asyncio.Future[Buffer]] = {}

    def add(self, payload: agent_pb2.Payload, data: Buffer | DeviceBuffer | Arriving) -> None:
        key = payload.SerializeToString()
        if isinstance(data, concurrent.futures.Future):
            data = asyncio.wrap_future(data)
        if isinstance(data, asyncio.Future):
            self.pending[key] = data
        else:
            self.received[key] = data

    async def complete(self) -> PayloadReader:
        """Waits until all payloads have arrived, and returns their reader. Raises what a payload fails with."""
        buffers = await asyncio.gather(*self.pending.values())
        self.received.update(zip(self.pending, buffers, strict=True))
        return self.read

    def read(self, payload: agent_pb2.Payload) -> Buffer | DeviceBuffer:
        """Returns the bytes of a payload inside or outside the envelope."""
        if has_come(payload):
            return self._read_here(payload)
        key = payload.SerializeToString()
        # Kept no longer: a segment of device memory goes back when nothing refers to its bytes.
        return self.received.pop(key) if payload.HasField("cuda_ipc") else self.received[key]


def _when_all_arrived(
    pending: "Mapping[int, concurrent.futures.Future[Buffer]]", transfers: dict[int, Buffer], read: PayloadReader
) -> "concurrent.futures.Future[PayloadReader]":
    """Returns a future of a reader, which is done when the payloads are; it fails with the first that does.

    Args:
        pending: the payloads, by transfer id. The callbacks, which futures keep, do not refer to them.
        transfers: where to put the bytes for the reader.
        read: the reader.
    """
    collected: concurrent.futures.Future[PayloadReader] = concurrent.futures.Future()
    count = len(pending)

    def on_arrival(number: int, arrived: "concurrent.futures.Future[Buffer]") -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # another thread was first
            if arrived.cancelled():  # it is discarded, because another message announces the same transfer
                collected.cancel()
                return
            if (error := arrived.exception()) is not None:
                collected.set_exception(error)
                return
            transfers[number] = arrived.result()
            if len(transfers) == count:
                collected.set_result(read)

    for number, future in pending.items():
        future.add_done_callback(partial(on_arrival, number))
    return collected


def _place(payload: agent_pb2.Payload) -> tuple[int, int]:
    """Returns where a payload in device memory is: the number of its segment, and the offset there."""
    return payload.cuda_ipc.number, payload.cuda_ipc.offset
