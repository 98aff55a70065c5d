"""Takes what a socket brings apart into frames, and has them handled."""

import concurrent.futures
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from google.protobuf.message import DecodeError

from ...proto.v1 import agent_pb2
from ..contracts.options import MAX_ATTACHED_BYTES
from ..wire.parsing import SMALL_BYTES, check_envelope, parse_envelope
from .pulse import PulseExchange
from .segments import SegmentListener
from .settings import MAX_ENVELOPE_BYTES
from .socket_frames import HEADER, MAX_ATTACHING_BYTES, MAX_SIDE_FRAME_BYTES, SEGMENT, FrameKind, numbers_in
from .tls_socket import AnySocket, TlsSocket

__all__ = ["READ_BYTES", "RECVMSG_ARGS", "FrameReader"]

READ_BYTES: Final = 256 << 10
"""Bytes read at a time."""

MAX_DESCRIPTORS: Final = 64
"""Descriptors that one read can bring, and that may wait for their frames."""

_MAX_BYTES = {FrameKind.ENVELOPE: MAX_ENVELOPE_BYTES, FrameKind.ATTACHED: MAX_ATTACHING_BYTES}
"""Of the content of a frame, by its kind."""

_DESCRIPTOR = struct.Struct("i")

_LOST: Final = -1
"""In place of a descriptor."""

RECVMSG_ARGS: Final = READ_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * _DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
"""The arguments of the `recvmsg` that brings descriptors, too."""


_Arrived = tuple[agent_pb2.Envelope, int] | tuple[agent_pb2.Envelope, int, memoryview]
"""An envelope, the bytes of memory that it takes, and those that followed it, if any did."""


@final
class _LargeEnvelope:
    """Memory for an envelope of which more has to come than is read at a time, or for what follows one."""

    def __init__(self, memory: memoryview, finish: Callable[[], _Arrived]) -> None:
        self.missing = memory
        """What has not arrived."""
        self.finish = finish
        """Returns what has arrived when nothing is missing. Raises DecodeError."""

    def read(self, connection: AnySocket) -> bytes:
        """Reads what has arrived; returns what belongs to the frames after it.

        Raises BlockingIOError if nothing has, and ConnectionResetError if the peer has closed the connection.
        """
        if isinstance(connection, TlsSocket):  # decrypts all that has arrived
            data = connection.recv()
            count = self.fill(data)
            after = data[count:]
        else:
            count = connection.recv_into(self.missing)
            self.missing = self.missing[count:]
            after = b""
        if not count:
            raise ConnectionResetError
        return after

    def fill(self, data: bytes | memoryview) -> int:
        """Takes as much of some bytes as is missing; returns how many."""
        count = min(len(data), len(self.missing))
        self.missing[:count] = data[:count]
        self.missing = self.missing[count:]
        return count


