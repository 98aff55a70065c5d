"""Remote calls: the names of `torch.distributed.rpc`, on gradwire's agent."""

from ..errors import Outcome
from . import aio, fault_injection, functions
from . import backend_registry as backend_registry
from . import grpc_backend as grpc_backend
from .api import (
    debug_info,
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    init_rpc,
    is_available,
    on_worker_back,
    on_worker_joined,
    on_worker_left,
    on_worker_suspect,
    require_initialized,
    set_rpc_timeout,
    shutdown,
)
from .backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from .calls.sending import broadcast_call, rpc_async, rpc_sync, wait_all
from .calls.streams import RpcStream, rpc_stream
from .collectives.all_gather import AllGatherStates, all_gather, barrier
from .contracts.agent import RpcAgent, is_initialized
from .contracts.options import (
    BroadcastOptions,
    ChannelOptions,
    CudaOptions,
    FlowControlOptions,
    Liveness,
    RpcBackendOptions,
    View,
)
from .contracts.policy import Policy, expose
from .contracts.worker import WorkerInfo
from .contracts.worker_events import WorkerBack, WorkerEventHandle, WorkerJoined, WorkerLeft, WorkerSuspect
from .execution.futures import Future
from .profiling.extension import server_process_global_profile

# Last, because rref builds on the modules above. Whatever of gradwire is imported, `gradwire/__init__.py` runs
# first and comes here, through autograd, before it comes to rref.
from ..rref.rref import remote  # isort: skip
from ..rref.rref import RRef  # isort: skip

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "BroadcastOptions",
    "ChannelOptions",
    "CudaOptions",
    "FlowControlOptions",
    "Future",
    "Liveness",
    "Outcome",
    "Policy",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "RpcStream",
    "View",
    "WorkerBack",
    "WorkerEventHandle",
    "WorkerInfo",
    "WorkerJoined",
    "WorkerLeft",
    "WorkerSuspect",
    "aio",
    "all_gather",
    "backend_registered",
    "backend_registry",
    "barrier",
    "broadcast_call",
    "construct_rpc_backend_options",
    "debug_info",
    "expose",
    "fault_injection",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "grpc_backend",
    "init_backend",
    "init_rpc",
    "is_available",
    "is_initialized",
    "on_worker_back",
    "on_worker_joined",
    "on_worker_left",
    "on_worker_suspect",
    "register_backend",
    "remote",
    "require_initialized",
    "rpc_async",
    "rpc_stream",
    "rpc_sync",
    "server_process_global_profile",
    "set_rpc_timeout",
    "shutdown",
    "wait_all",
]


def __dir__() -> list[str]:
    return sorted(__all__)
