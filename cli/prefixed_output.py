"""The output of several processes as lines, each with the name of the process in front."""

import contextlib
import fcntl
import os
import selectors
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, Final, Self, final

__all__ = ["PrefixedOutput"]

READ_BYTES: Final = 1 << 16
MAX_LINE_BYTES: Final = 1 << 16
"""A longer line is written in parts."""


@dataclass(slots=True)
class _Pipe:
    """The reading end of a pipe, and what has been read of a line."""

    descriptor: int
    prefix: bytes
    target: BinaryIO
    line: bytearray = field(default_factory=bytearray)


@final
class PrefixedOutput:
    """Copies lines from pipes to streams of this process, on a thread that ends with the context."""

    def __init__(self) -> None:
        """Starts the thread."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._new: deque[_Pipe] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="gradwire-spawn-output", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Writes what is in the pipes by now, and ends the thread."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    @contextmanager
    def pipe(self, name: str, target: BinaryIO) -> Iterator[int]:
        """Context manager for starting a process; its value is a descriptor for what the process prints.

        Args:
            name: what is put in front of each line.
            target: where the lines go.
        """
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._new.append(_Pipe(reading, f"[{name}] ".encode(), target))
        os.eventfd_write(self._wake, 1)
        try:
            yield writing
        finally:
            os.close(writing)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            is_closing = False
            while not is_closing:
                ready = [key.data for key, _ in selector.select() if key.data is not None]
                is_closing = self._is_closing  # what is in the pipes from now on may stay there
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                while self._new:
                    pipe = self._new.popleft()
                    selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)
                for pipe in ready:
                    if not _copy(pipe):
                        _finish(pipe, selector)
            for pipe in [key.data for key in selector.get_map().values() if key.data is not None]:
                left = fcntl.fcntl(pipe.descriptor, fcntl.F_GETPIPE_SZ)  # what a process left may write for ever
                while left > 0 and (copied := _copy(pipe)):
                    left -= copied
                _finish(pipe, selector)


def _copy(pipe: _Pipe) -> int:
    """Copies lines that have arrived. Returns the number of bytes; 0 if there are none, or there will be none."""
    try:
        data = os.read(pipe.descriptor, READ_BYTES)
    except BlockingIOError:
        return 0
    *lines, rest = (pipe.line + data).split(b"\n")
    if len(rest) > MAX_LINE_BYTES:
        lines, rest = [*lines, rest], bytearray()
    _write(pipe, lines)
    pipe.line = rest
    return len(data)


def _finish(pipe: _Pipe, selector: selectors.BaseSelector) -> None:
    if pipe.line:
        _write(pipe, [pipe.line])
    selector.unregister(pipe.descriptor)
    os.close(pipe.descriptor)


def _write(pipe: _Pipe, lines: list[bytearray]) -> None:
    with contextlib.suppress(OSError, ValueError):  # whoever reads this has left; the processes go on
        pipe.target.write(b"".join(pipe.prefix + line + b"\n" for line in lines))
        pipe.target.flush()
