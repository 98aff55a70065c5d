"""Tells which engines can run in this process, and why others cannot."""

import torch
import torch.distributed

from ...errors import ProcessGroupError

__all__ = ["why_unavailable"]


def why_unavailable(engine: str) -> str | None:
    """Returns why an engine cannot run in this process, in one line; None if it can.

    Initializes nothing. Whether the ranks of a group can use the engine together is known only when the group is
    made.

    Raises:
        ValueError: no engine of gradwire has this name.
    """
    checks = {"gloo": _check_gloo, "mpi": _check_mpi, "nccl": _check_nccl, "shm": _check_shm}
    if engine not in checks:
        raise ValueError(f"unknown engine {engine!r}: the engines are {', '.join(sorted(checks))}")
    try:
        checks[engine]()
    except (ImportError, ProcessGroupError) as error:
        return " ".join(str(error).split())
    return None


def _check_gloo() -> None:
    if not torch.distributed.is_gloo_available():
        raise ProcessGroupError("this build of torch has no Gloo")


def _check_mpi() -> None:
    from .mpi.world import load_mpi

    load_mpi()


def _check_nccl() -> None:
    from .nccl.library import load
    from .nccl.streams import CudaGpus

    CudaGpus()
    load()


def _check_shm() -> None:
    from .shm.doorbells import check_platform

    check_platform()
