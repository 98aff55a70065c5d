"""Joining and leaving a group of workers."""

import atexit
import threading
from collections.abc import Mapping
from typing import Any

from ..c10d.addresses import is_loopback
from ..c10d.rendezvous import Rendezvous, rendezvous
from ..c10d.torch_store import TorchStore
from ..errors import RpcError
from .agent import Destination, RpcAgent, current_agent, holder
from .grpc_agent import GrpcAgent
from .membership import Member, join, name_group
from .options import RpcBackendOptions
from .worker import WorkerInfo, check_worker_name

__all__ = ["debug_info", "get_worker_info", "init_rpc", "shutdown"]

BACKENDS = ("gradwire", "GRPC")


_joining = threading.Lock()


def init_rpc(
    name: str,
    backend: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    store: TorchStore | None = None,
) -> None:
    """Joins the group of workers; returns when all of them have.

    Args:
        name: this worker's, unique in the group.
        backend: "gradwire", the only one, and the default.
        rank: 0 to world_size - 1; by default RANK of the environment (or the rank in the URL).
        world_size: the number of workers; by default WORLD_SIZE of the environment (or that in the URL).
        rpc_backend_options: see RpcBackendOptions.
        store: meet through this store instead of the options' `init_method`. Any torch store; it stays open.

    Raises:
        RendezvousError: the workers cannot find each other, or contradict each other.
        RpcError: this process is a worker already.
        TypeError, ValueError: an argument cannot be.
    """
    options = _check_options(backend, rpc_backend_options)
    check_worker_name(name)
    _check_host(options)
    with _joining:
        if (running := holder.get()) is not None:
            raise RpcError(f"this process is worker {running.info.name!r} already: call shutdown first")
        if store is None:
            met = rendezvous(
                options.init_method,
                rank=rank,
                world_size=world_size,
                timeout=options.init_timeout,
                insecure=options.insecure,
            )
        else:
            met = rendezvous(store=store, rank=rank, world_size=world_size, timeout=options.init_timeout)
        agent = _start_agent(WorkerInfo(name, met.rank), met, options)
        holder.set_default(agent)
        # gRPC must not be torn down while it runs: a program that ends without shutdown leaves at once.
        atexit.register(agent.shutdown, graceful=False, timeout=0)


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leaves the group.

    Args:
        graceful: wait until all workers have called shutdown and no call is under way anywhere; then nothing
            is lost. A worker that dies meanwhile is not waited for. Otherwise leave at once.
        timeout: seconds to wait, 0 for none. This worker leaves also when it is over.

    Raises:
        NotInitializedError: this process is no worker.
        RpcTimeoutError: the others did not come in time.
    """
    agent = current_agent()
    try:
        agent.shutdown(graceful=graceful, timeout=timeout)
    finally:
        atexit.unregister(agent.shutdown)
        holder.forget(agent)


def get_worker_info(worker_name: Destination | None = None) -> WorkerInfo:
    """A worker's name and id; without an argument, this worker's.

    Raises:
        NotInitializedError, UnknownWorkerError
    """
    agent = current_agent()
    return agent.info if worker_name is None else agent.worker(worker_name)


def debug_info() -> Mapping[str, Any]:
    """Counts of what is alive on this worker (calls, references, contexts, threads) and of what it has sent.

    Raises:
        NotInitializedError: this process is no worker.
    """
    return current_agent().debug_info()


def _check_options(backend: str | None, options: RpcBackendOptions | None) -> RpcBackendOptions:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: the backend is 'gradwire'; leave the argument out")
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise TypeError(f"rpc_backend_options is {options!r}: give a gradwire.rpc.RpcBackendOptions")
    return options or RpcBackendOptions()


def _check_host(options: RpcBackendOptions) -> None:
    if not options.insecure and not is_loopback(options.host):
        raise RpcError(
            f"host is {options.host!r}, which other machines can reach, and whoever reaches a worker can run "
            "code in it: use a loopback address, or, on a network where you trust everybody, insecure=True"
        )


def _start_agent(info: WorkerInfo, met: Rendezvous, options: RpcBackendOptions) -> RpcAgent:
    try:
        group = name_group(met.store, info.id)
        agent = GrpcAgent(info, options, group, on_closed=met.close)
    except BaseException:
        met.close()
        raise
    try:
        me = Member(info, agent.listen())
        agent.open(join(met.store, group, me, met.world_size, options.init_timeout))
    except BaseException:
        agent.shutdown(graceful=False, timeout=0)
        raise
    return agent
