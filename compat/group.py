"""Replaces torch's `init_rpc`, and its `shutdown` with the functions that it calls.

Workers rendezvous through the store that torch's own `rendezvous` creates. So all of torch's URLs, environment
variables and their errors work as in torch, and a program can use one MASTER_PORT, or one file, for both RPC and
`torch.distributed.init_process_group`.

torch's `shutdown` calls other functions through their module, where programs and tests replace them. So does this
one.
"""

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.rendezvous import rendezvous

from .. import rpc
from ..c10d.rendezvous.start_barrier import GroupKind, Registration, StartBarrier
from ..c10d.stores.sealed import seal
from ..c10d.torch_types import TorchStore, TorchTCPStore
from ..errors import RpcTimeoutError
from ..net.addresses import allows_insecure
from ..rpc.api import leave
from ..rpc.backend_registry import BackendType
from ..rpc.contracts.agent import current_agent, holder
from ..rpc.contracts.messages import UNSET_RPC_TIMEOUT
from ..rref.forks import References
from ..torch_internals import TorchPrefixStore, create_store_from_options, tcp_store_patched

__all__ = [
    "all_gather",
    "delete_references",
    "destroy_references",
    "init_rpc",
    "init_rpc_backend",
    "shutdown",
    "wait_all_workers",
]

RIVAL_CONNECT_TIMEOUT = timedelta(seconds=1)
"""How long a rank 0 that cannot listen on its port tries to connect to another rank 0 there."""

_patch_lock = threading.Lock()
"""Held while torch's TCPStore is patched."""

_call_count = itertools.count()
"""Counts the calls of init_rpc; each uses keys of its own."""

_kept_alive: list[Any] = []
"""The store of the last call, whose server other workers may still use."""

RELEASE_TIMEOUT_S = 100.0
"""How long to wait until the owners of references have confirmed their release, in seconds."""

log = logging.getLogger(__name__)


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: rpc.RpcBackendOptions | None = None,
) -> None:
    """Joins the group of workers: see `gradwire.rpc.init_rpc`.

    Raises:
        TypeError: `backend` or `rpc_backend_options` has the wrong type, or they do not match.
        RuntimeError, ValueError: the rendezvous failed.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, rpc.RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if rpc.is_initialized():
        raise RuntimeError("RPC is already initialized")
    if backend is None and rpc_backend_options is None:
        backend = BackendType["TENSORPIPE"]
    options = rpc_backend_options
    if options is None and backend is not None:
        options = rpc.backend_registry.construct_rpc_backend_options(backend)
    store, rank, world_size = _rendezvous(options, name, rank, world_size)
    init_rpc_backend(backend, store, name, rank, world_size, options)


def init_rpc_backend(
    backend: BackendType | None = None,
    store: TorchStore | None = None,
    name: str = "",
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: rpc.RpcBackendOptions | None = None,
) -> None:
    """Joins the group of workers that rendezvous through a store."""
    rpc.init_rpc(name, backend, rank, world_size, rpc_backend_options, store=store)


def _rendezvous(options: Any, name: str, rank: int, world_size: int | None) -> tuple[TorchStore, int, int | None]:
    """Returns the store, this worker's rank, and the world size; None for a dynamic group."""
    prefix = f"rpc_prefix_{next(_call_count)}"

    def check_rival(store: TorchStore) -> None:
        registration = Registration(name=name, rank=0, world_size=world_size or -1)
        insecure = allows_insecure(options.insecure)
        shared = seal(TorchPrefixStore(prefix, store), options.find_credentials(), insecure=insecure)
        StartBarrier(shared, registration, GroupKind("rpc", options.CONSENT)).check_rank_conflict()

    with _non_blocking_tcp_store(check_rival):
        if world_size:
            results = rendezvous(options.init_method, rank=rank, world_size=world_size)
            store, assigned_rank, _ = next(results)
            _kept_alive[:] = [results, store]
            rank = assigned_rank if rank == -1 else rank
        else:
            store = create_store_from_options(options, rank)  # type: ignore[no-untyped-call]
            _kept_alive[:] = [store]
    return TorchPrefixStore(prefix, store), rank, world_size or None


@contextmanager
def _non_blocking_tcp_store(check_rival: Callable[[TorchStore], None]) -> Iterator[None]:
    """Context manager in which torch's rendezvous does not wait for all workers when it opens its TCPStore.

    gradwire's start barrier waits for them instead, and its errors name the workers that are missing. If rank 0
    cannot listen on its port, `check_rival` gets the store of the rank 0 that does, and raises an error.
    """

    def open_store(*args: Any, **options: Any) -> TorchTCPStore:
        options["wait_for_workers"] = False
        try:
            return TorchTCPStore(*args, **options)
        except DistNetworkError:
            if options.get("is_master") and (store := _connect_to_rival(args, options)) is not None:
                check_rival(store)
            raise

    with _patch_lock, tcp_store_patched(open_store):
        yield


def _connect_to_rival(args: tuple[Any, ...], options: dict[str, Any]) -> TorchTCPStore | None:
    """Returns a client of the store that occupies the port of these arguments; None if it is not a store."""
    options = {**options, "is_master": False, "multi_tenant": False, "timeout": RIVAL_CONNECT_TIMEOUT}
    with suppress(DistNetworkError, DistStoreError):
        return TorchTCPStore(*args, **options)
    return None


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leaves the group: see `gradwire.rpc.shutdown`.

    Raises:
        RuntimeError: not all workers called shutdown within the timeout; or other workers still hold references to
            values of this one, and `torch.distributed.rpc.api._ignore_rref_leak` is False.
    """
    api: Any = sys.modules["torch.distributed.rpc.api"]
    agent: object = holder.get()
    if not isinstance(agent, rpc.RpcAgent):
        rpc.shutdown(graceful, timeout)  # of another backend, which may lack the methods used below
        return
    worker = agent

    def join() -> None:
        if not worker.dynamic:
            api._wait_all_workers(timeout)
            api._delete_all_user_and_unforked_owner_rrefs()
        worker.join(timeout)
        if not api._ignore_rref_leak:
            try:
                destroy_references(ignore_leak=False)
            finally:
                worker.join(timeout)  # no worker leaves before all have checked: leaving releases its references

    leave(graceful, timeout, join)


def wait_all_workers(timeout: float = 0) -> None:
    """Waits until all workers have called it; `timeout` in seconds, 0 for none."""
    sys.modules["torch.distributed.rpc.api"]._all_gather(None, timeout=timeout)


def all_gather(
    obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Gathers one object from each of several workers: see `gradwire.rpc.all_gather`."""
    try:
        return rpc.all_gather(obj, worker_names, timeout)
    except RpcTimeoutError as error:
        raise RuntimeError(f"timed out in _all_gather after {error.seconds:.2f} seconds: {error}") from error


def delete_references() -> None:
    """Releases all references of this worker to values of others. Using them afterwards is an error.

    Logs a warning if some cannot be released in time: a running call keeps those that it uses.
    """
    try:
        current_agent().extension(References).release_all(RELEASE_TIMEOUT_S)
    except RpcTimeoutError as error:
        log.warning("%s", error)


def destroy_references(ignore_leak: bool) -> None:
    """Raises RuntimeError if other workers hold references to values of this one, unless `ignore_leak`."""
    table = current_agent().extension(References).table
    if not ignore_leak and len(table):
        raise RuntimeError(f"Leaking RRef: other workers still hold references to {len(table)} values of this one")
