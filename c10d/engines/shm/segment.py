"""A memory segment shared by the processes of a group.

The segment is an anonymous file in memory (memfd_create(2)), which the other ranks open through rank 0's entry in
/proc. It never has a name, so the kernel frees it with the last process, however that ends.
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
from ....net.security import printable
from ..base import Setup
from .doorbells import Doorbells
from .layout import Layout
from .processes import RankProcess

__all__ = ["Segment"]

_TOKEN_BYTES = 32
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Fix the size of the file: reading a mapping beyond the end of a file that was shortened kills the process."""


@final
class Segment:
    """Shared memory of all ranks of a group, which create it together; all zero at first.

    Only pages that are written to use memory.

    Raises:
        ProcessGroupError: some rank cannot map the memory; raised on all ranks.
        CollectiveTimeoutError: some rank did not take part within the timeout of the setup.
    """

    def __init__(self, setup: Setup, processes: list[RankProcess]) -> None:
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
                memory = _map(processes[0].pid, remote_descriptor, token, size)
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
                    f"/proc/{processes[0].pid}/fd; otherwise use gradwire_gloo"
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
