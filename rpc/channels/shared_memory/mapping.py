"""Files of shared memory in the address space of this process."""

import ctypes
import fcntl
import mmap
import os
from typing import final

from ...wire.small_tensors import address_of

__all__ = ["MAX_SEGMENTS", "SEALS", "WRITE_SEALS", "Mapping", "address_and_size", "may_send_back"]

MAX_SEGMENTS = 4096
"""Segments that one agent makes, and that it maps of one other worker. A process may have 65,530 mappings."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Of every segment, whose size stays as it is."""

WRITE_SEALS = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE, of which Python has no name
"""Of no segment: each of them keeps others from mapping it so that they can write to it."""

PAGES_AT_A_TIME = 1 << 17
"""Pages whose state is read at a time: eight bytes each."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value

_MADV_DONTFORK, _MADV_DOFORK = 10, 11
_ANY = 0
"""In place of a process id: the mapping is in the memory of children as well."""

_IN_MEMORY, _SWAPPED, _OF_FILE = 0x80, 0x40, 0x20
"""Bits in the last byte of a page's entry in /proc/self/pagemap."""

_NO_COPY = bytes(last for last in range(256) if last & _OF_FILE or not last & (_IN_MEMORY | _SWAPPED))
"""The last bytes of the entries of pages that are those of the file, or not mapped."""


@final
class Mapping:
    """A file in the memory of this process, until this object goes.

    Unlike `mmap`, it keeps no descriptor. What is written to a private one stays in this process: the kernel
    copies a page when it is first written to. Children that are forked have it only if `share_with_children` has
    been called.
    """

    __slots__ = ("_process", "_type", "address", "is_private", "size")

    def __init__(self, descriptor: int, size: int, *, private: bool = False) -> None:
        """Maps the first `size` bytes of a file. Raises OSError."""
        self.is_private = private
        self.size = 0
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address = address
        self._process = os.getpid()
        _libc.madvise(address, size, _MADV_DONTFORK)
        self._type = ctypes.c_char * size
        self.size = size

    def __del__(self) -> None:
        if self.size and self._process in (_ANY, os.getpid()):  # else what a child has there is not this
            _libc.munmap(self.address, self.size)

    def share_with_children(self) -> None:
        """Has the children that are forked from now on have the file in their memory as well."""
        if self._process != _ANY:
            _libc.madvise(self.address, self.size, _MADV_DOFORK)
            self._process = _ANY

    def buffer(self) -> "ctypes.Array[ctypes.c_char]":
        """Returns the bytes as a writable buffer, a new object."""
        made = self._type.from_address(self.address)
        made.mapping = self  # type: ignore[attr-defined] # which lives as long as the buffer
        return made

    def discard_writes(self) -> bool:
        """Drops the copies of pages that a private mapping has, so that it is the file again.

        Returns whether there may have been any. Raises OSError if this process has locked its memory.
        """
        # Most receivers only read. To look for copies takes a tenth of the time of dropping and mapping all pages.
        if not _has_copies(self.address, self.size):
            return False
        if _libc.madvise(self.address, self.size, mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return True


def may_send_back(nbytes: int, segment_bytes: int) -> bool:
    """Returns whether so many bytes may go back in their segment: a small part would keep all of it in use."""
    return segment_bytes <= 4 * nbytes <= 4 * segment_bytes


def address_and_size(data: memoryview) -> tuple[int, int]:
    """Returns what identifies bytes that are kept alive."""
    return address_of(data), data.nbytes


def _has_copies(address: int, size: int) -> bool:
    """Returns whether some pages of a private mapping of a file may not be those of the file."""
    first, count = address // mmap.PAGESIZE, -(-size // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            for begin in range(first, first + count, PAGES_AT_A_TIME):
                wanted = 8 * min(PAGES_AT_A_TIME, first + count - begin)
                entries = os.pread(pages.fileno(), wanted, 8 * begin)
                if len(entries) != wanted:
                    return True
                if entries[7::8].translate(None, _NO_COPY):
                    return True
    except OSError:
        return True  # a system that does not tell
    return False
