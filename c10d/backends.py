"""gradwire's own engines, as backends of torch.distributed."""

import os

from .engines.base import Engine, Setup
from .engines.shm.doorbells import is_supported
from .host_identity import hosts_of, share_memory
from .registry import register_engine

__all__ = ["OWN", "best_engine", "register_backends"]

OWN = frozenset({"gloo", "mpi", "nccl", "shm"})
"""Names of the engines; their backends' have `gradwire_` before them."""


def best_engine(setup: Setup) -> Engine:
    """The fastest that the ranks can use."""
    if setup.device_type == "cuda":
        return _nccl(setup)
    shared = share_memory(hosts_of(setup.store, setup.rank, setup.size, setup.timeout))
    return _shm(setup) if shared and is_supported() else _gloo(setup)


def _gloo(setup: Setup) -> Engine:
    from .engines.gloo.engine import GlooEngine

    return GlooEngine(setup)


def _mpi(setup: Setup) -> Engine:
    from .engines.mpi.engine import MpiEngine  # needs the extra `mpi`

    return MpiEngine(setup)


def _nccl(setup: Setup) -> Engine:
    from .engines.nccl import NcclEngine  # needs the extra `cuda`

    return NcclEngine(setup, blocking_wait=os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1")


def _shm(setup: Setup) -> Engine:
    from .engines.shm.engine import ShmEngine

    return ShmEngine(setup)


def register_backends() -> None:
    """Makes them known to torch as `gradwire_gloo`, `gradwire_mpi`, `gradwire_nccl` and `gradwire_shm`.

    `gradwire` is the best for each device: shm if all ranks share memory, or else gloo; nccl for CUDA.
    """
    register_engine("gradwire", best_engine, devices=["cpu", "cuda"])
    register_engine("gradwire_gloo", _gloo, devices=["cpu"])
    register_engine("gradwire_mpi", _mpi, devices=["cpu"])
    register_engine("gradwire_nccl", _nccl, devices=["cuda"])
    register_engine("gradwire_shm", _shm, devices=["cpu"])
