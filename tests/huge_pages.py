"""Makes forks of this process cheap: importing this module moves its memory into huge pages.

The fork server of the tests has 240 MB of its own memory once torch is loaded. In pages of 4 KiB, copying the page
tables for a worker and freeing them at its end costs some 12 ms of processor time, and there are thousands of
workers. Where the kernel cannot do this (before Linux 6.1, or with huge pages switched off), nothing changes.
"""

import ctypes
import gc
from pathlib import Path

MADV_COLLAPSE = 25
"""See madvise(2)."""

HUGE_PAGE_BYTES = 2 << 20


def collapse() -> None:
    """Moves the writable private memory of this process into huge pages, as far as the kernel can."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, inode = line.split()[:5]
        if "w" in permissions and inode == "0":
            first, last = (int(address, 16) for address in addresses.split("-"))
            start = -(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            end = last // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            if start < end:
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


gc.collect()
collapse()
