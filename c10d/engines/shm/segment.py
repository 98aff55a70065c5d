"""A memory segment shared by the processes of a group, its layout, and the doorbells in it.

The segment is an anonymous file in memory (memfd_create(2)), which the other ranks open through rank 0's entry in
/proc. It never has a name, so the kernel frees it with the last process, however that ends.

Doorbells are counters in shared memory that one process sets and that others wait for. Each has a cache line of
its own, eight words of 64 bits: the first is the counter, the second says whether some thread sleeps until the
counter changes, and the other six are free for data that goes with it. Whatever a process writes to shared memory
before it rings a doorbell is visible to every process that has seen the new counter. This relies on stores
becoming visible in program order, as on x86-64: Python offers no fences for other processors.

A waiting thread first spins, then yields the processor, and then sleeps in the kernel by futex(2), for at most
`MAX_SLEEP_S` at a time.
"""

import _thread
import ctypes
import fcntl
import json
import mmap
import os
import platform
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import torch

from ....errors import ProcessGroupError, UnsupportedOperationError
from ....net.security import printable
from ..base import Setup

__all__ = [
    "BLOCKS_PER_CHANNEL",
    "CACHE_LINE_BYTES",
    "LINE_WORDS",
    "MAX_SLEEP_S",
    "REASON_BYTES",
    "SLOT_BYTES",
    "Channel",
    "Doorbells",
    "Layout",
    "Segment",
    "check_platform",
    "is_supported",
]

SLOT_BYTES = 512 * 1024
"""Bytes of a slot. Larger tensors go through it in pieces."""

BLOCKS_PER_CHANNEL = 8
"""How many messages, or pieces of one, can be in flight on a channel."""

REASON_BYTES = 512
"""Bytes of the text that says why a rank left; longer texts are cut."""

_CHANNELS_BYTES_PER_RANK = 8 * 1024 * 1024
"""Bytes of all channels to one rank, as far as the bounds on the size of a block allow."""

_MAX_BLOCK_BYTES = 256 * 1024

_MIN_BLOCK_BYTES = 4 * 1024

_PAGE_BYTES = 4096

_TOKEN_BYTES = 32

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Fix the size of the file: reading a mapping beyond the end of a file that was shortened kills the process."""

CACHE_LINE_BYTES = 64
"""Bytes of a doorbell."""

LINE_WORDS = CACHE_LINE_BYTES // 8
"""Words of 64 bits in a doorbell."""

MAX_SLEEP_S = 0.1
"""Seconds after which a sleeping thread wakes to check for timeouts and lost ranks."""

SPINS_BEFORE_YIELD = 100
"""How often a waiting thread reads the counter before it yields the processor: some 4 microseconds."""

YIELDS_BEFORE_SLEEP = 200
"""How often a waiting thread yields before it sleeps: some 200 microseconds on an idle processor.

This is longer than waking a process takes; otherwise ranks that are late because they slept would make others
sleep.
"""

_MACHINES = {"x86_64", "AMD64"}

_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1

_ALL_WAITERS = 2**31 - 1

_LOW_HALF = 2**32 - 1

_libc = ctypes.CDLL(None)

_syscall = _libc.syscall

_syscall.restype = ctypes.c_long

_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
]

_sched_yield = _libc.sched_yield  # unlike os.sched_yield of Python 3.11, a call through ctypes releases the GIL

_sched_yield.argtypes = []


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_sleep_timeout = _Timespec(0, int(MAX_SLEEP_S * 1e9))

_SLEEP_TIMEOUT_ADDRESS = ctypes.addressof(_sleep_timeout)


def is_supported() -> bool:
    """Returns whether doorbells work on this machine."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def check_platform() -> None:
    """Raises UnsupportedOperationError where doorbells do not work."""
    if not is_supported():
        raise UnsupportedOperationError(
            "shm",
            f"run on {sys.platform} on {platform.machine()}",
            "it needs Linux and the order in which x86-64 processors make stores visible; use gradwire_gloo",
        )


