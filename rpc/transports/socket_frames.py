"""The frames of an envelope socket, and how several threads write them without waiting for the peer.

Each direction of a socket is a sequence of frames: a header, with the length and the kind of the content, and the
content, which is an envelope, or tells of segments of shared memory, or that the sender lives.

The thread that sends also writes, unless another one is writing: that one then takes what has been queued
meanwhile. If the socket's buffer is full, a thread of the executor goes on when there is room.
"""

import contextlib
import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from typing import Protocol, cast, final

from ...net.inheritance import at_fork
from ..execution.executor import Executor
from ..execution.poller import WRITABLE
from ..wire.parsing import embed
from .tls_socket import AnySocket, TlsSocket, send_some

__all__ = [
    "BEGINNING_BYTES",
    "DESCRIPTOR",
    "HEADER",
    "MAX_ATTACHING_BYTES",
    "MAX_ENVELOPE_BYTES",
    "MAX_SIDE_FRAME_BYTES",
    "SEGMENT",
    "DescriptorFrame",
    "FrameKind",
    "FrameWriter",
    "SegmentListener",
    "numbers_frame",
    "numbers_in",
]

BEGINNING_BYTES = 11
"""Bytes of the beginning of an envelope, by which it is known among all that a worker sends: its id and type."""

MAX_ENVELOPE_BYTES = 63 << 20
"""Bytes of the largest envelope. Large payloads are not in it: only hundreds of thousands of tensors fill one."""

MAX_NUMBERS = 1024
"""Numbers of segments in a frame."""

MAX_SIDE_FRAME_BYTES = 8 * MAX_NUMBERS
"""Bytes of the content of a frame that is no envelope."""

MAX_ATTACHING_BYTES = 64 << 10
"""Bytes of an envelope that other bytes may follow."""

HEADER = struct.Struct("<IB")
"""Length in bytes, and kind."""

SEGMENT = struct.Struct("<QQ")
"""The content of a frame about a new segment: its number, and its size in bytes."""

DESCRIPTOR = struct.Struct("i")
"""A descriptor that goes with a frame, as the kernel passes it on."""

MAX_WRITE_BYTES = 1 << 20
MAX_WRITE_FRAMES = 64
"""Bytes and frames that one write takes from the queue, at most. A larger frame is written alone."""


class FrameKind(IntEnum):
    """The kinds of frames."""

    ENVELOPE = 0
    END = 1
    SEGMENT = 2  # a number and a size; with a descriptor
    RELEASED = 3  # numbers of segments
    DROPPED = 4  # the same
    SHARED_SEGMENT = 5  # as SEGMENT
    HEARTBEAT = 6  # empty
    PULSE = 7  # empty; with a descriptor
    PULSE_READ = 8  # empty
    ATTACHED = 9  # as ENVELOPE; what is attached to it follows
    SPENT = 10  # as RELEASED, of segments that are not to be used again


def numbers_frame(kind: FrameKind, numbers: Sequence[int]) -> bytes:
    """Returns a frame with numbers of segments, at most MAX_NUMBERS."""
    return HEADER.pack(8 * len(numbers), kind) + struct.pack(f"<{len(numbers)}Q", *numbers)


def numbers_in(content: bytes) -> Sequence[int]:
    """Returns the numbers of segments in the content of a frame. Raises ValueError if it has another length."""
    if len(content) % 8:
        raise ValueError("numbers of segments of another length")
    return struct.unpack(f"<{len(content) // 8}Q", content)


def _beginning_of(frame: bytes) -> bytes:
    """Returns the beginning of the envelope in a frame; empty if it has none."""
    has_envelope = HEADER.unpack_from(frame)[1] in (FrameKind.ENVELOPE, FrameKind.ATTACHED)
    return frame[HEADER.size : HEADER.size + BEGINNING_BYTES] if has_envelope else b""


