"""`init_rpc` as torch's callers call it.

Workers meet at the store that torch's own rendezvous makes. So all of torch's URLs, its environment variables and
their errors are what they were, and a program can use one MASTER_PORT, or one file, for both RPC and
`torch.distributed.init_process_group`.
"""

import itertools
from typing import Any

from torch.distributed.rendezvous import rendezvous

from .. import rpc
from ..c10d.torch_types import TorchStore
from ..rpc.backend_registry import BackendType
from ..torch_internals import TorchPrefixStore, create_store_from_options

__all__ = ["init_rpc", "init_rpc_backend"]

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
    store, rank, world_size = _meet(options, rank, world_size)
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


def _meet(options: Any, rank: int, world_size: int | None) -> tuple[TorchStore, int, int | None]:
    """The store, this worker's rank, and the group's size or None."""
    if world_size:
        meeting = rendezvous(options.init_method, rank=rank, world_size=world_size)
        store, found_rank, _ = next(meeting)
        _meetings[:] = [meeting, store]
        rank = found_rank if rank == -1 else rank
    else:
        store = create_store_from_options(options, rank)  # type: ignore[no-untyped-call]
        _meetings[:] = [store]
    return TorchPrefixStore(f"rpc_prefix_{next(_calls)}", store), rank, world_size or None
