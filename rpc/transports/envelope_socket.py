"""A connected socket that carries envelopes between two workers, beside their gRPC stream.

Whichever thread reads has the FrameReader take apart what has come into frames (socket_frames.py), and handles
them. A frame of kind END ends a direction: the sender leaves in order. On a unix socket, frames bring descriptors,
too: of segments of shared memory, and of a counter by which the ends see that each other is alive (PulseExchange).
"""

import concurrent.futures
import contextlib
import fcntl
import logging
import os
import socket
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, cast, final

from google.protobuf.message import DecodeError

from ...net.socket_peers import process_of_peer
from ...proto.v1 import agent_pb2
from ..contracts.options import MAX_ATTACHED_BYTES
from ..execution.executor import Executor
from ..execution.poller import READABLE
from ..wire.parsing import SMALL_BYTES, check_envelope, parse_envelope
from .liveness import PULSE_BYTES, Pulse
from .socket_frames import (
    DESCRIPTOR,
    HEADER,
    MAX_ATTACHING_BYTES,
    MAX_ENVELOPE_BYTES,
    MAX_SIDE_FRAME_BYTES,
    SEGMENT,
    DescriptorFrame,
    FrameKind,
    FrameWriter,
    SegmentListener,
    numbers_in,
)
from .tls_socket import AnySocket, TlsSocket

__all__ = ["CLOSED", "READ_BYTES", "EnvelopeSocket", "FrameReader", "PulseExchange"]

CLOSED = "its connection closed without a goodbye; the process has died or was cut off"
"""The reason of a connection that ends before the peer's end."""

_CTRUNC = int(socket.MSG_CTRUNC)  # as an enum, it makes an object for each message

log = logging.getLogger(__name__)

READ_BYTES: Final = 256 << 10
"""Bytes read at a time."""

MAX_DESCRIPTORS: Final = 64
"""Descriptors that one read can bring, and that may wait for their frames."""

_MAX_BYTES = {FrameKind.ENVELOPE: MAX_ENVELOPE_BYTES, FrameKind.ATTACHED: MAX_ATTACHING_BYTES}
"""Of the content of a frame, by its kind."""

_HEARTBEAT: Final = HEADER.pack(0, FrameKind.HEARTBEAT)

_NONE: Final = -1
"""In place of a descriptor."""