@final
class Doorbells:
    """The doorbells at the start of a shared segment.

    A doorbell is rung by one process, or by several that never use the same value. Sleeping threads see a change
    in the lower 32 bits of a counter only; a counter does not wrap around within one sleep.

    words: the whole segment in words of 64 bits.
    """

    def __init__(self, words: memoryview, address: int) -> None:
        self.words: Final = words
        self._address = address
        self._sleeping: dict[int, int] = {}  # thread id -> doorbell

    def value(self, doorbell: int) -> int:
        """Returns the counter; 0 before the first ring."""
        return self.words[doorbell * LINE_WORDS]

    def ring(self, doorbell: int, value: int) -> None:
        """Sets the counter and wakes the threads that sleep until it changes."""
        words, at = self.words, doorbell * LINE_WORDS
        has_sleepers = words[at + 1]
        if has_sleepers:
            # Cleared before the counter changes: a thread that sets the flag again in between sees the new counter
            # and does not sleep, or is woken below.
            words[at + 1] = 0
        words[at] = value
        _thread.allocate_lock().acquire()  # a full fence: the counter is visible before the flag is read again
        if has_sleepers or words[at + 1]:
            self._wake(doorbell)

    def wait_for(self, doorbell: int, value: int, check: Callable[[], None]) -> None:
        """Blocks until the counter is at least `value`.

        Calls `check` at least every `MAX_SLEEP_S` seconds while nothing changes, which raises to end the wait.
        """
        words, at = self.words, doorbell * LINE_WORDS
        while (seen := words[at]) < value:
            if not self.wait_for_change(doorbell, seen):
                check()

    def wait_for_change(self, doorbell: int, seen: int) -> bool:
        """Blocks until the counter differs from `seen`, for little more than `MAX_SLEEP_S` seconds at most.

        Returns whether it differs.
        """
        words, at = self.words, doorbell * LINE_WORDS
        for _ in range(SPINS_BEFORE_YIELD):
            if words[at] != seen:
                return True
        for _ in range(YIELDS_BEFORE_SLEEP):
            _sched_yield()
            if words[at] != seen:
                return True
        self._sleep(doorbell, seen)
        return words[at] != seen

    def wake_local_waiters(self) -> None:
        """Wakes all threads of this process that sleep on a doorbell, so that they call their `check`."""
        for doorbell in list(self._sleeping.values()):
            self._wake(doorbell)

    def _sleep(self, doorbell: int, seen: int) -> None:
        thread = _thread.get_ident()
        self._sleeping[thread] = doorbell
        self.words[doorbell * LINE_WORDS + 1] = 1
        # The kernel compares the counter after a fence of its own.
        address = self._address + doorbell * CACHE_LINE_BYTES
        _syscall(_FUTEX, address, _FUTEX_WAIT, seen & _LOW_HALF, _SLEEP_TIMEOUT_ADDRESS, None, 0)
        del self._sleeping[thread]

    def _wake(self, doorbell: int) -> None:
        address = self._address + doorbell * CACHE_LINE_BYTES
        _syscall(_FUTEX, address, _FUTEX_WAKE, _ALL_WAITERS, None, None, 0)


