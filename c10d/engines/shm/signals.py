"""Numbers in shared memory that one process sets and others wait for.

Each number, a signal, has a cache line of its own: eight words of 64 bits, of which the first is the number, the
second says whether somebody sleeps until it changes, and the other six are free for data that goes with it. What a
process writes to shared memory before it posts a number is there for whoever has seen the number. That needs a
processor whose stores become visible in their order, as x86-64's do: Python has no fences for others.

Who waits looks some times and then sleeps in the kernel (futex(2)), at most SLICE at a time.
"""

import _thread
import ctypes
import platform
import sys
from collections.abc import Callable
from typing import Final, final

from ....errors import UnsupportedOperationError

__all__ = ["LINE", "SLICE", "Signals", "check_platform", "runs_here"]

LINE = 64
"""Bytes of a signal: a cache line."""

_WORDS = LINE // 8

SLICE = 0.1
"""Seconds that a waiting thread sleeps at most before it looks around."""

GLANCES = 100
"""Looks before a waiting thread lets others run: some 4 microseconds."""

YIELDS = 200
"""Looks, with others running in between, before it sleeps: some 200 microseconds, if the others do nothing.

Longer than it takes to wake a process: else ranks that are late because they slept make the others sleep in turn.
"""

_MACHINES = {"x86_64", "AMD64"}

_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1
_EVERYBODY = 2**31 - 1
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
_sched_yield = _libc.sched_yield  # unlike Python 3.11's own, a call through ctypes releases the interpreter lock
_sched_yield.argtypes = []


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_slice = _Timespec(0, int(SLICE * 1e9))
_SLICE = ctypes.addressof(_slice)


def runs_here() -> bool:
    """Do signals work on this machine?"""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def check_platform(engine: str) -> None:
    """Raises UnsupportedOperationError where signals do not work."""
    if not runs_here():
        raise UnsupportedOperationError(
            engine,
            f"run on {sys.platform} on {platform.machine()}",
            "it needs Linux and the order in which x86-64 processors make stores visible; use gradwire_gloo",
        )


@final
class Signals:
    """The signals at the beginning of a shared memory.

    A signal has one writer, or writers that all post numbers that were never posted before. Of the numbers only
    the lower 32 bits count for those that sleep; so many posts do not happen within one slice.
    """

    def __init__(self, words: memoryview, address: int) -> None:
        self.words: Final = words
        """The whole memory in words of 64 bits."""
        self._address = address
        self._slept_on: dict[int, int] = {}  # thread -> signal

    def value(self, signal: int) -> int:
        """What was posted last; zero at first."""
        return self.words[signal * _WORDS]

    def post(self, signal: int, value: int) -> None:
        """Sets a number and wakes those that sleep until it changes."""
        words, at = self.words, signal * _WORDS
        asleep = words[at + 1]
        if asleep:
            # Cleared before the number changes: who sets it again in between finds the number changed, and does
            # not sleep, or is woken.
            words[at + 1] = 0
        words[at] = value
        _thread.allocate_lock().acquire()  # a fence: the number is visible before we look whether anybody sleeps
        if asleep or words[at + 1]:
            self._wake(signal)

    def wait(self, signal: int, value: int, check: Callable[[], None]) -> None:
        """Waits until the number is at least `value`.

        check: called now and then, at least once every SLICE seconds while it sleeps; it raises to end the wait.
        """
        words, at = self.words, signal * _WORDS
        for _ in range(GLANCES):
            if words[at] >= value:
                return
        for _ in range(YIELDS):
            _sched_yield()
            if words[at] >= value:
                return
        while (seen := words[at]) < value:
            self._sleep(signal, seen)
            if words[at] < value:
                check()

    def wait_for_change(self, signal: int, seen: int) -> bool:
        """Waits until the number is another than `seen`, but not much longer than a slice; whether it is."""
        words, at = self.words, signal * _WORDS
        for _ in range(GLANCES):
            if words[at] != seen:
                return True
        for _ in range(YIELDS):
            _sched_yield()
            if words[at] != seen:
                return True
        self._sleep(signal, seen)
        return words[at] != seen

    def disturb(self) -> None:
        """Wakes all threads of this process that sleep here, so that they `check`."""
        for signal in list(self._slept_on.values()):
            self._wake(signal)

    def _sleep(self, signal: int, seen: int) -> None:
        """Sleeps while the number is `seen`, at most a slice."""
        thread = _thread.get_ident()
        self._slept_on[thread] = signal
        self.words[signal * _WORDS + 1] = 1
        # The kernel compares the number after a fence of its own.
        _syscall(_FUTEX, self._address + signal * LINE, _FUTEX_WAIT, seen & _LOW_HALF, _SLICE, None, 0)
        del self._slept_on[thread]

    def _wake(self, signal: int) -> None:
        _syscall(_FUTEX, self._address + signal * LINE, _FUTEX_WAKE, _EVERYBODY, None, None, 0)
