"""The backends that collectives are measured on: torch.distributed's functions, or a library called directly."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradwire.c10d
import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["BACKENDS", "Backend", "Tensors"]


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of one rank: its own, and one to receive each rank's."""

    rank: int
    mine: Tensor
    everybody: list[Tensor]


class Backend:
    """The measured steps of one rank, by the functions of torch.distributed on one of its backends. All block."""

    def __init__(self, name: str, rank: int, size: int, url: str) -> None:
        dist.init_process_group(name, init_method=url, rank=rank, world_size=size)

    def all_reduce(self, tensors: Tensors) -> None:
        """Sums the ranks' tensors in place, on all ranks."""
        dist.all_reduce(tensors.mine)

    def broadcast(self, tensors: Tensors) -> None:
        """Broadcasts from rank 0 and from rank 1, so that rank 0 knows when the first has arrived."""
        self._broadcast(tensors.mine, 0)
        self._broadcast(tensors.mine, 1)

    def all_gather(self, tensors: Tensors) -> None:
        """Copies each rank's tensor to all ranks."""
        dist.all_gather(tensors.everybody, tensors.mine)

    def send_recv(self, tensors: Tensors) -> None:
        """Sends a tensor there and back, between each even rank and the next."""
        other = tensors.rank ^ 1
        if tensors.rank < other:
            self._send(tensors.mine, other)
            self._recv(tensors.mine, other)
        else:
            self._recv(tensors.mine, other)
            self._send(tensors.mine, other)

    def barrier(self, _: Tensors) -> None:
        """Waits for all ranks."""
        dist.barrier()

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        dist.broadcast(tensor, root)

    def _send(self, tensor: Tensor, to: int) -> None:
        dist.send(tensor, to)

    def _recv(self, tensor: Tensor, source: int) -> None:
        dist.recv(tensor, source)


class DirectGloo(Backend):
    """torch's ProcessGroupGloo, called directly."""

    def __init__(self, _: str, rank: int, size: int, url: str) -> None:
        super().__init__("gloo", rank, size, url)
        self._gloo: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]

    def all_reduce(self, tensors: Tensors) -> None:
        self._gloo.allreduce([tensors.mine]).wait()

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._gloo.broadcast([tensor], options).wait()

    def all_gather(self, tensors: Tensors) -> None:
        self._gloo.allgather([tensors.everybody], [tensors.mine]).wait()

    def _send(self, tensor: Tensor, to: int) -> None:
        self._gloo.send([tensor], to, 0).wait()

    def _recv(self, tensor: Tensor, source: int) -> None:
        self._gloo.recv([tensor], source, 0).wait()

    def barrier(self, _: Tensors) -> None:
        self._gloo.barrier().wait()


class DirectMpi(Backend):
    """mpi4py, called directly, in an MPI world that gradwire has formed."""

    def __init__(self, _: str, rank: int, size: int, url: str) -> None:
        gradwire.c10d.init_process_group("mpi", url, rank=rank, world_size=size)
        dist.barrier()  # forms the world
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD

    def all_reduce(self, tensors: Tensors) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, tensors.mine.numpy(), op=self._mpi.SUM)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        self._comm.Bcast(tensor.numpy(), root)

    def all_gather(self, tensors: Tensors) -> None:
        whole = torch.empty(len(tensors.everybody), tensors.mine.numel())
        self._comm.Allgather(tensors.mine.numpy(), whole.numpy())
        for part, output in zip(whole, tensors.everybody, strict=True):
            output.copy_(part)

    def _send(self, tensor: Tensor, to: int) -> None:
        self._comm.Send(tensor.numpy(), to)

    def _recv(self, tensor: Tensor, source: int) -> None:
        self._comm.Recv(tensor.numpy(), source)

    def barrier(self, _: Tensors) -> None:
        self._comm.Barrier()


BACKENDS: dict[str, Callable[[str, int, int, str], Backend]] = {
    "gradwire_shm": Backend,
    "gradwire_gloo": Backend,
    "gradwire_mpi": Backend,
    "gloo": Backend,
    "ProcessGroupGloo": DirectGloo,
    "mpi4py": DirectMpi,
}
"""Makes a backend, given its name, a rank, the number of ranks, and the URL of the rendezvous."""
