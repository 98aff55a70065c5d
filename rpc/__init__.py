"""Remote calls: the names of `torch.distributed.rpc`, on gradwire's agent."""

from .agent import RpcAgent, is_initialized
from .api import debug_info, get_worker_info, init_rpc, shutdown
from .calls import rpc_async, rpc_sync
from .futures import Future
from .options import ChannelOptions, RpcBackendOptions
from .worker import WorkerInfo

# Last, because rref builds on the modules above. Whatever of gradwire is imported, `gradwire/__init__.py` runs
# first and comes here, through autograd, before it comes to rref.
from ..rref.api import remote  # isort: skip
from ..rref.rref import RRef  # isort: skip

__all__ = [
    "ChannelOptions",
    "Future",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "WorkerInfo",
    "debug_info",
    "get_worker_info",
    "init_rpc",
    "is_initialized",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
