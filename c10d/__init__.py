"""Stores, rendezvous, and process groups that torch.distributed runs on.

Every name of torch.distributed that gradwire does not define is available here as well, so one import is enough:

    from gradwire import c10d as dist

    dist.init_process_group("shm")
    dist.all_reduce(tensor)
"""

from typing import Any

import torch.distributed

from ..net.security import Credentials
from .groups.api import (
    ReconfigureOptions,
    dump_flight_recorder,
    dump_flight_recorder_on_signal,
    get_reconfigure_handle,
    init_process_group,
    monitored_barrier,
    new_group,
    reconfigure,
    rendezvous_reconfigure,
    split_group,
    supports_reconfigure,
)
from .groups.backends import register_backends, register_engine
from .groups.multigpu import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
    reduce_scatter_multigpu,
)
from .groups.options import GroupOptions
from .rendezvous.api import Rendezvous, rendezvous
from .stores import FileStore, HashStore, PrefixStore, Store, StoreLimits, TCPStore

__all__ = [
    "Credentials",
    "FileStore",
    "GroupOptions",
    "HashStore",
    "PrefixStore",
    "ReconfigureOptions",
    "Rendezvous",
    "Store",
    "StoreLimits",
    "TCPStore",
    "all_gather_multigpu",
    "all_reduce_multigpu",
    "broadcast_multigpu",
    "dump_flight_recorder",
    "dump_flight_recorder_on_signal",
    "get_reconfigure_handle",
    "init_process_group",
    "monitored_barrier",
    "new_group",
    "reconfigure",
    "reduce_multigpu",
    "reduce_scatter_multigpu",
    "register_engine",
    "rendezvous",
    "rendezvous_reconfigure",
    "split_group",
    "supports_reconfigure",
]

register_backends()


def __getattr__(name: str) -> Any:
    """Returns an attribute of torch.distributed that gradwire does not define."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(torch.distributed, name)
    except AttributeError:
        raise AttributeError(f"neither {__name__} nor torch.distributed has {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in dir(torch.distributed) if not name.startswith("_"))})
