"""The processes of a group's ranks on one host: which are alive, which have left the group, and why."""

import dataclasses
import json
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

from ....errors import ProcessGroupError, RankLostError
from ..base import Setup
from .segment import REASON_BYTES, Segment

__all__ = ["Peers", "RankProcess", "exchange_processes"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A file whose content differs between hosts and between boots of one host."""

_LEFT, _LEFT_AFTER_LOSS = 1, 2
"""Values that a rank rings its `left` doorbell with.

`_LEFT_AFTER_LOSS` plus a global rank says that the rank left because it had lost that one.
"""


@final
@dataclass(frozen=True, slots=True)
class RankProcess:
    """Identity of a rank's process.

    boot_id: content of the `BOOT_ID` file, which identifies the host.
    start_ticks: when the process started, in clock ticks of the kernel; tells it from later processes with its
        pid.
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

    Raises ProcessGroupError, on all ranks, if they are not on one host, or not in one PID namespace.
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


@final
class Peers:
    """The other ranks of a group, as one rank sees them. Used from any thread."""

    def __init__(self, setup: Setup, processes: list[RankProcess], segment: Segment) -> None:
        self.rank: Final = setup.rank
        self.size: Final = setup.size
        self._processes = processes
        self._layout = segment.layout
        self._segment = segment
        self._doorbells = segment.doorbells
        self.global_ranks: Final = setup.global_ranks
        self._failure: Exception | None = None

    def leave(self, error: Exception) -> None:
        """Makes `check` raise `error` from now on, and tells the other ranks that this one has left."""
        if self._failure is not None:
            return
        self._failure = error
        loss = error if isinstance(error, RankLostError) else None
        reason = (loss.reason if loss else str(error)).encode()[:REASON_BYTES]
        offset = self._layout.reason_offset(self.rank)
        self._segment.bytes.numpy()[offset : offset + len(reason)] = memoryview(reason)
        value = _LEFT if loss is None else _LEFT_AFTER_LOSS + loss.rank
        self._doorbells.ring(self._layout.left_doorbell(self.rank), value)
        self._doorbells.wake_local_waiters()

    def check(self) -> None:
        """Raises the error that this rank left with, if it has left."""
        if self._failure is not None:
            raise self._failure

    def find_lost(self, ranks: Sequence[int]) -> RankLostError | None:
        """Returns an error for one of these ranks that has died or left; None if there is none."""
        # Departures are read before deaths, but a death is reported first: other ranks leave because of it.
        left = [rank for rank in ranks if self._has_left(rank)]
        dead = self.find_dead(ranks)
        if dead is not None or not left:
            return dead
        # Another rank's failure detector may report a killed process before its end can be seen from here.
        lost_rank = self._doorbells.value(self._layout.left_doorbell(left[0])) - _LEFT_AFTER_LOSS
        if lost_rank >= 0 and lost_rank != self.global_ranks[self.rank]:
            return RankLostError(lost_rank, self._leave_reason(left[0]))
        return RankLostError(self.global_ranks[left[0]], f"it left the group: {self._leave_reason(left[0])}")

    def find_dead(self, ranks: Sequence[int]) -> RankLostError | None:
        """Returns an error for one of these ranks whose process ended without leaving; None if there is none."""
        for rank in ranks:
            process = self._processes[rank]
            if not process.is_alive() and not self._has_left(rank):
                return RankLostError(self.global_ranks[rank], f"its process, {process.pid}, has ended")
        return None

    def describe(self, ranks: Iterable[int]) -> str:
        """Names ranks in error messages by their global ranks, as in `"rank 1, 2"`."""
        return "rank " + ", ".join(str(self.global_ranks[rank]) for rank in ranks)

    def _has_left(self, rank: int) -> bool:
        return self._doorbells.value(self._layout.left_doorbell(rank)) != 0

    def _leave_reason(self, rank: int) -> str:
        offset = self._layout.reason_offset(rank)
        text = bytes(self._segment.bytes.numpy()[offset : offset + REASON_BYTES])
        return text.rstrip(b"\0").decode(errors="replace")
