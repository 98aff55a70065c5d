"""Two hosts on this machine: network namespaces that are joined by a pair of virtual interfaces (veth).

The kernel removes a namespace with the last process in it, so nothing is left however a benchmark ends.
"""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Host", "two_hosts"]

_NEW_NET = 0x40000000
"""The flag of setns(2) for network namespaces."""

COMMAND_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Host:
    """A host on which a process can run.

    address: of its interface.
    namespace: the path of its network namespace; None for that of this process.
    """

    address: str
    namespace: str | None = None

    def enter(self) -> None:
        """Moves this process to the host. It must have one thread only."""
        if self.namespace is None:
            return
        descriptor = os.open(self.namespace, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NET):
                number = ctypes.get_errno()
                raise OSError(number, f"setns: {os.strerror(number)}")
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Context manager that makes two hosts.

    Raises:
        OSError, subprocess.SubprocessError: none can be made; that takes root, `ip`, `unshare` and `nsenter`.
    """
    with contextlib.ExitStack() as stack:
        first, second = processes = [stack.enter_context(_namespace()) for _ in range(2)]
        _run_in(first, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second))
        hosts = []
        for number, process in enumerate(processes, 1):
            host = Host(f"10.91.0.{number}", f"/proc/{process}/ns/net")
            _run_in(process, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _run_in(process, "ip", "link", "set", interface, "up")
            hosts.append(host)
        yield hosts


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """Context manager that makes a network namespace; its value is the id of a process in it."""
    command = ["unshare", "--net", "sh", "-c", "echo made; exec cat"]  # which ends with this process
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if not holder.stdout.readline():
            raise PermissionError(f"no network namespace can be made: {holder.stderr.read().decode().strip()}")
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


def _run_in(process: int, *command: str) -> None:
    """Runs a command in the network namespace of a process."""
    inside = ["nsenter", "--net", f"--target={process}", *command]
    subprocess.run(inside, check=True, timeout=COMMAND_TIMEOUT_S, capture_output=True)
