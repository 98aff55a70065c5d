"""A connected socket that carries envelopes between two workers, beside their gRPC stream.

Each direction is a sequence of frames (socket_frames.py): envelopes, and what the channel of shared memory has to
tell (segments.py). A frame of kind END ends a direction: the sender leaves in order.
"""

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast, final

from google.protobuf.message import DecodeError

from ...net.socket_peers import process_of_peer
from ..execution.executor import Executor
from ..execution.poller import READABLE
from ..wire.parsing import embed
from .frame_reader import READ_BYTES, RECVMSG_ARGS, FrameReader
from .frame_writer import AttachedFrame, FrameWriter
from .heartbeat import has_unread
from .socket_frames import (
    HEADER,
    MAX_ATTACHING_BYTES,
    MAX_NUMBERS,
    SEGMENT,
    FrameKind,
    numbers_frame,
    take_numbers,
)
from .tls_socket import AnySocket

__all__ = ["CLOSED", "EnvelopeSocket", "OnSocketEnd"]

_CTRUNC = int(socket.MSG_CTRUNC)  # as an enum, it makes an object for each message

CLOSED = "its connection closed without a goodbye; the process has died or was cut off"
"""The reason of a connection that ends before the peer's end."""

log = logging.getLogger(__name__)

OnSocketEnd = Callable[[str], None]
"""Handles the end of a socket: takes the reason, which is empty if the peer has sent its end."""


@final
class EnvelopeSocket:
    """Reads on the executor's threads, and on those that wait for an answer.

    `send` and `finish` may be called from any thread and never block.
    """

    def __init__(
        self, name: str, connection: AnySocket, executor: Executor, reader: FrameReader, on_end: OnSocketEnd
    ) -> None:
        """Takes over a connected socket and its reader, and reads nothing before `start`.

        It is closed by `close`, or when the peer has closed it; `on_end` is called once, after the last envelope.
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
        self.writer = FrameWriter(connection, executor)
        """Writes into the socket."""
        self.released: deque[int] = deque()
        """The segments of the peer that this worker does not use any more, and has not told the peer of."""
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

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> None:
        """Writes an envelope and what is attached to it, or queues them.

        Raises BrokenPipeError if the connection is known to be closed.
        """
        if self.writer.is_broken:
            raise BrokenPipeError
        if attached and len(envelope) > MAX_ATTACHING_BYTES:
            envelope, attached = embed(envelope, attached), ()
        if attached:
            self.flush_released()
            self.writer.put(AttachedFrame.of(HEADER.pack(len(envelope), FrameKind.ATTACHED) + envelope, attached))
            return
        frame = HEADER.pack(len(envelope), FrameKind.ENVELOPE) + envelope
        if self.released:
            frame = self._take_released() + frame  # in one write, for which the peer wakes up once
        self.writer.put(frame)

    def send_segment(self, number: int, size: int, descriptor: int, *, is_shared: bool = False) -> None:
        """Tells the peer of a new segment, before the envelope that uses it. Closes the descriptor."""
        kind = FrameKind.SHARED_SEGMENT if is_shared else FrameKind.SEGMENT
        frame = HEADER.pack(SEGMENT.size, kind) + SEGMENT.pack(number, size)
        self.writer.put_descriptor(frame, descriptor)

    def flush_released(self) -> None:
        """Tells the peer of the segments that this worker does not use any more."""
        while self.released:
            self.writer.put(self._take_released())

    def send_dropped(self, numbers: Sequence[int]) -> None:
        """Tells the peer of segments that this worker will not use again."""
        self._send_numbers(FrameKind.DROPPED, numbers)

    def send_spent(self, numbers: Sequence[int]) -> None:
        """Tells the peer of segments to drop: this worker could not map them, or children of it still use them."""
        self._send_numbers(FrameKind.SPENT, numbers)

    def _send_numbers(self, kind: FrameKind, numbers: Sequence[int]) -> None:
        for first in range(0, len(numbers), MAX_NUMBERS):
            self.writer.put(numbers_frame(kind, numbers[first : first + MAX_NUMBERS]))

    def _take_released(self) -> bytes:
        """Returns the frame that tells of segments which are not used any more."""
        return numbers_frame(FrameKind.RELEASED, take_numbers(self.released))

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
        return has_unread(self.descriptor)

    def take_sent(self) -> bool:
        """Returns whether something has been sent since the last call, or waits for the peer to read."""
        sent, self.writer.has_sent = self.writer.has_sent, False
        return sent or not self.writer.is_empty

    def send_heartbeat(self) -> None:
        """Tells the peer that this worker is alive, unless it sees the pulse."""
        frame = (FrameKind.HEARTBEAT, -1) if self._pulses is None else self._pulses.next_heartbeat()
        if frame is None:
            return
        kind, descriptor = frame
        if descriptor < 0:
            self.writer.put(HEADER.pack(0, kind))
        else:
            self.writer.put_descriptor(HEADER.pack(0, kind), descriptor)

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
                    data, rights, flags, _ = connection.recvmsg(*RECVMSG_ARGS)
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
