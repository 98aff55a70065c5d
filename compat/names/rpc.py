"""Replacements for `torch.distributed.rpc`, its submodules and its C++ extension."""

from collections.abc import Callable, Mapping

from ... import rpc
from ...rpc.calls.wait_all import thread_futures
from ...rref.proxy import RRefProxy
from .. import agents, debug_info, faulty, futures, scripting, shutdown, tensorpipe
from ..init import init_rpc, init_rpc_backend
from .unavailable import unavailable

__all__ = ["REPLACEMENTS"]


def _package() -> Mapping[str, object]:
    return {
        "BackendType": rpc.BackendType,  # torch may have another class here than in backend_registry
        "_get_debug_info": debug_info.all_info,
        "_init_rpc_backend": init_rpc_backend,
        "init_rpc": init_rpc,
    }


def _api() -> Mapping[str, object]:
    return {
        "AllGatherStates": rpc.AllGatherStates,
        "RRef": rpc.RRef,
        "_all_gather": shutdown.all_gather,
        "_barrier": rpc.barrier,
        "_init_rpc_states": agents.set_current,
        "_require_initialized": rpc.require_initialized,
        "_thread_local_var": thread_futures,
        "_to_worker_info": rpc.get_worker_info,
        "_wait_all": rpc.wait_all,
        "_wait_all_workers": shutdown.wait_all_workers,
        "get_worker_info": rpc.get_worker_info,
        "remote": rpc.remote,
        "rpc_async": rpc.rpc_async,
        "rpc_sync": rpc.rpc_sync,
        "shutdown": shutdown.shutdown,
    }


def _backend_registry() -> Mapping[str, object]:
    tensorpipe.register()
    faulty.register()
    registry = rpc.backend_registry
    return {name: getattr(registry, name) for name in registry.__all__}


def _testing() -> Mapping[str, object]:
    return {"FaultyTensorPipeRpcBackendOptions": faulty.FaultyTensorPipeRpcBackendOptions}


def _c_extension() -> Mapping[str, object]:
    return {
        "PyRRef": rpc.RRef,
        "RpcAgent": agents.RpcAgent,
        "RpcBackendOptions": tensorpipe.RpcBackendOptions,
        "TensorPipeAgent": agents.TensorPipeAgent,
        "WorkerInfo": rpc.WorkerInfo,
        "_TensorPipeRpcBackendOptionsBase": tensorpipe.TensorPipeRpcBackendOptions,
        "_cleanup_python_rpc_handler": _cleanup_python_rpc_handler,
        "_delete_all_user_and_unforked_owner_rrefs": shutdown.delete_references,
        "_destroy_rref_context": shutdown.destroy_references,
        "_get_current_rpc_agent": agents.current,
        "_invoke_remote_builtin": unavailable("_invoke_remote_builtin", "rpc.remote"),
        "_invoke_remote_python_udf": unavailable("_invoke_remote_python_udf", "rpc.remote"),
        "_invoke_remote_torchscript": unavailable("_invoke_remote_torchscript", "rpc.remote"),
        "_invoke_rpc_builtin": unavailable("_invoke_rpc_builtin", "rpc.rpc_async"),
        "_invoke_rpc_python_udf": unavailable("_invoke_rpc_python_udf", "rpc.rpc_async"),
        "_invoke_rpc_torchscript": unavailable("_invoke_rpc_torchscript", "rpc.rpc_async"),
        "_is_current_rpc_agent_set": rpc.is_initialized,
        "_reset_current_rpc_agent": agents.stop_current,
        "_rref_context_get_debug_info": debug_info.references_info,
        "_set_and_start_rpc_agent": agents.set_current,
        "_set_rpc_timeout": rpc.set_rpc_timeout,
        "enable_gil_profiling": agents.enable_gil_profiling,
        "get_rpc_timeout": rpc.get_rpc_timeout,
    }


def _cleanup_python_rpc_handler() -> None:
    """Does nothing: gradwire keeps no Python state outside the agent."""


REPLACEMENTS: dict[str, Callable[[], Mapping[str, object]]] = {
    "torch._C._distributed_rpc": _c_extension,
    "torch.distributed.rpc": _package,
    "torch.distributed.rpc.api": _api,
    "torch.distributed.rpc._testing": _testing,
    "torch.distributed.rpc.backend_registry": _backend_registry,
    "torch.distributed.rpc.functions": lambda: {"async_execution": rpc.functions.async_execution},
    "torch.distributed.rpc.options": lambda: {
        "TensorPipeRpcBackendOptions": tensorpipe.TensorPipeRpcBackendOptions
    },
    "torch.distributed.rpc.rref_proxy": lambda: {"RRefProxy": RRefProxy},
    "torch.distributed.rpc.server_process_global_profiler": lambda: {
        "_server_process_global_profile": rpc.server_process_global_profile
    },
    "torch.futures": lambda: {"wait_all": futures.wait_all},
    "torch.jit": lambda: {"script": scripting.script},
}