class Channel(NamedTuple):
    """Where the messages from one rank to another are.

    sent, received: doorbells that count the blocks written to and read from the channel.
    blocks: offset of the first block; each has a header of one cache line, and data.
    """

    sent: int
    received: int
    blocks: int


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Indices of doorbells and offsets of data for a group of `size` ranks; offsets are bytes from the start.

    In this order: one cache line of the segment itself; the doorbells, one for each rank and purpose and two for
    each channel, that is, for each ordered pair of ranks; for each rank the text that says why it left; the slots
    of collectives, two for each rank; and the blocks of the channels.

    With up to 128 ranks the segment takes up to 9 MiB for each, of which only pages that are written use memory.
    """

    size: int

    def left_doorbell(self, rank: int) -> int:
        """Returns the doorbell that is not 0 once the rank has left the group."""
        return 1 + rank

    def inbox_doorbell(self, rank: int) -> int:
        """Returns the doorbell that changes with everything that is sent to the rank."""
        return 1 + self.size + rank

    def filled_doorbell(self, rank: int) -> int:
        """Returns the doorbell with the last round for which the rank has filled its slot."""
        return 1 + 2 * self.size + rank

    def reduced_doorbell(self, rank: int) -> int:
        """Returns the doorbell with the last round in which the rank has reduced its part of all slots."""
        return 1 + 3 * self.size + rank

    def done_doorbell(self, rank: int) -> int:
        """Returns the doorbell with the last round whose slots the rank does not read any more."""
        return 1 + 4 * self.size + rank

    def reason_offset(self, rank: int) -> int:
        """Returns the offset of the text that says why a rank left, of `REASON_BYTES` bytes."""
        return CACHE_LINE_BYTES * (1 + (5 + 2 * self.size) * self.size) + REASON_BYTES * rank

    def slot_offset(self, rank: int, parity: int) -> int:
        """Returns the offset of the rank's slot for even (parity 0) or odd (1) rounds."""
        return _page_aligned(self.reason_offset(self.size)) + (2 * rank + parity) * SLOT_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes of data in a block."""
        share = _CHANNELS_BYTES_PER_RANK // (self.size * BLOCKS_PER_CHANNEL)
        aligned = share // CACHE_LINE_BYTES * CACHE_LINE_BYTES
        return min(max(aligned, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)

    def channel(self, source: int, target: int) -> Channel:
        """Returns the channel by which one rank sends to another."""
        number, stride = source * self.size + target, CACHE_LINE_BYTES + self.block_bytes
        sent = self.done_doorbell(self.size) + number
        blocks = self.slot_offset(self.size, 0) + number * BLOCKS_PER_CHANNEL * stride
        return Channel(sent, sent + self.size * self.size, blocks)

    @property
    def total_bytes(self) -> int:
        """Bytes of the segment."""
        return _page_aligned(self.channel(self.size, 0).blocks)


def _page_aligned(offset: int) -> int:
    return -(-offset // _PAGE_BYTES) * _PAGE_BYTES


@final
class Segment:
    """Shared memory of all ranks of a group, which create it together; all zero at first.

    Only pages that are written to use memory. Raises ProcessGroupError, on all ranks, if one cannot map the
    memory.
    """

    def __init__(self, setup: Setup, pid: int) -> None:
        """Maps the memory; `pid` is the process of rank 0."""
        self.layout: Final = Layout(setup.size)
        size = self.layout.total_bytes
        problem = ""
        memory: mmap.mmap | None = None
        descriptor = -1  # rank 0 keeps the file open until all ranks have mapped it
        try:
            if setup.rank == 0:
                descriptor = os.memfd_create("gradwire-shm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(descriptor, size)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
                token = secrets.token_hex(_TOKEN_BYTES // 2)
                memory = mmap.mmap(descriptor, size)
                memory[:_TOKEN_BYTES] = token.encode()
                setup.store.set("segment", json.dumps([descriptor, token]))
            else:
                setup.wait_for_keys(["segment"])
                remote_descriptor, token = json.loads(setup.store.get("segment"))
                memory = _map(pid, remote_descriptor, token, size)
        except OSError as error:
            problem = f"{error.strerror or error} ({error.filename})" if error.filename else str(error)
            if setup.rank == 0:
                setup.store.set("segment", json.dumps([-1, ""]))
        try:
            problems = setup.exchange("mapped", problem)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        for rank, text in enumerate(problems):
            if text:
                raise ProcessGroupError(
                    f"engine 'shm': rank {setup.global_ranks[rank]} cannot share memory with rank "
                    f"{setup.global_ranks[0]}: {printable(text)}. All ranks must run as one user who may open "
                    f"/proc/{pid}/fd; otherwise use gradwire_gloo"
                )
        assert memory is not None
        self.bytes: Final = torch.frombuffer(memory, dtype=torch.uint8)
        """The segment as a tensor: uint8, of shape `(size,)`."""
        self.address: Final = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        """Where the segment starts in this process, valid as long as this object lives."""
        self.doorbells: Final = Doorbells(memoryview(memory).cast("q"), self.address)


def _map(pid: int, descriptor: int, token: str, size: int) -> mmap.mmap:
    """Maps the file that another process has open, and checks by the token that it is the segment."""
    if descriptor < 0:
        raise OSError("it could not create the segment")
    path = f"/proc/{pid}/fd/{descriptor}"
    own_descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(own_descriptor, size)
    except ValueError as error:  # the file is another one, and shorter
        raise OSError(str(error)) from None
    finally:
        os.close(own_descriptor)
    if memory[:_TOKEN_BYTES] != token.encode():
        raise OSError(f"{path} is another file")
    return memory
