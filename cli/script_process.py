"""Processes of Python programs, as the supervisor of `launch.spawn` watches them."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final, final

__all__ = ["ScriptProcess"]

_PR_SET_PDEATHSIG: Final = 1

_BOOT: Final = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):  # else the launcher has died before that
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""Becomes a program that dies with the launcher, however that ends."""


@final
class ScriptProcess:
    """A process of a Python program. It leads a process group, so that Ctrl-C reaches the launcher only.

    It has what torch's ProcessContext uses of multiprocessing's processes.

    pid: the id of the process.
    sentinel: a file descriptor that can be read when the process has ended.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int) -> None:
        """Starts `python` with these arguments and variables. The process dies with the thread that calls this."""
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            process_group=0,
        )
        self.pid = self._popen.pid
        self.sentinel = os.pidfd_open(self.pid)

    @property
    def exitcode(self) -> int | None:
        """The exit status, or the negative number of the signal that killed it; None while it runs."""
        return self._popen.poll()

    def is_alive(self) -> bool:
        """Returns whether the process runs."""
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Waits until the process has ended, or for `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)

    def terminate(self) -> None:
        """Sends SIGTERM to the process and those that it has started, unless it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the process and those that it has started, unless it has ended."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Closes the sentinel."""
        os.close(self.sentinel)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive():
            os.killpg(self.pid, number)
