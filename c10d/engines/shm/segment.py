"""A piece of memory that the processes of a group share.

It is an anonymous file in memory (memfd_create(2)), which the other ranks open through rank 0's /proc entry: it
never has a name, so that nothing is left of it, however and whenever processes end.
"""

import ctypes
import fcntl
import json
import mmap
import os
import secrets
from typing import Final, final

import torch

from ....errors import ProcessGroupError
from ..base import Setup
from .members import ShmMember, exchange, wait_for

__all__ = ["Segment"]

_TOKEN_BYTES = 32
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody can make it shorter, which would kill those that read it."""


@final
class Segment:
    """Shared memory of `size` bytes, all zero at first.

    It takes only the pages that are written to. All ranks of the group make it together.

    Raises:
        ProcessGroupError: some rank cannot have it; on all ranks alike.
    """

    def __init__(self, setup: Setup, members: list[ShmMember], size: int, engine: str) -> None:
        problem = ""
        memory: mmap.mmap | None = None
        mine = -1  # rank 0 keeps it open until all have it
        try:
            if setup.rank == 0:
                mine = _create(size)
                token = secrets.token_hex(_TOKEN_BYTES // 2)
                memory = mmap.mmap(mine, size)
                memory[:_TOKEN_BYTES] = token.encode()
                setup.store.set("segment", json.dumps([mine, token]))
            else:
                wait_for(setup, ["segment"])
                number, token = json.loads(setup.store.get("segment"))
                memory = _open(members[0].pid, number, token, size)
        except OSError as error:
            problem = f"{error.strerror or error} ({error.filename})" if error.filename else str(error)
            if setup.rank == 0:
                setup.store.set("segment", json.dumps([-1, ""]))
        try:
            problems = exchange(setup, "opened", problem)
        finally:
            if mine >= 0:
                os.close(mine)
        for rank, text in enumerate(problems):
            if text:
                raise ProcessGroupError(
                    f"engine {engine!r}: rank {setup.global_ranks[rank]} cannot share memory with rank "
                    f"{setup.global_ranks[0]}: {text}. All ranks must run as one user who may open "
                    f"/proc/{members[0].pid}/fd; otherwise use gradwire_gloo"
                )
        assert memory is not None
        self._memory = memory
        self.words: Final = memoryview(memory).cast("q")
        """In words of 64 bits."""
        self.bytes: Final = torch.frombuffer(memory, dtype=torch.uint8)
        """As a tensor."""
        self.address: Final = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        """Where it begins in this process; as long as this object lives."""


def _create(size: int) -> int:
    file = os.memfd_create("gradwire-shm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    return file


def _open(pid: int, number: int, token: str, size: int) -> mmap.mmap:
    """Maps the file that another process has open."""
    if number < 0:
        raise OSError("it could not make any")
    file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(file, size)
    except ValueError as error:  # another file, which is shorter
        raise OSError(str(error)) from None
    finally:
        os.close(file)
    if memory[:_TOKEN_BYTES] != token.encode():
        raise OSError(f"/proc/{pid}/fd/{number} is another file")
    return memory