class SegmentListener(Protocol):
    """Handles the frames about segments of shared memory, for one peer. Its methods must not block.

    They raise ValueError if the peer contradicts itself, which costs the connection.
    """

    @property
    def released(self) -> deque[int]:
        """The segments of the peer that this worker does not use any more, and has not told the peer of."""

    def connect(self, writer: "FrameWriter") -> None:
        """Uses a socket to tell the peer of segments. Called before anything is sent by it."""

    def on_segment(self, number: int, size: int, descriptor: int, *, is_shared: bool) -> None:
        """Handles a segment that the peer has made, of so many bytes; the descriptor is closed after that.

        It is -1 if it was lost, because this process had none left. Other workers receive a shared one, too.
        """

    def on_released(self, numbers: Sequence[int]) -> None:
        """Handles segments of this worker that the peer does not use any more."""

    def on_spent(self, numbers: Sequence[int]) -> None:
        """Handles segments to drop: the peer could not map them, or children of it still use them."""

    def on_dropped(self, numbers: Sequence[int]) -> None:
        """Handles segments that the peer will not use again."""


@final
class _AttachedFrame(bytes):
    """A frame that other bytes follow, which are written from where they are."""

    attached: Sequence[memoryview]

    @classmethod
    def of(cls, frame: bytes, attached: Sequence[memoryview]) -> "_AttachedFrame":
        made = cls(frame)
        made.attached = attached
        return made

    @property
    def buffers(self) -> list[memoryview]:
        """All of its bytes."""
        return [memoryview(self), *self.attached]


@final
class DescriptorFrame(bytes):
    """A frame that a descriptor goes with, which is closed when nobody needs the frame any more."""

    descriptor: int

    @classmethod
    def of(cls, frame: bytes, descriptor: int) -> "DescriptorFrame":
        """Returns a frame with the descriptor that goes with it, and that it owns."""
        made = cls(frame)
        made.descriptor = descriptor
        return made

    def __del__(self) -> None:
        os.close(self.descriptor)


def _nbytes(frame: bytes) -> int:
    """Returns the bytes of a frame, those that follow it included."""
    return sum(map(len, frame.buffers)) if type(frame) is _AttachedFrame else len(frame)


