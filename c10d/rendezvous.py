"""How a worker finds its group: from a URL, the environment or a store, to (store, rank, world size)."""

import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import final

import torch.distributed

from ..errors import RendezvousError, RendezvousNetworkError, StoreError, StoreNetworkError
from .addresses import format_address, require_trusted
from .rendezvous_url import Place, parse_url
from .stores.base import DEFAULT_TIMEOUT, Timeout, to_seconds
from .stores.file import FileStore
from .stores.prefix import PrefixStore
from .stores.tcp import TCPStore
from .torch_types import TorchStore, TorchTCPStore

__all__ = ["Rendezvous", "rendezvous"]


@final
@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a worker meets its group, and which of them it is.

    store: shared by all workers of the group.
    rank: this worker's number, from 0 to world_size - 1. In a dynamic group any, or -1 if nobody has said.
    world_size: how many workers the group has; None if it is dynamic.
    """

    store: TorchStore
    rank: int
    world_size: int | None
    _close: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    def close(self) -> None:
        """Closes what rendezvous opened, but not a store that it was given. Doing it again does nothing."""
        self._close()


def rendezvous(
    url: str | None = None,
    *,
    rank: int | None = -1,
    world_size: int | None = -1,
    store: TorchStore | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    insecure: bool = False,
    dynamic: bool = False,
) -> Rendezvous:
    """Finds the group of this worker.

    Args:
        url: one of

            - `env://` (the default): RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the environment; under
              torchrun, the launcher's own store;
            - `tcp://host:port?rank=0&world_size=2`: rank 0 hosts a TCPStore there;
            - `file:///path?rank=0&world_size=2`: a FileStore.

            Of rank and world_size, the URL or the argument may say either, or both the same.
        rank: this worker's; -1 or None to take it from the URL or the environment.
        world_size: the group's; -1 or None likewise.
        store: meet through this torch.distributed.Store instead of a URL. It stays open.
        timeout: how long to try, and the timeout of the store that is opened.
        insecure: allow addresses that are not loopback ones, though there are no credentials.
        dynamic: if nobody says the world size, the group is a dynamic one, whose members come and go. With a
            tcp URL, the member with rank 0 hosts the store and must stay as long as others join.

    Raises:
        RendezvousError: the URL, the environment and the arguments do not say where and who, or contradict
            each other; no store could be opened there; another worker has this rank or another world size.
    """
    seconds = to_seconds(timeout)
    if store is not None:
        if url is not None:
            raise RendezvousError(f"both url={url!r} and a store were given: give one of them")
        if not isinstance(store, TorchStore):
            raise TypeError(f"the store is {store!r}: give a torch.distributed.Store, such as a TCPStore")
        place = Place("the store", "store").with_identity(rank, world_size).checked(dynamic=dynamic)
        return _register(place, store, lambda: None)
    place = parse_url("env://" if url is None else url).with_identity(rank, world_size)
    place = place.from_environment(os.environ, dynamic=dynamic).checked(dynamic=dynamic)
    try:
        met, close = _open(place, seconds, insecure)
    except StoreError as error:
        hint = _TORCH_IS_THERE if place.rank == 0 and torch.distributed.is_initialized() else ""
        kind = RendezvousNetworkError if isinstance(error, StoreNetworkError) else RendezvousError
        raise kind(f"rank {place.rank} cannot meet its group at {place.url}: {error}{hint}") from error
    try:
        return _register(place, met, close)
    except BaseException:
        close()
        raise


def _open(place: Place, seconds: float, insecure: bool) -> tuple[TorchStore, Callable[[], None]]:
    """The store of a place, and how to close it."""
    if place.path is not None:
        file = FileStore(place.path, place.world_size, timeout=seconds)
        return file, file.close
    if place.launcher_attempt is not None:
        return _open_launcher_store(place, seconds, insecure)
    tcp = TCPStore(
        place.host,
        place.port,
        # Rank 0 does not wait for the others here: those that are in the wrong place are to hear it at once.
        is_master=place.rank == 0,
        timeout=seconds,
        wait_for_workers=False,
        insecure=insecure,
    )
    return tcp, tcp.close


def _open_launcher_store(place: Place, seconds: float, insecure: bool) -> tuple[TorchStore, Callable[[], None]]:
    require_trusted(place.host, insecure=insecure, doing="dialling torchrun's store on")
    try:
        agent_store = TorchTCPStore(
            place.host,
            place.port,
            is_master=False,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        where = format_address(place.host, place.port)
        raise StoreNetworkError(
            f"torchrun's store does not answer on {where}: {str(error).splitlines()[0]}"
        ) from error
    # The launcher's store outlives the workers: a restarted group must not read what its predecessor wrote.
    attempt = PrefixStore(f"gradwire/attempt/{place.launcher_attempt}", agent_store)
    return attempt, attempt.close


def _register(place: Place, store: TorchStore, close: Callable[[], None]) -> Rendezvous:
    """Says in the store who this is, and reads there whether somebody contradicts."""
    rank, world_size = place.rank, place.world_size
    me = _process_name(os.getpid())
    try:
        first = store.compare_set("gradwire/rendezvous/world_size", "", f"{world_size} {rank}").decode()
        other_size, _, other_rank = first.partition(" ")
        if world_size == -1 and other_size == "-1":
            return Rendezvous(store, rank, None, close)  # the group itself sees to it that ranks do not clash
        holder = store.compare_set(f"gradwire/rendezvous/rank/{rank}", "", me).decode()
    except RuntimeError as error:
        raise RendezvousError(f"rank {rank} cannot use {place.url}: {str(error).splitlines()[0]}") from error
    if -1 in (world_size, int(other_size)):
        raise RendezvousError(
            "RPC group mixes statically and dynamically initialized members which is not supported. "
            f"Rank {rank} was started {_with(world_size)}, rank {other_rank} {_with(int(other_size))}{_STALE}"
        )
    if other_size != str(world_size):
        raise RendezvousError(
            f"rank {rank} was started with world_size={world_size} and rank {other_rank} with "
            f"world_size={other_size}: give all workers of a group the same{_STALE}"
        )
    if holder != me:
        raise RendezvousError(
            f"two workers have rank {rank}: {_shown(holder)} and {_shown(me)}; give each its own{_STALE}"
        )
    return Rendezvous(store, rank, world_size, close)


_TORCH_IS_THERE = (
    ". torch.distributed is initialized in this process: if it meets at this address, choose another port, or "
    "pass the store that it was given as store="
)

_STALE = (
    ". If the other is of an earlier run, this store is left over from it: use a new one (another file, "
    "another port, a PrefixStore for each run)"
)


def _with(world_size: int) -> str:
    return "without a world_size" if world_size == -1 else f"with world_size={world_size}"


@cache
def _process_name(pid: int) -> str:
    """Names this process, differently from all others that ever were."""
    return f"process {pid} on {socket.gethostname()} #{uuid.uuid4().hex}"


def _shown(name: str) -> str:
    return name.partition(" #")[0]
