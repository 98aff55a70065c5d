"""Doorbells: counters in shared memory that one process sets and that others wait for.

Each doorbell has a cache line of its own, eight words of 64 bits: the first is the counter, the second says
whether some thread sleeps until the counter changes, and the other six are free for data that goes with it.
Whatever a process writes to shared memory before it rings a doorbell is visible to every process that has seen the
new counter. This relies on stores becoming visible in program order, as on x86-64: Python offers no fences for
other processors.

A waiting thread first spins, then yields the processor, and then sleeps in the kernel by futex(2), for at most
`MAX_SLEEP_S` at a time.
"""

import _thread
import ctypes
import platform
import sys
from collections.abc import Callable
from typing import Final, final

from ....errors import UnsupportedOperationError

__all__ = ["CACHE_LINE_BYTES", "LINE_WORDS", "MAX_SLEEP_S", "Doorbells", "check_platform", "is_supported"]

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
        """Sleeps while the counter is `seen`, for at most `MAX_SLEEP_S` seconds."""
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