_RECVMSG_ARGS: Final = READ_BYTES, socket.CMSG_SPACE(MAX_DESCRIPTORS * DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
"""The arguments of the `recvmsg` that brings descriptors, too."""


@final
class PulseExchange:
    """How the two ends of one unix socket show each other their counters."""

    def __init__(self, own: Pulse) -> None:
        """Args: own: the counter of this worker."""
        self._own = own
        self._is_shown = False
        """Whether the peer has been given the descriptor of this worker's counter, or cannot be."""
        self._is_read = False
        """Whether the peer has said that it reads it."""
        self._has_confirmed = False
        """Whether the peer has been told that this worker reads the counter of the peer."""
        self._lock = threading.Lock()
        """Guards what follows."""
        self._descriptor = _NONE
        """Of the peer's counter."""
        self._seen = b""
        self._is_closed = False

    def next_heartbeat(self) -> bytes | None:
        """Returns the frame to send as a heartbeat; None if none is needed any more. Called on the event loop."""
        if not self._is_shown:
            self._is_shown = True
            try:
                return DescriptorFrame.of(HEADER.pack(0, FrameKind.PULSE), self._own.share())
            except OSError:  # no descriptor is left, or there is no /proc: heartbeats go on
                return _HEARTBEAT
        if self._descriptor != _NONE and not self._has_confirmed:
            self._has_confirmed = True
            return HEADER.pack(0, FrameKind.PULSE_READ)
        return None if self._is_read else _HEARTBEAT

    def on_shown(self, descriptor: int) -> None:
        """Reads the peer's counter by this descriptor from now on, and owns it.

        Raises ValueError, and closes it, if it is no memory, or cannot be read, or the peer has shown one already.
        """
        try:
            # Memory only: to read another file might block.
            fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            os.pread(descriptor, PULSE_BYTES, 0)  # which the peer may have opened for writing only
        except OSError:
            os.close(descriptor)
            raise ValueError("a counter that is no memory, or cannot be read") from None
        with self._lock:
            if self._descriptor == _NONE and not self._is_closed:
                self._descriptor = descriptor
                return
        os.close(descriptor)
        if not self._is_closed:
            raise ValueError("a second counter")

    def on_read(self) -> None:
        """Handles that the peer reads this worker's counter. Raises ValueError if it was not shown."""
        if not self._is_shown:
            raise ValueError("it reads a counter that it was not shown")
        self._is_read = True

    def has_beaten(self) -> bool:
        """Returns whether the peer has counted up since the last call. Called on the event loop."""
        with self._lock:
            if self._descriptor == _NONE:
                return False
            seen, self._seen = self._seen, os.pread(self._descriptor, PULSE_BYTES, 0)
            return seen != self._seen

    def close(self) -> None:
        """Closes the descriptor of the peer's counter."""
        with self._lock:
            self._is_closed = True
            if self._descriptor != _NONE:
                os.close(self._descriptor)
                self._descriptor = _NONE


_Arrived = tuple[agent_pb2.Envelope, int] | tuple[agent_pb2.Envelope, int, memoryview]
"""An envelope, the bytes of memory that it takes, and those that followed it, if any did."""


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
        """In the order of their frames; _NONE for each that this process had no place for."""
        self._beginning = b""
        """Bytes of a frame whose rest has not arrived."""
        self.large: tuple[memoryview, Callable[[], _Arrived]] | None = None
        """If more has to come of an envelope, or of what follows one, than is read at a time: the memory for what
        has not arrived, and what returns all of it then, or raises DecodeError. See `read_large`."""
        self.pause: concurrent.futures.Future[None] | None = None
        """The last that `on_envelope` has returned. Whoever has waited for it resets it."""

    def add_descriptors(self, rights: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        """Keeps the descriptors that `recvmsg` has brought; `flags` tell whether the kernel has dropped one.

        Raises ValueError if there are too many. Senders send one at a time.
        """
        for _, _, descriptors in rights:
            count = len(descriptors) // DESCRIPTOR.size
            self._descriptors.extend(struct.unpack(f"{count}i", descriptors[: count * DESCRIPTOR.size]))
        if flags & socket.MSG_CTRUNC:
            self._descriptors.append(_NONE)
        if len(self._descriptors) > MAX_DESCRIPTORS:
            raise ValueError("descriptors without segments")

    def read_large(self, connection: AnySocket) -> bool:
        """Reads what has arrived of a large envelope, and returns and raises what `take` does, and OSErrors."""
        assert self.large is not None
        missing, finish = self.large
        after = b""
        if isinstance(connection, TlsSocket):  # decrypts all that has arrived
            data = connection.recv()
            count = min(len(data), len(missing))
            missing[:count], after = data[:count], data[count:]
        else:
            count = connection.recv_into(missing)
        if not count:
            raise ConnectionResetError
        if count < len(missing):
            self.large = missing[count:], finish
            return False
        self.large = None
        self._deliver(*finish())
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
        data[: len(beginning)] = beginning
        self.large = memoryview(data)[len(beginning) :], lambda: parse_envelope(bytes(data))

    def _take_attached(self, data: bytes, following: memoryview) -> int:
        """Begins to receive what follows an envelope, into memory of its own; returns how much of it is there."""
        if len(data) > MAX_ATTACHING_BYTES:  # `take` checks those that arrive in pieces
            raise ValueError(f"a frame of {len(data)} bytes")
        envelope, nbytes = parse_envelope(data)
        attached_nbytes = envelope.attached_nbytes
        if not 0 < attached_nbytes <= MAX_ATTACHED_BYTES:
            raise DecodeError(f"{attached_nbytes} bytes that are attached to an envelope")
        memory = self._allocate(attached_nbytes)
        count = min(len(following), attached_nbytes)
        memory[:count] = following[:count]
        if count < attached_nbytes:
            self.large = memory[count:], lambda: (envelope, nbytes + attached_nbytes, memory)
        else:
            self._deliver(envelope, nbytes + attached_nbytes, memory)
        return count

    def _deliver(self, *arrived: Any) -> None:
        if (pause := self._on_envelope(*arrived)) is not None:
            self.pause = pause

    def close(self) -> None:
        """Closes the descriptors whose frames have not come."""
        while self._descriptors:
            if (descriptor := self._descriptors.popleft()) != _NONE:
                os.close(descriptor)

    def _take_other(self, kind: int, content: bytes) -> None:
        if kind == FrameKind.HEARTBEAT and not content:
            return
        if len(content) > MAX_SIDE_FRAME_BYTES:  # `take` checks those that arrive in pieces
            raise ValueError(f"a frame of {len(content)} bytes")
        if kind == FrameKind.PULSE_READ and self.pulses is not None and not content:
            self.pulses.on_read()
        elif kind == FrameKind.PULSE and self.pulses is not None and not content:
            if self._descriptors and (descriptor := self._descriptors.popleft()) != _NONE:
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
                if descriptor != _NONE:
                    os.close(descriptor)


@final
class EnvelopeSocket:
    """Reads on the executor's threads, and on those that wait for an answer."""

    def __init__(
        self,
        name: str,
        connection: AnySocket,
        executor: Executor,
        reader: FrameReader,
        on_end: Callable[[str], None],
    ) -> None:
        """Takes over a connected socket and its reader, and reads nothing before `start`.

        It is closed by `close`, or when the peer has closed it. `on_end` is called once, after the last envelope,
        with the reason, which is empty if the peer has sent its end.
        """
        self.name = name
        """What debug info calls this kind of connection."""
        connection.settimeout(0)
        self._connection = connection
        self._executor = executor
        self._on_end = on_end
        self.malformed: Exception | None = None
        """The error of bytes that are no message, if the peer has sent such."""
        self._segments = reader.segments
        self._pulses = reader.pulses
        released: deque[int] = deque() if reader.segments is None else reader.segments.released
        self.writer = FrameWriter(connection, executor, released)
        """Sends by the socket."""
        self._paused: list[int] = []
        """The descriptor of the socket while nothing is read; whoever takes it out has reading go on."""
        self.descriptor = connection.fileno()
        self.process = process_of_peer(cast("Any", connection)) if reader.segments is not None else 0
        """The process at the other end of a unix socket; 0 if it is in another namespace."""
        self.has_heard = True
        """Whether something has come since this was set to False."""
        self.reading = threading.Lock()
        """Held by the thread that reads."""
        # What follows is used with the lock.
        self._reader = reader
        self._has_ended = False
        """Whether nothing more is read."""

    def start(self) -> None:
        """Begins to read."""
        self._executor.watch(self.descriptor, READABLE, self.on_readable)

    def finish(self) -> None:
        """Tells the peer, after all that has been sent, that nothing more will come."""
        self.writer.put(HEADER.pack(0, FrameKind.END))

    def close(self) -> Collection[bytes]:
        """Cuts the connection; returns the beginnings of the envelopes of which nothing has been written."""
        self.writer.cut()
        unsent = self.writer.take_unwritten()
        if self._has_ended:
            self.release()
        self._read_on()
        return unsent

    def release(self) -> None:
        """Releases a connection that no thread reads any more, unless a thread is writing."""
        self.writer.release()
        if self._pulses is not None:
            self._pulses.close()
        self._reader.close()

    def take_heard(self) -> bool:
        """Returns whether something has come from the peer since the last call, or its pulse was seen."""
        heard, self.has_heard = self.has_heard, False
        if heard or self._has_ended or (self._pulses is not None and self._pulses.has_beaten()):
            return True
        return _has_unread(self.descriptor)

    def take_sent(self) -> bool:
        """Returns whether something has been sent since the last call, or waits for the peer to read."""
        sent, self.writer.has_sent = self.writer.has_sent, False
        return sent or not self.writer.is_empty

    def send_heartbeat(self) -> None:
        """Tells the peer that this worker is alive, unless it sees the pulse."""
        frame = _HEARTBEAT if self._pulses is None else self._pulses.next_heartbeat()
        if frame is not None:
            self.writer.put(frame)

    def on_readable(self) -> bool:
        """Reads and handles a chunk; returns False if another thread reads, which has it read again after that."""
        if not self.reading.acquire(blocking=False):
            return False
        try:
            self.read()
        finally:
            if self._reader.pause is None:
                self.reading.release()
            else:
                self.end_reading()
        # Not before: another thread may have found the lock held since a pause has ended.
        return not self._has_ended and not self._paused

    def read(self) -> bool:
        """Reads and handles a chunk; returns False if nothing more is to be read for now. Called with the lock."""
        if self._has_ended or self._paused:
            return False
        reader = self._reader
        try:
            if reader.large is not None:
                has_ended = reader.read_large(self._connection)
            else:
                if self._segments is None:
                    data = self._connection.recv(READ_BYTES)
                else:
                    connection: Any = self._connection  # a TlsSocket has no descriptors
                    data, rights, flags, _ = connection.recvmsg(*_RECVMSG_ARGS)
                    if rights or flags & _CTRUNC:
                        reader.add_descriptors(rights, flags)
                has_ended = reader.take(data)
            self.has_heard = True
            if has_ended:
                self._end("")
        except BlockingIOError:
            pass
        except Exception as error:
            self._end(self._reason_of(error))
        except BaseException:  # of the handler of a signal: bytes may be lost
            self.writer.cut()
            raise
        if reader.pause is None:
            return not self._has_ended
        if not self._has_ended:
            self._paused.append(self.descriptor)
        return False

    def _reason_of(self, error: Exception) -> str:
        """Returns why nothing more is read after an error."""
        if isinstance(error, DecodeError | ValueError):
            self.malformed = error
            return f"it sent bytes that are no message: {error}"
        if isinstance(error, OSError):
            return f"its connection broke: {error}" if str(error) else CLOSED
        log.error("a message cannot be handled", exc_info=error)
        return f"its connection failed: {error!r}"

    def end_reading(self) -> None:
        """Lets other threads read."""
        pause, self._reader.pause = self._reader.pause, None
        self.reading.release()
        # Not before: whoever reads after the pause must find the lock free, or nobody would.
        if pause is not None and self._paused:
            if self.writer.is_broken:  # what is left is read to the end: `close` may have come before the pause
                self._read_on()
            else:
                pause.add_done_callback(self._read_on)

    def _read_on(self, *_: object) -> None:
        """Ends a pause. Does nothing if there is none."""
        with contextlib.suppress(IndexError):
            self._executor.poller.watch_again(self._paused.pop())

    def _end(self, reason: str) -> None:
        """Stops reading and reports the end. After the peer's end, this worker may still write."""
        self._has_ended = True
        self._executor.poller.unwatch(self.descriptor)
        if reason or self.writer.is_broken:
            self.release()
        self._on_end(reason)


def _has_unread(descriptor: int) -> bool:
    """Returns whether bytes have come by a socket that nobody has read, or it is closed."""
    count = bytearray(4)
    try:
        fcntl.ioctl(descriptor, termios.FIONREAD, count)
    except OSError:
        return True
    return any(count)
