"""How a worker finds its group: from a URL, the environment or a store, to (store, rank, world size)."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import final

import torch.distributed

from ..errors import RendezvousError, RendezvousNetworkError, StoreError, StoreNetworkError
from .addresses import format_address, require_trusted
from .rendezvous_url import StoreAddress, parse_url
from .start_barrier import Claim, Purpose, StartBarrier
from .stores.base import DEFAULT_TIMEOUT, Timeout, to_seconds
from .stores.file import FileStore
from .stores.prefix import PrefixStore
from .stores.tcp import TCPStore
from .torch_types import TorchStore, TorchTCPStore

__all__ = ["Rendezvous", "rendezvous"]

RIVAL_SECONDS = 1.0
"""How long a rank 0 that cannot listen looks for another rank 0 that does."""

_DIRECT = Purpose(consent="pass insecure=True to gradwire.c10d.rendezvous")


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
    _barrier: StartBarrier | None = field(default=None, repr=False, compare=False)

    def wait_for_all(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Waits until all workers of a static group have come here. In a dynamic group it does nothing.

        A wait of 10 s and more is logged at level WARNING, with the ranks that are missing.

        Raises:
            RendezvousError: some did not come in time, or contradict each other; everybody raises the same.
        """
        if self._barrier is not None:
            self._barrier.wait("", to_seconds(timeout))

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
    name: str = "",
    purpose: Purpose = _DIRECT,
) -> Rendezvous:
    """Finds the group of this worker. It does not wait for the others: see `Rendezvous.wait_for_all`.

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
        name: what to call this worker in errors, beside its rank.
        purpose: what kind of group it is.

    Raises:
        RendezvousError: the URL, the environment and the arguments do not say where and who, or contradict
            each other; no store could be opened there; another worker has this rank or another world size, which
            then all raise.
    """
    seconds = to_seconds(timeout)
    if store is not None:
        if url is not None:
            raise RendezvousError(f"both url={url!r} and a store were given: give one of them")
        if not isinstance(store, TorchStore):
            raise TypeError(f"the store is {store!r}: give a torch.distributed.Store, such as a TCPStore")
        place = StoreAddress("the store", "store").with_identity(rank, world_size).checked(dynamic=dynamic)
        return _register(place, store, lambda: None, name, purpose)
    place = parse_url("env://" if url is None else url).with_identity(rank, world_size)
    place = place.from_environment(os.environ, dynamic=dynamic).checked(dynamic=dynamic)
    if place.host:
        doing = "hosting a store on" if place.rank == 0 and place.launcher_attempt is None else "meeting at"
        _require_trusted(place, insecure, doing, purpose)
    try:
        met, close = _open(place, seconds, insecure)
    except StoreError as error:
        if place.rank == 0 and place.host and place.launcher_attempt is None:
            _contradict_rival(place, insecure, name, purpose)
        hint = _TORCH_IS_THERE if place.rank == 0 and torch.distributed.is_initialized() else ""
        kind = RendezvousNetworkError if isinstance(error, StoreNetworkError) else RendezvousError
        raise kind(f"rank {place.rank} cannot meet its group at {place.url}: {error}{hint}") from error
    try:
        return _register(place, met, close, name, purpose)
    except BaseException:
        close()
        raise


def _open(place: StoreAddress, seconds: float, insecure: bool) -> tuple[TorchStore, Callable[[], None]]:
    """The store of a place, and how to close it."""
    if place.path is not None:
        file = FileStore(place.path, place.world_size, timeout=seconds)
        return file, file.close
    if place.launcher_attempt is not None:
        return _open_launcher_store(place, seconds)
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


def _require_trusted(place: StoreAddress, insecure: bool, doing: str, purpose: Purpose) -> None:
    try:
        require_trusted(place.host, insecure=insecure, doing=doing, consent=purpose.consent)
    except StoreError as error:
        raise RendezvousError(f"rank {place.rank} cannot meet its group at {place.url}: {error}") from error


def _open_launcher_store(place: StoreAddress, seconds: float) -> tuple[TorchStore, Callable[[], None]]:
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


def _register(
    place: StoreAddress, store: TorchStore, close: Callable[[], None], name: str, purpose: Purpose
) -> Rendezvous:
    """Says in the store who this is, and reads there whether somebody contradicts."""
    claim = Claim(name=name, rank=place.rank, world_size=place.world_size)
    barrier = StartBarrier(store, claim, purpose)
    try:
        barrier.register()
    except RendezvousError:
        raise
    except RuntimeError as error:
        raise RendezvousError(f"{claim} cannot use {place.url}: {str(error).splitlines()[0]}") from error
    dynamic = place.world_size == -1
    return Rendezvous(
        store, place.rank, None if dynamic else place.world_size, close, None if dynamic else barrier
    )


def _contradict_rival(place: StoreAddress, insecure: bool, name: str, purpose: Purpose) -> None:
    """A rank 0 that cannot host the store looks whether another one does, and then tells everybody so."""
    try:
        store = TCPStore(place.host, place.port, timeout=RIVAL_SECONDS, insecure=insecure)
    except StoreError:
        return
    with store:
        StartBarrier(store, Claim(name=name, rank=0, world_size=place.world_size), purpose).check_rival()


_TORCH_IS_THERE = (
    ". torch.distributed is initialized in this process: if it meets at this address, choose another port, or "
    "pass the store that it was given as store="
)
