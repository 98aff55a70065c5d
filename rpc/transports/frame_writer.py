"""Writes frames into a socket that several threads send by, without waiting for the peer.

The thread that sends also writes, unless another one is writing: that one then takes what has been queued
meanwhile. If the socket's buffer is full, a thread of the executor goes on when there is room.

Ctrl-C may interrupt the main thread between any two steps. So what has been written is noted by the same call that
writes: a C function that a signal does not interrupt, such as `list.extend` over `map`.
"""

import contextlib
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, cast, final

from ...c10d.inheritance import at_fork
from ..execution.executor import Executor
from ..execution.poller import WRITABLE
from .buffers import MAX_AT_ONCE, first_bytes, without_first
from .tls_socket import AnySocket, TlsSocket

__all__ = ["AttachedFrame", "FrameWriter"]

MAX_BEHIND = 32
"""When so many frames wait for another one, all of them are written."""

KEPT_BYTES = 64
"""Bytes that are kept of a frame that will not be written: enough to tell which envelope it carried."""

MAX_WRITE_BYTES = 1 << 20
MAX_WRITE_FRAMES = 64
"""Bytes and frames that one write takes from the queue, at most. A larger frame is written alone."""

_DESCRIPTOR = struct.Struct("i")


@final
class AttachedFrame(bytes):
    """A frame that other bytes follow, which are written from where they are."""

    attached: Sequence[memoryview]

    @classmethod
    def of(cls, frame: bytes, attached: Sequence[memoryview]) -> "AttachedFrame":
        """Returns a frame with what follows it."""
        made = cls(frame)
        made.attached = attached
        return made

    @property
    def buffers(self) -> list[memoryview]:
        """All of its bytes."""
        return [memoryview(self), *self.attached]


def _nbytes(frame: bytes) -> int:
    """Returns the bytes of a frame, those that follow it included."""
    return sum(map(len, frame.buffers)) if type(frame) is AttachedFrame else len(frame)


@final
class _Write:
    """The frames at the beginning of the queue that are being written."""

    __slots__ = ("count", "data", "descriptor", "dropped", "is_begun", "sent")

    def __init__(
        self,
        data: bytes | memoryview | list[memoryview],
        count: int,
        descriptor: int = -1,
        *,
        is_begun: bool = False,
    ) -> None:
        self.is_begun = is_begun
        """Whether other bytes of the frames have been written."""
        self.data = data
        """The bytes that have not been written; several pieces of them go by one `sendmsg`."""
        self.count = count
        """The number of frames."""
        self.descriptor = descriptor
        """The descriptor that goes with them; -1 if there is none."""
        self.sent: list[int] = []
        """The number of bytes that a call has written, once it has."""
        self.dropped: list[bytes] = []
        """The frames, once they have been removed from the queue."""


