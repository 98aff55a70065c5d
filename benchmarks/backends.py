"""The backends that collectives are measured on: torch.distributed's functions, or a library called directly."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import gradwire.c10d

__all__ = ["BACKENDS", "Backend", "Tensors"]


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of one rank: its own, and one to receive each rank's."""

    rank: int
    mine: Tensor
    everybody: list[Tensor]


class Backend(Protocol):
    """Blocking operations of one rank."""

    def all_reduce(self, tensors: Tensors) -> None:
        """Sums the ranks' tensors in place, on all ranks."""

    def broadcast(self, tensors: Tensors, root: int) -> None:
        """Copies the root's tensor to all ranks."""

    def all_gather(self, tensors: Tensors) -> None:
        """Copies each rank's tensor to all ranks."""

    def send(self, tensors: Tensors, to: int) -> None:
        """Sends a tensor to one rank."""

    def recv(self, tensors: Tensors, source: int) -> None:
        """Receives a tensor from one rank."""

    def barrier(self) -> None:
        """Waits for all ranks."""


class Torch:
    """The functions of torch.distributed, on one of its backends."""

    def __init__(self, backend: str, rank: int, size: int, url: str) -> None:
        dist.init_process_group(backend, init_method=url, rank=rank, world_size=size)

    def all_reduce(self, tensors: Tensors) -> None:
        dist.all_reduce(tensors.mine)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        dist.broadcast(tensors.mine, root)

    def all_gather(self, tensors: Tensors) -> None:
        dist.all_gather(tensors.everybody, tensors.mine)

    def send(self, tensors: Tensors, to: int) -> None:
        dist.send(tensors.mine, to)

    def recv(self, tensors: Tensors, source: int) -> None:
        dist.recv(tensors.mine, source)

    def barrier(self) -> None:
        dist.barrier()


class DirectGloo:
    """torch's ProcessGroupGloo, called directly."""

    def __init__(self, _: str, rank: int, size: int, url: str) -> None:
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
        self._gloo: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]

    def all_reduce(self, tensors: Tensors) -> None:
        self._gloo.allreduce([tensors.mine]).wait()

    def broadcast(self, tensors: Tensors, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._gloo.broadcast([tensors.mine], options).wait()

    def all_gather(self, tensors: Tensors) -> None:
        self._gloo.allgather([tensors.everybody], [tensors.mine]).wait()

    def send(self, tensors: Tensors, to: int) -> None:
        self._gloo.send([tensors.mine], to, 0).wait()

    def recv(self, tensors: Tensors, source: int) -> None:
        self._gloo.recv([tensors.mine], source, 0).wait()

    def barrier(self) -> None:
        self._gloo.barrier().wait()


class DirectMpi:
    """mpi4py, called directly, in an MPI world that gradwire has formed."""

    def __init__(self, _: str, rank: int, size: int, url: str) -> None:
        gradwire.c10d.init_process_group("mpi", url, rank=rank, world_size=size)
        dist.barrier()  # forms the world
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD

    def all_reduce(self, tensors: Tensors) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, tensors.mine.numpy(), op=self._mpi.SUM)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        self._comm.Bcast(tensors.mine.numpy(), root)

    def all_gather(self, tensors: Tensors) -> None:
        whole = torch.empty(len(tensors.everybody), tensors.mine.numel())
        self._comm.Allgather(tensors.mine.numpy(), whole.numpy())
        for part, output in zip(whole, tensors.everybody, strict=True):
            output.copy_(part)

    def send(self, tensors: Tensors, to: int) -> None:
        self._comm.Send(tensors.mine.numpy(), to)

    def recv(self, tensors: Tensors, source: int) -> None:
        self._comm.Recv(tensors.mine.numpy(), source)

    def barrier(self) -> None:
        self._comm.Barrier()


BACKENDS: dict[str, Callable[[str, int, int, str], Backend]] = {
    "gradwire_shm": Torch,
    "gradwire_gloo": Torch,
    "gradwire_mpi": Torch,
    "gloo": Torch,
    "ProcessGroupGloo": DirectGloo,
    "mpi4py": DirectMpi,
}
"""Makes a backend, given its name, a rank, the number of ranks, and the URL of the rendezvous."""
