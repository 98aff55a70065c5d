"""Registers gradwire's own engines as backends of torch.distributed."""

import os

from ...net.host_identity import can_share_memory
from ..engines.base import Engine, Setup
from ..engines.shm.doorbells import is_supported
from ..rendezvous.hosts import gather_hosts
from .registry import register_engine

__all__ = ["BUILTIN_ENGINES", "best_engine", "register_backends"]

BUILTIN_ENGINES = frozenset({"gloo", "mpi", "nccl", "shm"})
"""Names of gradwire's engines. torch knows each as the backend `gradwire_NAME`."""


def best_engine(setup: Setup) -> Engine:
    """Makes the fastest engine that all ranks can use. All ranks must call it together."""
    if setup.device_type == "cuda":
        return _nccl(setup)
    hosts = gather_hosts(setup.store, setup.rank, setup.size, setup.timeout, insecure=setup.insecure)
    shared = can_share_memory(hosts)
    return _shm(setup) if shared and is_supported() else _gloo(setup)


_MPI_CANNOT_RECONFIGURE = (
    "a process stays in the MPI world in which it started, and that world cannot replace a rank; restart all "
    "processes, or use gradwire_gloo or gradwire_shm"
)


def _gloo(setup: Setup) -> Engine:
    from ..engines.gloo.engine import GlooEngine

    return GlooEngine(setup)


def _mpi(setup: Setup) -> Engine:
    from ..engines.mpi.engine import MpiEngine  # needs the extra `mpi`

    return MpiEngine(setup)


def _nccl(setup: Setup) -> Engine:
    from ..engines.nccl import NcclEngine  # needs the extra `cuda`

    return NcclEngine(setup, blocking_wait=os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1")


def _shm(setup: Setup) -> Engine:
    from ..engines.shm.engine import ShmEngine

    return ShmEngine(setup)


def register_backends() -> None:
    """Registers `gradwire_gloo`, `gradwire_mpi`, `gradwire_nccl`, `gradwire_shm` and `gradwire`.

    `gradwire` chooses the best engine for each device: shm if all ranks can share memory, otherwise gloo; nccl for
    CUDA tensors.
    """
    register_engine("gradwire", best_engine, devices=["cpu", "cuda"])
    register_engine("gradwire_gloo", _gloo, devices=["cpu"])
    register_engine("gradwire_mpi", _mpi, devices=["cpu"], cannot_reconfigure=_MPI_CANNOT_RECONFIGURE)
    register_engine("gradwire_nccl", _nccl, devices=["cuda"])
    register_engine("gradwire_shm", _shm, devices=["cpu"])