@final
class FrameWriter:
    """The sending half of a connected socket. Safe to use from any thread, also in signal handlers."""

    def __init__(self, connection: AnySocket, executor: Executor, released: deque[int]) -> None:
        """Uses a non-blocking socket, which `release` closes. Raises OSError.

        The peer is told of `released` segments before the next envelope: see SegmentListener.
        """
        self._connection = connection
        self._released = released
        self._executor = executor
        self._queue: deque[bytes] = deque()
        """Frames that are not written completely."""
        self._writing = threading.Lock()
        """Held by the thread that writes; for ever after `release`."""
        # Of the thread that writes.
        self._begun = 0
        """How many frames at the beginning of the queue are being written."""
        self._left: list[memoryview] = []
        """The bytes of these that have not been written."""
        self._is_partial = False
        """Whether some of their bytes have been."""
        self._is_full = False
        """Whether the executor waits for room in the socket, and nobody else may write."""
        # epoll knows a descriptor once; the other one is watched for reading.
        self._writable = os.dup(connection.fileno())
        self._is_watched = False
        self._is_to_be_released = False
        self._unwritten: set[bytes] = set()
        """The beginnings of the envelopes in the queue, and not begun, when the connection broke."""
        self.is_broken = False
        """Whether nothing can be sent any more."""
        self.has_sent = False
        """Whether something has been sent since this was set to False."""
        _writers_here.add(self)

    @property
    def is_empty(self) -> bool:
        """Whether all frames have been written."""
        return not self._queue

    @property
    def queued_bytes(self) -> int:
        """Bytes of the frames that are not written completely: that the operating system has not taken."""
        return sum(map(_nbytes, list(self._queue)))

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> None:
        """Writes an envelope and what is attached to it, or queues them.

        Raises BrokenPipeError if the connection is known to be closed.
        """
        if self.is_broken:
            raise BrokenPipeError
        if attached and len(envelope) > MAX_ATTACHING_BYTES:
            envelope, attached = embed(envelope, attached), ()
        if attached:
            self.flush_released()
            self.put(_AttachedFrame.of(HEADER.pack(len(envelope), FrameKind.ATTACHED) + envelope, attached))
            return
        frame = HEADER.pack(len(envelope), FrameKind.ENVELOPE) + envelope
        if self._released:
            frame = self._take_released() + frame  # in one write, for which the peer wakes up once
        self.put(frame)

    def send_segment(self, number: int, size: int, descriptor: int, *, is_shared: bool = False) -> None:
        """Tells the peer of a new segment, before the envelope that uses it. Closes the descriptor."""
        kind = FrameKind.SHARED_SEGMENT if is_shared else FrameKind.SEGMENT
        frame = HEADER.pack(SEGMENT.size, kind) + SEGMENT.pack(number, size)
        self.put(DescriptorFrame.of(frame, descriptor))

    def flush_released(self) -> None:
        """Tells the peer of the segments that this worker does not use any more."""
        while self._released:
            self.put(self._take_released())

    def send_numbers(self, kind: FrameKind, numbers: Sequence[int]) -> None:
        """Tells the peer of segments, of any number."""
        for first in range(0, len(numbers), MAX_NUMBERS):
            self.put(numbers_frame(kind, numbers[first : first + MAX_NUMBERS]))

    def _take_released(self) -> bytes:
        """Returns a frame with some of the released segments, which other threads may take, too."""
        taken: list[int] = []
        try:
            while len(taken) < MAX_NUMBERS:
                taken.append(self._released.popleft())
        except IndexError:  # there are no more
            pass
        return numbers_frame(FrameKind.RELEASED, taken)

    def put(self, frame: bytes = b"") -> None:
        """Writes a frame behind those that are queued, or queues it; drops it if the connection is broken.

        Without a frame, writes what is queued.
        """
        queue, connection = self._queue, self._connection
        if frame:
            if self.is_broken:
                return
            self.has_sent = True
            queue.append(frame)
        # Again after each release: a frame may have been queued by a thread that found the lock held.
        while queue and not self._is_full and self._writing.acquire(blocking=False):
            try:
                while queue:
                    frame = queue[0]
                    if self._begun or queue[-1] is not frame or type(frame) is not bytes:
                        self._write_some()
                        continue
                    self._begun = 1
                    sent = connection.send(frame, socket.MSG_NOSIGNAL)
                    if frame[sent : sent + 1]:
                        self._left, self._is_partial = [memoryview(frame)[sent:]], True
                    else:
                        queue.popleft()
                        self._begun = 0
            except BlockingIOError:
                self._unbegin()
                self._is_full = True
                self._wait_for_writable()
            except OSError:
                self._drop_queue()
                self.cut()
            except BaseException:  # of the handler of a signal, or no memory
                self.cut()
                raise
            finally:
                self._writing.release()
                if self._is_to_be_released:
                    self.release()

    def withdraw(self, beginning: bytes) -> bool:
        """Removes the envelope with this beginning from the queue, if nothing of it has been written.

        Returns False if there is none, or another thread is writing.
        """
        if not self._writing.acquire(blocking=False):
            return False
        try:
            self._unbegin()
            first = self._begun
            for index, frame in enumerate(list(self._queue)[first:], first):
                if _beginning_of(frame) == beginning:
                    del self._queue[index]
                    return True
            return False
        finally:
            self._writing.release()
            if self._is_to_be_released:
                self.release()
            else:
                self.put()  # a thread may have found the lock held

    def take_unwritten(self) -> Collection[bytes]:
        """Returns the beginnings of the envelopes of which nothing has been written. Called once, after `cut`.

        Returns nothing while another thread is writing: which frames that one has begun cannot be told then.
        """
        if self._writing.acquire(blocking=False):
            self._drop_queue()
            self._writing.release()
            if self._is_to_be_released:
                self.release()
        return self._unwritten

    def _drop_queue(self) -> None:
        """Drops what will not be written any more. Called with the lock."""
        self._unbegin()
        self._unwritten |= set(map(_beginning_of, list(self._queue)[self._begun :])) - {b""}
        self._begun, self._left, self._is_partial = 0, [], False
        self._queue.clear()

    def cut(self) -> None:
        """Cuts the connection: nothing is sent any more, and the thread that reads finds its end."""
        self.is_broken = True
        with contextlib.suppress(OSError):  # it is closed
            self._connection.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Closes the connection; if a thread is writing, that one does it when it is done."""
        self.cut()
        self._is_to_be_released = True
        if self._writing.acquire(blocking=False):
            self._drop_queue()
            self._executor.poller.unwatch(self._writable)
            os.close(self._writable)
            self._connection.close()

    def _write_some(self) -> None:
        """Begins to write the next frames, or goes on with those that are begun."""
        if not self._left:
            self._begin_next()
        if len(self._left) > 1:
            _, self._left = send_some(self._connection, self._left)
        else:
            data, frame = self._left[0], self._queue[0]
            if type(frame) is DescriptorFrame and not self._is_partial:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, DESCRIPTOR.pack(frame.descriptor))]
                send = cast("Callable[..., int]", self._connection.sendmsg)
                sent = send([data], rights, socket.MSG_NOSIGNAL)
            else:
                sent = self._connection.send(data, socket.MSG_NOSIGNAL)
            self._left = [data[sent:]] if sent < len(data) else []
        self._is_partial = True
        if not self._left:
            for _ in range(self._begun):
                self._queue.popleft()
            self._begun, self._is_partial = 0, False

    def _begin_next(self) -> None:
        """Takes the next frame, or several if nothing goes with any of them, as those that are being written."""
        queue, first = self._queue, self._queue[0]
        if self._begun:  # TLS has tried to write it alone
            self._left = [memoryview(first)]
            return
        self._begun = 1
        if type(first) is _AttachedFrame:
            # TLS encrypts each buffer by itself: see `TlsSocket`.
            is_tls = isinstance(self._connection, TlsSocket)
            self._left = [memoryview(b"".join(first.buffers))] if is_tls else first.buffers
            return
        frames, size = [first], len(first)
        while len(frames) < min(len(queue), MAX_WRITE_FRAMES) and type(first) is bytes:
            frame = queue[len(frames)]
            size += len(frame)
            if size > MAX_WRITE_BYTES or type(frame) is not bytes:
                break
            frames.append(frame)
        self._begun = len(frames)
        self._left = [memoryview(first if len(frames) == 1 else b"".join(frames))]

    def _unbegin(self) -> None:
        """Has frames of which nothing is written begun anew. TLS, which may have encrypted them, goes on."""
        if not self._is_partial and not isinstance(self._connection, TlsSocket):
            self._begun, self._left = 0, []

    def _wait_for_writable(self) -> None:
        try:
            if not self._is_watched:
                self._is_watched = True
                self._executor.watch(self._writable, WRITABLE, self._on_writable)
            else:
                self._executor.poller.watch_again(self._writable)
        except OSError:
            self.cut()

    def _on_writable(self) -> bool:
        self._is_full = False
        self.put()
        return False  # `put` has it watched again where it has to be


_writers_here: "weakref.WeakSet[FrameWriter]" = weakref.WeakSet()
"""The writers of all agents of this process, which a forked child must not use."""


def _break_in_child() -> None:
    """Keeps a forked child from writing into the sockets that it shares with its parent."""
    for writer in list(_writers_here):
        writer.is_broken = True


at_fork(in_child=_break_in_child)