@final
class FrameWriter:
    """The sending half of a connected socket. Safe to use from any thread, also in signal handlers."""

    def __init__(self, connection: AnySocket, executor: Executor) -> None:
        """Uses a non-blocking socket, which `release` closes. Raises OSError."""
        self._connection = connection
        self._executor = executor
        self._queue: deque[bytes] = deque()
        """Frames that are not written completely."""
        self._behind: deque[bytes] = deque()
        """Frames that wait for another one."""
        self._take_along_at = 0.0
        """The monotonic time from which on any frame takes them along."""
        self._descriptors: deque[tuple[bytes, int]] = deque()
        """The frames in the queue that a descriptor goes with, in order, and the descriptors."""
        self._descriptor_lock = threading.Lock()
        self._writing = threading.Lock()
        """Held by the thread that writes; for ever after `release`."""
        self._current: _Write | None = None
        self._is_full = False
        """Whether the executor waits for room in the socket, and nobody else may write."""
        # epoll knows a descriptor once; the other one is watched for reading.
        self._writable = os.dup(connection.fileno())
        self._is_watched = False
        self._is_to_be_released = False
        self._unwritten: list[bytes] = []
        """The first `KEPT_BYTES` of each frame that was in the queue, and not begun, when the connection broke."""
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
        """Bytes of the frames that are not written completely."""
        return sum(map(_nbytes, list(self._queue)))

    def put(self, frame: bytes) -> None:
        """Writes a frame, or queues it. Drops it if the connection is broken."""
        if self.is_broken:
            return
        self.has_sent = True
        self._queue.append(frame)
        if self._behind and time.monotonic() >= self._take_along_at:
            self._take_along()
        self._flush_if_possible()

    def put_behind(self, frame: bytes, seconds: float) -> None:
        """Queues a frame that waits for another one, to be in the same write; drops it if the socket is broken.

        Args:
            frame: the frame.
            seconds: how long it waits for others of its kind, before any other frame takes them along.
        """
        if self.is_broken:
            return
        if not self._behind or not seconds:
            self._take_along_at = time.monotonic() + seconds
        self._behind.append(frame)
        if len(self._behind) >= MAX_BEHIND:
            self.flush_behind()

    def flush_behind(self) -> None:
        """Writes the frames that wait for another one."""
        if self._behind and not self.is_broken:
            self._take_along()
            self._flush_if_possible()

    def put_descriptor(self, frame: bytes, descriptor: int) -> None:
        """Writes a frame that a descriptor goes with, or queues it. Closes the descriptor when it is sent."""
        with self._descriptor_lock:  # so that both queues have the same order
            if self.is_broken:
                os.close(descriptor)
                return
            self._descriptors.append((frame, descriptor))
            self._queue.append(frame)
        self._flush_if_possible()

    def withdraw(self, is_wanted: Callable[[bytes], bool]) -> bool:
        """Removes a frame from the queue, if nothing of it has been written.

        Args:
            is_wanted: returns whether a frame is the one to remove.

        Returns:
            False if there is no such frame, or another thread is writing.
        """
        if not self._writing.acquire(blocking=False):
            return False
        try:
            first = self._count_begun()
            for index, frame in enumerate(list(self._queue)[first:], first):
                if is_wanted(frame):
                    del self._queue[index]
                    return True
            return False
        finally:
            self._writing.release()
            if self._is_to_be_released:
                self.release()
            else:
                self._flush_if_possible()  # a thread may have found the lock held

    def take_unwritten(self) -> list[bytes]:
        """Returns the first bytes of each frame of which nothing has been written. Called once, after `cut`.

        Returns nothing while another thread is writing: which frames that one has begun cannot be told then.
        """
        if self._writing.acquire(blocking=False):
            self._drop_queue()
            self._writing.release()
            if self._is_to_be_released:
                self.release()
        unwritten, self._unwritten = self._unwritten, []
        return unwritten

    def _count_begun(self) -> int:
        """Returns how many frames at the beginning of the queue are being written. Called with the lock."""
        current = self._current
        if current is None:
            return 0
        # TLS may have encrypted what it has not written.
        if current.sent or current.is_begun or isinstance(self._connection, TlsSocket):
            return current.count
        self._current = None  # nothing of it has been written
        return 0

    def _drop_queue(self) -> None:
        """Drops what will not be written any more. Called with the lock."""
        self._unwritten += [frame[:KEPT_BYTES] for frame in list(self._queue)[self._count_begun() :]]
        self._current = None
        self._queue.clear()

    def cut(self) -> None:
        """Cuts the connection: nothing is sent any more, and the thread that reads finds its end."""
        self.is_broken = True
        with contextlib.suppress(OSError):  # it is closed
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._descriptor_lock:
            while self._descriptors:
                os.close(self._descriptors.popleft()[1])

    def release(self) -> None:
        """Closes the connection; if a thread is writing, that one does it when it is done."""
        self.cut()
        self._is_to_be_released = True
        if self._writing.acquire(blocking=False):
            self._drop_queue()
            self._executor.poller.unwatch(self._writable)
            os.close(self._writable)
            self._connection.close()

    def _take_along(self) -> None:
        with contextlib.suppress(IndexError):  # another thread has taken some
            self._queue.extend(map(deque.popleft, repeat(self._behind, len(self._behind))))

    def _flush_if_possible(self) -> None:
        if self._is_full:
            return
        try:
            self._flush()
        except BaseException:  # Ctrl-C: the executor goes on. From here on, one C function in each block
            try:
                self._executor.poller.handed_over.append((-1, self._on_writable))
            finally:
                self._executor.poller.wake()
            raise

    def _flush(self) -> None:
        # Again after each release: a frame may have been queued by a thread that found the lock held.
        while self._queue and not self._is_full and self._flush_once():
            pass

    def _flush_once(self) -> bool:
        """Writes what is queued, unless another thread is writing; returns whether this one has written."""
        held: list[bool] = []
        try:
            held.extend(map(self._writing.acquire, (False,)))
            if held[0]:
                self._write()
            return held[0]
        except BlockingIOError:
            self._is_full = True
            self._wait_for_writable()
            return True
        except OSError as error:
            if error.errno is None:  # raised by the handler of a signal
                raise
            self._drop_queue()
            self.cut()
            return True
        finally:
            if held == [True]:
                try:
                    self._writing.release()
                finally:
                    if self._is_to_be_released:
                        self.release()

    def _write(self) -> None:
        """Writes what is queued. Called with the lock. Raises BlockingIOError if the socket is full."""
        queue = self._queue
        while True:
            current = self._current
            if current is None:
                if not queue:
                    return
                self._current = current = self._next()
            data = current.data
            if not current.sent:
                if isinstance(data, list):
                    sendmsg = cast("Callable[..., int]", self._connection.sendmsg)
                    first = first_bytes(data, MAX_AT_ONCE)
                    current.sent.extend(map(sendmsg, (first,), ((),), (socket.MSG_NOSIGNAL,)))
                elif current.descriptor < 0:
                    current.sent.extend(map(self._connection.send, (data,), (socket.MSG_NOSIGNAL,)))
                else:
                    self._send_descriptor(current)
            sent = current.sent[0]
            left = without_first(data, sent) if isinstance(data, list) else memoryview(data)[sent:]
            if left:
                self._current = _Write(left, current.count, is_begun=True)
                continue
            if not current.dropped:
                current.dropped.extend(map(deque.popleft, repeat(queue, current.count)))
            self._current = None

    def _next(self) -> _Write:
        """Returns the next frame to write, or several if none of them has a descriptor."""
        queue, first = self._queue, self._queue[0]
        if self._descriptors:
            frame, descriptor = self._descriptors[0]
            if frame is first:
                return _Write(first, 1, descriptor)
        if type(first) is AttachedFrame:
            # TLS encrypts each buffer by itself: see `TlsSocket`.
            is_tls = isinstance(self._connection, TlsSocket)
            return _Write(b"".join(first.buffers) if is_tls else first.buffers, 1)
        if self._descriptors:
            return _Write(first, 1)
        if len(queue) == 1:
            return _Write(first, 1)
        frames, size = [first], len(first)
        while len(frames) < min(len(queue), MAX_WRITE_FRAMES) and not self._descriptors:
            frame = queue[len(frames)]
            size += len(frame)
            if size > MAX_WRITE_BYTES or type(frame) is AttachedFrame:
                break
            frames.append(frame)
        return _Write(b"".join(frames), len(frames))

    def _send_descriptor(self, current: _Write) -> None:
        """Writes a frame together with its descriptor, which is closed then."""
        rights: list[Any] = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(current.descriptor))]
        send = cast("Callable[..., int]", self._connection.sendmsg)
        current.sent.extend(map(send, ([current.data],), (rights,), (socket.MSG_NOSIGNAL,)))
        with self._descriptor_lock:
            if self._descriptors:  # else `cut` has closed it
                os.close(self._descriptors.popleft()[1])

    def _wait_for_writable(self) -> None:
        try:
            if not self._is_watched:
                with contextlib.suppress(FileExistsError):  # Ctrl-C came before that was noted
                    self._executor.watch(self._writable, WRITABLE, self._on_writable)
                self._is_watched = True
            self._executor.poller.watch_again(self._writable)
        except OSError as error:
            if error.errno is None:  # raised by the handler of a signal
                raise
            self.cut()

    def _on_writable(self) -> bool:
        self._is_full = False
        try:
            self._flush()
        except Exception:  # no memory, for one
            self.cut()
            raise
        return False  # `_flush` watches again where it has to


_writers_here: "weakref.WeakSet[FrameWriter]" = weakref.WeakSet()
"""The writers of all agents of this process, which a forked child must not use."""


def _break_in_child() -> None:
    """Keeps a forked child from writing into the sockets that it shares with its parent."""
    for writer in list(_writers_here):
        writer.is_broken = True


at_fork(in_child=_break_in_child)
