"""The memory that payloads are received into, which is used again when their tensors are gone.

Fresh memory costs more than the bytes that are read into it, because the kernel clears each page when it is first
used, and the C library gives large pieces back at once: receiving 64 MiB took twice the processor time.
"""

import contextlib
import mmap
import weakref
from typing import final

import numpy as np
import torch

__all__ = ["BufferCache", "NoMemoryError", "keep_freed_memory"]

MIN_BLOCK_BYTES = 64 << 10
"""Bytes of the smallest piece of memory. The others have twice, four times, … as many."""

HUGE_PAGE_BYTES = 2 << 20
"""Bytes from which memory is to have huge pages, which take less time to clear and to address."""

TRIMMED_BLOCK_BYTES = 31 << 20
"""A block that moves glibc's thresholds when it is freed: the largest such has 32 MiB with what glibc adds."""


def keep_freed_memory() -> None:
    """Has glibc keep up to 64 MiB that are free at the end of each heap, where it keeps 128 KiB at first.

    Otherwise glibc returns the memory of a message's tensors to the kernel, which has to find and clear as many
    pages for the next message: a list of 256 tensors of 64 KiB then takes twice as long. It does this by itself in
    any process that has freed a large tensor (mallopt(3), M_MMAP_THRESHOLD), so a block is made and freed here,
    whose pages are never touched. It changes nothing where the environment sets one of the thresholds, nor under
    other allocators.
    """
    with contextlib.suppress(RuntimeError):  # there is no memory: not for this either
        # No tensor: it may be filled, and be on another device.
        torch.UntypedStorage(TRIMMED_BLOCK_BYTES)  # type: ignore[no-untyped-call]


class NoMemoryError(RuntimeError, MemoryError):
    """The system gives no memory for a buffer."""


@final
class BufferCache:
    """Allocates buffers, and keeps the memory of those that nothing refers to any more.

    Safe to use from any thread. Takes no lock: garbage collection, which may run at any moment, gives memory back.
    """

    def __init__(self, max_bytes: int) -> None:
        """Keeps at most about `max_bytes`; what is in use does not count."""
        self._max_bytes = max_bytes
        sizes = range(MIN_BLOCK_BYTES.bit_length() - 1, max_bytes.bit_length())
        # All sizes from the beginning: the dict must not change while another thread walks through it.
        self._free: dict[int, list[mmap.mmap]] = {1 << exponent: [] for exponent in sizes}
        """By size. The last one was used last."""
        self._was_used = False

    @property
    def free_bytes(self) -> int:
        """Bytes of memory that is kept and not in use."""
        return sum(size * len(blocks) for size, blocks in self._free.items())

    def allocate(self, nbytes: int) -> memoryview:
        """Returns a writable buffer, which may have any contents. Raises NoMemoryError."""
        self._was_used = True
        size = max(MIN_BLOCK_BYTES, 1 << (nbytes - 1).bit_length())
        free = self._free.get(size)
        if free is None:  # more than may be kept
            return memoryview(_allocate(nbytes))
        try:
            block = free.pop()
        except IndexError:
            block = _allocate(size)
        # An array, because all views of its memory refer to it, and tensors as well.
        array = np.frombuffer(block, np.uint8, nbytes)
        weakref.finalize(array, self._release, block).atexit = False
        return array.data

    def remove_idle(self) -> None:
        """Gives the memory back that is not in use, if nothing has been allocated since the last call."""
        if not self._was_used:
            self.clear()
        self._was_used = False

    def clear(self) -> None:
        """Gives the memory back that is not in use."""
        for blocks in self._free.values():
            blocks.clear()

    def close(self) -> None:
        """Keeps nothing any more. Buffers stay as long as something refers to them."""
        self._max_bytes = 0
        self.clear()

    def _release(self, block: mmap.mmap) -> None:
        """Keeps a block that nothing refers to any more. Called by finalizers."""
        size = len(block)
        if self.free_bytes + size <= self._max_bytes:
            self._free[size].append(block)


def _allocate(size: int) -> mmap.mmap:
    try:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise NoMemoryError(f"cannot allocate {size} bytes: {error.strerror}") from None
    if size >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
