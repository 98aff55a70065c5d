"""The processes of a group on one host: who they are, and whether they live."""

import dataclasses
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self, final

from torch.distributed import DistStoreError

from ....errors import CollectiveTimeoutError, ProcessGroupError
from ..base import Setup

__all__ = ["ShmMember", "exchange", "meet", "wait_for"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A file whose content is different on each host and after each start of it."""


@final
@dataclass(frozen=True, slots=True)
class ShmMember:
    """A rank's process.

    host: name of the host.
    boot: which host it really is.
    pids: the namespace that its process id is from.
    pid: its process id.
    started: when it was started, in the kernel's clock ticks: with the id, this is one process for ever.
    """

    host: str
    boot: str
    pids: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Self:
        """This process."""
        state = _state(os.getpid())
        assert state is not None
        return cls(
            socket.gethostname(), BOOT_ID.read_text().strip(), os.readlink("/proc/self/ns/pid"), os.getpid(), state
        )

    def lives(self) -> bool:
        """Does it still run? It must be on this host."""
        return _state(self.pid) == self.started


def _state(pid: int) -> str | None:
    """When a process was started; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text[text.rindex(b")") + 2 :].split()  # the name, in brackets, may contain anything
    return None if state in {b"Z", b"X"} else fields[18].decode()


def meet(setup: Setup, engine: str) -> list[ShmMember]:
    """The processes of all ranks.

    Raises:
        ProcessGroupError: they are not on one host, or cannot see each other there; on all ranks alike.
        CollectiveTimeoutError: some did not come.
    """
    texts = exchange(setup, "member", json.dumps(dataclasses.asdict(ShmMember.here())))
    members = [ShmMember(**json.loads(text)) for text in texts]
    first = members[0]
    for rank, member in enumerate(members):
        if member.boot != first.boot:
            raise ProcessGroupError(
                f"engine {engine!r} takes ranks on one host only, but rank {_global(setup, 0)} is on "
                f"{first.host!r} and rank {_global(setup, rank)} on {member.host!r} (boot ids {first.boot} and "
                f"{member.boot}): use gradwire_gloo"
            )
        if member.pids != first.pids:
            raise ProcessGroupError(
                f"engine {engine!r} takes ranks that see each other's processes, but rank {_global(setup, 0)} is "
                f"in {first.pids} and rank {_global(setup, rank)} in {member.pids} of host {first.host!r}: share "
                "the containers' PID namespace, or use gradwire_gloo"
            )
    return members


def exchange(setup: Setup, what: str, text: str) -> list[str]:
    """Every rank's text, through the store."""
    setup.store.set(f"{what}/{setup.rank}", text)
    keys = [f"{what}/{rank}" for rank in range(setup.size)]
    wait_for(setup, keys)
    return [setup.store.get(key).decode() for key in keys]


def wait_for(setup: Setup, keys: Sequence[str]) -> None:
    """Waits until the store has keys, each of which another rank sets: the i-th rank i's, or one rank 0's."""
    try:
        setup.store.wait(list(keys), timedelta(seconds=setup.timeout))
    except DistStoreError:
        missing = [rank for rank, key in enumerate(keys) if not setup.store.check([key])]
        if not missing:
            raise
        ranks = ", ".join(str(_global(setup, rank)) for rank in missing)
        raise CollectiveTimeoutError("the set-up of the group", setup.timeout, f"rank {ranks}") from None


def _global(setup: Setup, rank: int) -> int:
    return setup.global_ranks[rank]
