"""A counter in shared memory, by which workers of one host see that each other is alive without messages.

A worker counts up while its event loop runs. The first heartbeat on a unix socket brings the descriptor of the
counter. When the peer has sent its own, its next heartbeat says that it reads this one. From then on, neither
sends heartbeats on this connection: 32 idle workers would wake each other up a thousand times in a second.
"""

import contextlib
import fcntl
import os
import struct
import threading
from typing import Final, final

from .socket_frames import FrameKind

__all__ = ["Pulse", "PulseExchange"]

_COUNT: Final = struct.Struct("<Q")

_NONE: Final = -1
"""In place of a descriptor."""


@final
class Pulse:
    """The counter of one agent: eight bytes in an anonymous file (memfd). Used on the event loop only."""

    def __init__(self) -> None:
        """Makes the file when it is first shared."""
        self._descriptor = _NONE
        self._count = 0

    def beat(self) -> None:
        """Counts up, if others read it."""
        if self._descriptor != _NONE:
            self._count += 1
            with contextlib.suppress(OSError):  # the memory is there; heartbeats to others must go on
                os.pwrite(self._descriptor, _COUNT.pack(self._count), 0)

    def share(self) -> int:
        """Returns a descriptor to read the counter by. Raises OSError. The caller has to close it."""
        if self._descriptor == _NONE:
            descriptor = os.memfd_create("pulse-of-gradwire", os.MFD_CLOEXEC)
            try:
                os.pwrite(descriptor, _COUNT.pack(self._count), 0)
            except OSError:  # there is no memory for it
                os.close(descriptor)
                raise
            self._descriptor = descriptor
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor != _NONE:
            os.close(self._descriptor)
            self._descriptor = _NONE


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

    def next_heartbeat(self) -> tuple[FrameKind, int] | None:
        """Returns which frame to send as a heartbeat, and the descriptor to send and close, or -1.

        Returns None if none is needed any more. Called on the event loop.
        """
        if not self._is_shown:
            self._is_shown = True
            try:
                return FrameKind.PULSE, self._own.share()
            except OSError:  # no descriptor is left, or there is no /proc: heartbeats go on
                return FrameKind.HEARTBEAT, _NONE
        if self._descriptor != _NONE and not self._has_confirmed:
            self._has_confirmed = True
            return FrameKind.PULSE_READ, _NONE
        return None if self._is_read else (FrameKind.HEARTBEAT, _NONE)

    def on_shown(self, descriptor: int) -> None:
        """Reads the peer's counter by this descriptor from now on, and owns it.

        Raises ValueError, and closes it, if it is no memory, or cannot be read, or the peer has shown one already.
        """
        try:
            # Memory only: to read another file might block.
            fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            os.pread(descriptor, _COUNT.size, 0)  # which the peer may have opened for writing only
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
            seen, self._seen = self._seen, os.pread(self._descriptor, _COUNT.size, 0)
            return seen != self._seen

    def close(self) -> None:
        """Closes the descriptor of the peer's counter."""
        with self._lock:
            self._is_closed = True
            if self._descriptor != _NONE:
                os.close(self._descriptor)
                self._descriptor = _NONE
