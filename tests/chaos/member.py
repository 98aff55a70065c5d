"""What runs in a worker process before and after the load: joining, measuring, leaving."""

import ctypes
import gc
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Sequence

import psutil
import torch
from gradwire import rpc

from tests.chaos.load import SIZES, Load, Settings
from tests.remote_functions import counts, identity

__all__ = ["Figures", "begin", "connect", "is_stopped", "leave", "measure", "progress", "resume", "stop"]

Figures = dict[str, int]
"""What a process has, by kind: references and contexts, threads, file descriptors, MiB of memory."""

CONNECT_TIMEOUT_S = 50.0

_PR_SET_PDEATHSIG = 1

LIVENESS = [
    rpc.Liveness(heartbeat=0.5, suspect_after=3, lease=12, when_suspect="fail"),
    rpc.Liveness(heartbeat=0.5, suspect_after=3, lease=12, when_suspect="wait"),
]
"""Options of workers with even and with odd numbers. Times are shorter than by default, as the run is short."""

_loads: list[Load] = []


def begin(settings: Settings, rank: int, world_size: int | None, seconds: float) -> None:
    """Joins the group, and starts the load.

    Args:
        settings: of the load.
        rank: of this worker in a static group.
        world_size: of a static group; None for a dynamic one.
        seconds: that joining may take.
    """
    # The fork server ends with the suite; this process may be stopped then.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    host, port = settings.store
    url = f"store://{host}:{port}" + (f"?rank={rank}&world_size={world_size}" if world_size else "")
    load = Load(settings)
    rpc.init_rpc(
        settings.name,
        rpc_backend_options=rpc.RpcBackendOptions(
            init_method=url, insecure=True, init_timeout=seconds, liveness=LIVENESS[rank % 2]
        ),
    )
    _loads.append(load)
    load.start()


def progress() -> Counter[str]:
    """Returns how many operations have succeeded, by worker."""
    return _loads[-1].successes.copy()


def connect(names: Sequence[str]) -> None:
    """Makes all connections that there can be with other workers, those for large tensors included."""
    for name in names:
        if name != rpc.get_worker_info().name:
            rpc.rpc_sync(name, identity, (torch.zeros(SIZES[-1]),), timeout=CONNECT_TIMEOUT_S)


def stop() -> None:
    """Has the load end after the operations that run."""
    _loads[-1].ask_to_stop()


def is_stopped() -> bool:
    """Returns whether the load has ended; lets go of what it kept then."""
    if not _loads[-1].is_stopped():
        return False
    _loads[-1].close()
    return True


def resume() -> None:
    """Starts the load again."""
    _loads[-1].start()


def measure() -> Figures:
    """Returns what this process has at the moment."""
    gc.collect()
    process = psutil.Process()
    figures = Figures({name: count for name, count in counts().items() if count})
    for thread in threading.enumerate():
        name = f"thread {re.sub(r'[0-9]+', '#', thread.name)}"
        figures[name] = figures.get(name, 0) + 1
    figures["threads"] = process.num_threads()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue  # that of the listing itself
        kind = "memfd" if "memfd" in target else "file"
        if ":" in target:  # as socket:[77], anon_inode:[eventfd]
            name, _, inode = target.partition(":")
            kind = inode.strip("[]") if name == "anon_inode" else name
        kind = f"fd {kind}"
        figures[kind] = figures.get(kind, 0) + 1
    figures["MiB"] = process.memory_info().rss >> 20
    figures["children"] = len(process.children())
    return figures


def leave() -> list[str]:
    """Leaves the group; returns the names of the threads of gradwire that are left."""
    rpc.shutdown(timeout=60)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gradwire")]