@final
class FrameReader:
    """The receiving half of one socket. Used by one thread at a time."""

    def __init__(
        self,
        on_envelope: Callable[..., "concurrent.futures.Future[None] | None"],
        segments: SegmentListener | None = None,
        pulses: PulseExchange | None = None,
        allocate: Callable[[int], memoryview] = lambda nbytes: memoryview(bytearray(nbytes)),
    ) -> None:
        """Has received nothing yet.

        Args:
            on_envelope: called with each envelope, in order: see `TransportListener.on_envelope`.
            segments: handles the frames about shared memory, on a unix socket; None if there must be none.
            pulses: handles those about pulses, there, and saves heartbeats; None if there must be none.
            allocate: returns memory for what follows an envelope. Raises MemoryError if there is none.
        """
        self._on_envelope = on_envelope
        self.segments = segments
        self.pulses = pulses
        self._allocate = allocate
        self._descriptors: deque[int] = deque()
        """In the order of their frames; _LOST for each that this process had no place for."""
        self._beginning = b""
        """Bytes of a frame whose rest has not arrived."""
        self.large: _LargeEnvelope | None = None
        """The envelope that is being received, or what follows one, if more is to come than is read at a time: the
        next bytes are to be read by `read_large`."""
        self.pause: concurrent.futures.Future[None] | None = None
        """The last that `on_envelope` has returned. Whoever has waited for it resets it."""

    def add_descriptors(self, rights: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        """Keeps the descriptors that `recvmsg` has brought; `flags` tell whether the kernel has dropped one.

        Raises ValueError if there are too many. Senders send one at a time.
        """
        for _, _, descriptors in rights:
            count = len(descriptors) // _DESCRIPTOR.size
            self._descriptors.extend(struct.unpack(f"{count}i", descriptors[: count * _DESCRIPTOR.size]))
        if flags & socket.MSG_CTRUNC:
            self._descriptors.append(_LOST)
        if len(self._descriptors) > MAX_DESCRIPTORS:
            raise ValueError("descriptors without segments")

    def read_large(self, connection: AnySocket) -> bool:
        """Reads what has arrived of a large envelope, and returns and raises what `take` does, and OSErrors."""
        large = self.large
        assert large is not None
        after = large.read(connection)
        if large.missing:
            return False
        self.large = None
        self._deliver(*large.finish())
        return self.take(after) if after else False

    def take(self, data: bytes) -> bool:
        """Handles the frames that are complete now, and keeps the beginning of the one after them.

        Returns:
            Whether the peer sends nothing more.

        Raises:
            ConnectionResetError: there is nothing, which tells that the peer has closed the connection.
            DecodeError: an envelope is none.
            ValueError: the bytes are no frames, or contradict earlier ones.
        """
        if not data:
            raise ConnectionResetError
        if self._beginning:
            data = self._beginning + data
        start, end = 0, len(data)
        while end - start >= HEADER.size:
            length, kind = HEADER.unpack_from(data, start)
            content = start + HEADER.size
            if end - content < length:
                if length > _MAX_BYTES.get(kind, MAX_SIDE_FRAME_BYTES):
                    raise ValueError(f"a frame of {length} bytes")
                if length > READ_BYTES:
                    self._begin_large(length, data[content:])
                    start = end
                break
            start = content + length
            if kind == FrameKind.ENVELOPE:
                if length > SMALL_BYTES:
                    length += check_envelope(data[content:start])
                pause = self._on_envelope(agent_pb2.Envelope.FromString(data[content:start]), length)
                if pause is not None:
                    self.pause = pause
            elif kind == FrameKind.ATTACHED:
                start += self._take_attached(data[content:start], memoryview(data)[start:])
            elif kind == FrameKind.END:
                return True
            else:
                self._take_other(kind, data[content:start])
        self._beginning = data[start:]
        return False

    def _begin_large(self, nbytes: int, beginning: bytes) -> None:
        """Begins to receive an envelope of more than READ_BYTES."""
        data = bytearray(nbytes)
        self.large = _LargeEnvelope(memoryview(data), lambda: parse_envelope(bytes(data)))
        self.large.fill(beginning)

    def _take_attached(self, data: bytes, following: memoryview) -> int:
        """Begins to receive what follows an envelope, into memory of its own; returns how much of it is there."""
        if len(data) > MAX_ATTACHING_BYTES:  # `take` checks those that arrive in pieces
            raise ValueError(f"a frame of {len(data)} bytes")
        envelope, nbytes = parse_envelope(data)
        attached_nbytes = envelope.attached_nbytes
        if not 0 < attached_nbytes <= MAX_ATTACHED_BYTES:
            raise DecodeError(f"{attached_nbytes} bytes that are attached to an envelope")
        memory = self._allocate(attached_nbytes)
        large = _LargeEnvelope(memory, lambda: (envelope, nbytes + attached_nbytes, memory))
        count = large.fill(following)
        if large.missing:
            self.large = large
        else:
            self._deliver(envelope, nbytes + attached_nbytes, memory)
        return count

    def _deliver(self, *arrived: Any) -> None:
        if (pause := self._on_envelope(*arrived)) is not None:
            self.pause = pause

    def close(self) -> None:
        """Closes the descriptors whose frames have not come."""
        while self._descriptors:
            if (descriptor := self._descriptors.popleft()) != _LOST:
                os.close(descriptor)

    def _take_other(self, kind: int, content: bytes) -> None:
        if kind == FrameKind.HEARTBEAT and not content:
            return
        if len(content) > MAX_SIDE_FRAME_BYTES:  # `take` checks those that arrive in pieces
            raise ValueError(f"a frame of {len(content)} bytes")
        if kind == FrameKind.PULSE_READ and self.pulses is not None and not content:
            self.pulses.on_read()
        elif kind == FrameKind.PULSE and self.pulses is not None and not content:
            if self._descriptors and (descriptor := self._descriptors.popleft()) != _LOST:
                self.pulses.on_shown(descriptor)  # else this process has no descriptors left, and gets heartbeats
        elif (kind <= FrameKind.SHARED_SEGMENT or kind == FrameKind.SPENT) and self.segments is not None:
            self._take_segment_frame(kind, content, self.segments)
        else:
            raise ValueError(f"a frame of kind {kind}")

    def _take_segment_frame(self, kind: int, content: bytes, segments: SegmentListener) -> None:
        if kind == FrameKind.RELEASED:
            segments.on_released(numbers_in(content))
        elif kind == FrameKind.SPENT:
            segments.on_spent(numbers_in(content))
        elif kind == FrameKind.DROPPED:
            segments.on_dropped(numbers_in(content))
        else:
            if len(content) != SEGMENT.size or not self._descriptors:
                raise ValueError("a segment without its descriptor")
            descriptor = self._descriptors.popleft()
            try:
                number, size = SEGMENT.unpack(content)
                segments.on_segment(number, size, descriptor, is_shared=kind == FrameKind.SHARED_SEGMENT)
            finally:
                if descriptor != _LOST:
                    os.close(descriptor)
