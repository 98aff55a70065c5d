"""Identifies the processes of a group's ranks on one host, and checks whether they are alive."""

import dataclasses
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from ....errors import ProcessGroupError
from ..base import Setup

__all__ = ["RankProcess", "exchange_processes"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A file whose content differs between hosts and between boots of one host."""


@final
@dataclass(frozen=True, slots=True)
class RankProcess:
    """Identity of a rank's process.

    hostname: name of the host.
    boot_id: content of the `BOOT_ID` file, which identifies the host.
    pid_namespace: namespace that `pid` is from.
    pid: process id.
    start_ticks: when the process started, in clock ticks of the kernel; tells it from later processes with its id.
    """

    hostname: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: str

    @classmethod
    def current(cls) -> Self:
        """Returns the identity of this process."""
        start_ticks = _start_ticks(os.getpid())
        assert start_ticks is not None
        return cls(
            socket.gethostname(),
            BOOT_ID.read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
            os.getpid(),
            start_ticks,
        )

    def is_alive(self) -> bool:
        """Returns whether the process, which must be on this host, still runs."""
        return _start_ticks(self.pid) == self.start_ticks


def _start_ticks(pid: int) -> str | None:
    """Returns when a process started, from /proc (proc_pid_stat(5)); None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text[text.rindex(b")") + 2 :].split()  # the name, in brackets, may contain anything
    return None if state in {b"Z", b"X"} else fields[18].decode()


def exchange_processes(setup: Setup) -> list[RankProcess]:
    """Returns the processes of all ranks, which call this together.

    Raises:
        ProcessGroupError: the ranks are not on one host, or not in one PID namespace; raised on all ranks.
        CollectiveTimeoutError: some ranks did not call this within the timeout of the setup.
    """
    texts = setup.exchange("process", json.dumps(dataclasses.asdict(RankProcess.current())))
    processes = [RankProcess(**json.loads(text)) for text in texts]
    first = processes[0]
    for rank, process in enumerate(processes):
        if process.boot_id != first.boot_id:
            raise ProcessGroupError(
                f"engine 'shm' takes ranks on one host only, but rank {setup.global_ranks[0]} is on "
                f"{first.hostname!r} and rank {setup.global_ranks[rank]} on {process.hostname!r} (boot ids "
                f"{first.boot_id} and {process.boot_id}): use gradwire_gloo"
            )
        if process.pid_namespace != first.pid_namespace:
            raise ProcessGroupError(
                f"engine 'shm' needs all ranks in one PID namespace, but rank {setup.global_ranks[0]} is in "
                f"{first.pid_namespace} and rank {setup.global_ranks[rank]} in {process.pid_namespace} of host "
                f"{first.hostname!r}: let the containers share a PID namespace, or use gradwire_gloo"
            )
    return processes
