"""Rendezvous: finds a worker's group from a URL, the environment or a store, as (store, rank, world size)."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import final

import torch.distributed

from ...errors import RendezvousError, RendezvousNetworkError, StoreError, StoreNetworkError
from ...net.addresses import allows_insecure, format_address, require_trusted
from ...net.security import Credentials
from ..stores.base import DEFAULT_TIMEOUT, Timeout, to_seconds
from ..stores.file import FileStore
from ..stores.sealed import SealedStore, seal
from ..stores.tcp import TCPStore
from ..stores.views import PrefixStore
from ..torch_types import TorchStore, TorchTCPStore
from .start_barrier import GroupKind, Registration, StartBarrier
from .url import StoreAddress, parse_url

__all__ = ["Rendezvous", "rendezvous"]

RANK_CONFLICT_TIMEOUT_S = 1.0
"""Seconds for which a rank 0 that cannot host the store looks for another rank 0 that does."""

_DEFAULT_KIND = GroupKind(how_to_allow="pass insecure=True to gradwire.c10d.rendezvous")


@final
@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A worker's store, rank and world size.

    store: shared by all workers of the group.
    rank: this worker's rank, from 0 to world_size - 1. In a dynamic group any number, or -1 if none was given.
    world_size: number of workers; None for a dynamic group.
    """

    store: TorchStore
    rank: int
    world_size: int | None
    _close: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    _barrier: StartBarrier | None = field(default=None, repr=False, compare=False)

    def wait_for_all(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Waits until all workers of a static group have called this. In a dynamic group it does nothing.

        While the wait takes more than 10 s, warnings in the log name the missing ranks.

        Raises:
            RendezvousError: workers are missing after `timeout`, or conflict with each other. All raise the same.
        """
        if self._barrier is not None:
            self._barrier.wait("", to_seconds(timeout))

    def close(self) -> None:
        """Closes the store, unless it was given to `rendezvous`. Further calls do nothing."""
        self._close()


def rendezvous(
    url: str | None = None,
    *,
    rank: int | None = -1,
    world_size: int | None = -1,
    store: TorchStore | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    insecure: bool = False,
    credentials: Credentials | None = None,
    dynamic: bool = False,
    name: str = "",
    kind: GroupKind = _DEFAULT_KIND,
) -> Rendezvous:
    """Finds the group of this worker. Does not wait for the other workers; see `Rendezvous.wait_for_all`.

    Args:
        url: one of

            - `env://` (the default): RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the environment; under
              torchrun and `gradwire.launch.spawn`, the launcher's own store; under srun, mpiexec and in an Indexed
              Job of Kubernetes, rank and world size may be in the launcher's own variables: docs/launch.md;
            - `tcp://host:port?rank=0&world_size=2`: rank 0 hosts a TCPStore there;
            - `store://host:port?rank=0&world_size=2`: a store that runs there, started by
              `gradwire store`; with `env://`, GRADWIRE_STORE=host:port says the same;
            - `file:///path?rank=0&world_size=2`: a FileStore.

            Rank and world size may be in the URL or in the arguments. If they are in both, they must be equal.
        rank: this worker's rank; -1 or None to take it from the URL or the environment.
        world_size: number of workers; -1 or None to take it from the URL or the environment.
        store: a torch.distributed.Store to use instead of a URL. It stays open.
        timeout: how long to try to reach the store, and the default timeout of the store's operations.
        insecure: allow addresses that are not loopback addresses, without credentials.
        credentials: what the workers recognize each other by; with them, all addresses are allowed. A token also
            seals the values in stores that are not gradwire's. By default those in the environment: see
            Credentials.from_environment.
        dynamic: make the group dynamic if no world size is given: its members may join and leave at any time. With
            a tcp URL, the member with rank 0 hosts the store, and must stay as long as others join.
        name: the worker's name, for messages.
        kind: the kind of the group.

    Raises:
        RendezvousError: URL, environment and arguments are incomplete or contradict each other; the store cannot
            be opened; another worker has the same rank or was given another world size, which then all workers
            raise.
        CredentialsError: the credentials are not valid.
        TypeError: `store` is not a torch.distributed.Store.
    """
    seconds = to_seconds(timeout)
    credentials = credentials or Credentials.from_environment()
    if store is not None:
        if url is not None:
            raise RendezvousError(f"both url={url!r} and a store were given: give one of them")
        if not isinstance(store, TorchStore):
            raise TypeError(f"the store is {store!r}: give a torch.distributed.Store, such as a TCPStore")
        address = StoreAddress("the store", "given").with_identity(rank, world_size).checked(dynamic=dynamic)
        sealed = seal(store, credentials, insecure=allows_insecure(insecure))
        close = sealed.close if isinstance(sealed, SealedStore) else lambda: None
        return _register(address, sealed, close, name, kind)
    address = parse_url("env://" if url is None else url).with_identity(rank, world_size)
    address = address.from_environment(os.environ, dynamic=dynamic).checked(dynamic=dynamic)
    if address.host:
        action = "hosting a store on" if address.hosts_store else "connecting to"
        trusted = insecure or _protects(credentials, address)
        try:
            require_trusted(address.host, insecure=trusted, action=action, how_to_allow=kind.how_to_allow)
        except StoreError as error:
            raise _cannot_join(address, error) from error
    try:
        opened, close = _open(address, seconds, insecure, credentials)
    except StoreError as error:
        if address.hosts_store:
            _report_rank_conflict(address, insecure, credentials, name, kind)
        hint = _TORCH_STORE_HINT if address.rank == 0 and torch.distributed.is_initialized() else ""
        raise _cannot_join(address, error, hint) from error
    try:
        return _register(address, opened, close, name, kind)
    except BaseException:
        close()
        raise


def _protects(credentials: Credentials | None, address: StoreAddress) -> bool:
    """Returns whether credentials protect the store at an address, wherever that is."""
    is_torchs = address.launcher_attempt is not None and not address.runs
    return credentials is not None and (not is_torchs or credentials.token is not None)


def _open(
    address: StoreAddress, seconds: float, insecure: bool, credentials: Credentials | None
) -> tuple[TorchStore, Callable[[], None]]:
    """Returns the store at an address, and a function that closes it."""
    if address.path is not None:
        file = FileStore(address.path, address.world_size, timeout=seconds)
        return seal(file, credentials), file.close
    if address.launcher_attempt is not None and not address.runs:
        return _open_launcher_store(address, seconds, insecure, credentials)
    tcp = TCPStore(
        address.host,
        address.port,
        # Rank 0 does not wait for the other workers here, so that those with wrong settings hear of it at once.
        is_master=address.hosts_store,
        timeout=seconds,
        wait_for_workers=False,
        insecure=insecure,
        credentials=credentials if address.spawn_store is None else address.spawn_store.credentials,
    )
    if address.launcher_attempt is not None:
        return _part_of_attempt(tcp, address), tcp.close
    return tcp, tcp.close


def _cannot_join(address: StoreAddress, error: StoreError, hint: str = "") -> RendezvousError:
    error_class = RendezvousNetworkError if isinstance(error, StoreNetworkError) else RendezvousError
    return error_class(f"rank {address.rank} cannot join its group at {address.url}: {error}{hint}")


def _open_launcher_store(
    address: StoreAddress, seconds: float, insecure: bool, credentials: Credentials | None
) -> tuple[TorchStore, Callable[[], None]]:
    """Returns this attempt's part of torchrun's store, and a function that closes it."""
    try:
        launcher_store = TorchTCPStore(
            address.host,
            address.port,
            is_master=False,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        where = format_address(address.host, address.port)
        raise StoreNetworkError(
            f"torchrun's store does not answer on {where}: {str(error).splitlines()[0]}"
        ) from error
    sealed = seal(launcher_store, credentials, insecure=allows_insecure(insecure))
    attempt = _part_of_attempt(sealed, address)
    return attempt, sealed.close if isinstance(sealed, SealedStore) else attempt.close


def _part_of_attempt(store: TorchStore, address: StoreAddress) -> PrefixStore:
    """Returns the keys of this attempt of torchrun, whose group must not read what the previous one wrote."""
    return PrefixStore(f"gradwire/attempt/{address.launcher_attempt}", store)


def _register(
    address: StoreAddress, store: TorchStore, close: Callable[[], None], name: str, kind: GroupKind
) -> Rendezvous:
    """Registers this worker in the store, and raises if another worker conflicts with it."""
    registration = Registration(name=name, rank=address.rank, world_size=address.world_size)
    barrier = StartBarrier(store, registration, kind)
    is_dynamic = address.world_size == -1
    try:
        if is_dynamic or not kind.may_rejoin or barrier.predecessor() is None:
            barrier.register()
    except RendezvousError:
        raise
    except RuntimeError as error:
        raise RendezvousError(f"{registration} cannot use {address.url}: {str(error).splitlines()[0]}") from error
    return Rendezvous(
        store, address.rank, None if is_dynamic else address.world_size, close, None if is_dynamic else barrier
    )


def _report_rank_conflict(
    address: StoreAddress, insecure: bool, credentials: Credentials | None, name: str, kind: GroupKind
) -> None:
    """On a rank 0 that cannot host the store: reports a conflict if another rank 0 hosts one there."""
    try:
        store = TCPStore(
            address.host,
            address.port,
            timeout=RANK_CONFLICT_TIMEOUT_S,
            insecure=insecure,
            credentials=credentials,
        )
    except StoreError:
        return
    with store:
        registration = Registration(name=name, rank=0, world_size=address.world_size)
        StartBarrier(store, registration, kind).check_rank_conflict()


_TORCH_STORE_HINT = (
    ". torch.distributed is initialized in this process: if its store is at this address, choose another port, or "
    "pass that store as store="
)
