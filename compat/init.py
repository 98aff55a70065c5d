"""`init_rpc` as torch's callers call it.

Workers meet at the store that torch's own rendezvous makes. So all of torch's URLs, its environment variables and
their errors are what they were, and a program can use one MASTER_PORT, or one file, for both RPC and
`torch.distributed.init_process_group`.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.rendezvous import rendezvous

from .. import rpc
from ..c10d.start_barrier import Claim, Purpose, StartBarrier
from ..c10d.torch_types import TorchStore, TorchTCPStore
from ..rpc.backend_registry import BackendType
from ..torch_internals import TorchPrefixStore, create_store_from_options, tcp_store_patched

__all__ = ["init_rpc", "init_rpc_backend"]

RIVAL_TIMEOUT = timedelta(seconds=1)
"""How long a rank 0 that cannot listen looks for another rank 0 that does."""

_opening = threading.Lock()
_calls = itertools.count()
_meetings: list[Any] = []
"""The store of the last call: its server must live as long as other workers may ask it."""


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: rpc.RpcBackendOptions | None = None,
) -> None:
    """Joins the group of workers: see `gradwire.rpc.init_rpc`.

    Raises:
        TypeError: the backend or the options are none, or do not belong together.
        RuntimeError, ValueError: the workers cannot find each other.
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
    store, rank, world_size = _meet(options, name, rank, world_size)
    init_rpc_backend(backend, store, name, rank, world_size, options)


def init_rpc_backend(
    backend: BackendType | None = None,
    store: TorchStore | None = None,
    name: str = "",
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: rpc.RpcBackendOptions | None = None,
) -> None:
    """Joins the group that meets at a store."""
    rpc.init_rpc(name, backend, rank, world_size, rpc_backend_options, store=store)


def _meet(options: Any, name: str, rank: int, world_size: int | None) -> tuple[TorchStore, int, int | None]:
    """The store, this worker's rank, and the group's size or None."""
    prefix = f"rpc_prefix_{next(_calls)}"

    def contradict_rival(store: TorchStore) -> None:
        claim = Claim(name=name, rank=0, world_size=world_size or -1)
        StartBarrier(TorchPrefixStore(prefix, store), claim, Purpose("rpc", options.CONSENT)).check_rival()

    with _no_waiting_in_the_dark(contradict_rival):
        if world_size:
            meeting = rendezvous(options.init_method, rank=rank, world_size=world_size)
            store, found_rank, _ = next(meeting)
            _meetings[:] = [meeting, store]
            rank = found_rank if rank == -1 else rank
        else:
            store = create_store_from_options(options, rank)  # type: ignore[no-untyped-call]
            _meetings[:] = [store]
    return TorchPrefixStore(prefix, store), rank, world_size or None


@contextmanager
def _no_waiting_in_the_dark(contradict_rival: Callable[[TorchStore], None]) -> Iterator[None]:
    """Has torch's rendezvous open its TCPStore without waiting there for all workers: it would not say for whom.

    contradict_rival: is called with the store that is where rank 0 cannot host its own.
    """

    def open_store(*args: Any, **options: Any) -> TorchTCPStore:
        options["wait_for_workers"] = False
        try:
            return TorchTCPStore(*args, **options)
        except DistNetworkError:
            if options.get("is_master"):
                rival = {**options, "is_master": False, "multi_tenant": False, "timeout": RIVAL_TIMEOUT}
                there: TorchTCPStore | None = None
                with suppress(DistNetworkError, DistStoreError):
                    there = TorchTCPStore(*args, **rival)
                if there is not None:
                    contradict_rival(there)
            raise

    with _opening, tcp_store_patched(open_store):
        yield
