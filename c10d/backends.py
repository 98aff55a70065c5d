"""gradwire's own engines, as backends of torch.distributed."""

from .engines.base import Engine, Setup
from .registry import register_engine

__all__ = ["register_backends"]


def _gloo(setup: Setup) -> Engine:
    from .engines.gloo import GlooEngine

    return GlooEngine(setup)


def _mpi(setup: Setup) -> Engine:
    from .engines.mpi import MpiEngine  # needs the extra `mpi`

    return MpiEngine(setup)


def _nccl(setup: Setup) -> Engine:
    from .engines.nccl import NcclEngine  # needs the extra `cuda`

    return NcclEngine(setup)


def _shm(setup: Setup) -> Engine:
    from .engines.shm import ShmEngine

    return ShmEngine(setup)


def register_backends() -> None:
    """Makes them known to torch as `gradwire_gloo`, `gradwire_mpi`, `gradwire_nccl` and `gradwire_shm`."""
    register_engine("gradwire_gloo", _gloo, devices=["cpu"])
    register_engine("gradwire_mpi", _mpi, devices=["cpu"])
    register_engine("gradwire_nccl", _nccl, devices=["cuda"])
    register_engine("gradwire_shm", _shm, devices=["cpu"])
