"""Memory of received tensors that the program has dropped, and that the next ones get."""

from contextlib import suppress

import torch

__all__ = ["keep_freed_memory"]

BLOCK_BYTES = 31 << 20
"""A block that moves glibc's thresholds when it is freed: the largest such has 32 MiB with what glibc adds."""


def keep_freed_memory() -> None:
    """Has glibc keep up to 64 MiB that are free at the end of each heap, where it keeps 128 KiB at first.

    Otherwise glibc returns the memory of a message's tensors to the kernel, which has to find and clear as many
    pages for the next message: a list of 256 tensors of 64 KiB then takes twice as long. It does this by itself in
    any process that has freed a large tensor (mallopt(3), M_MMAP_THRESHOLD), so a block is made and freed here,
    whose pages are never touched. It changes nothing where the environment sets one of the thresholds, nor under
    other allocators.
    """
    with suppress(RuntimeError):  # there is no memory: not for this either
        # No tensor: it may be filled, and be on another device.
        torch.UntypedStorage(BLOCK_BYTES)  # type: ignore[no-untyped-call]
