"""Modules on other workers and differentiable collectives: the names of `torch.distributed.nn`."""

from . import functional
from .functional import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from .remote_module import RemoteModule

__all__ = [
    "RemoteModule",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "functional",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def __dir__() -> list[str]:
    return sorted(__all__)
