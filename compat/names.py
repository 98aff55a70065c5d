"""The replacements for torch's names, by module of torch.

Each replaced object is listed once, in the module that defines it. `Patches.patch_importers` finds the other
modules that refer to it.
Methods of torch's classes that gradwire's lack, or that torch's refuse and gradwire's support, are here as well.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from .. import autograd, optim, rpc
from ..autograd.graph import RecvRpc, SendRpc
from ..errors import RpcError, RRefError
from ..nn.remote_module import SENT_ATTRIBUTES, RemoteModule, refuse_method
from ..rpc.calls.sending import thread_futures, wait_for_futures
from ..rpc.contracts.agent import holder
from ..rref.rref import RRef, RRefProxy
from . import agents, backends, contexts, group, scripting
from .extensions import SentReference

__all__ = ["METHODS", "REPLACEMENTS", "Names", "public_names"]

PICKLED_ATTRIBUTES = (*vars(nn.Module()), *SENT_ATTRIBUTES)
"""The first keys in the `__dict__` of a RemoteModule received from another worker; its two methods follow."""


def _serialize(self: RRef[Any]) -> SentReference:
    """Returns what stands for this reference in the pickle of a call, for a program's own pickler or reducer.

    torch returns the ids of a new fork; here, that is made when the message is sent.
    """
    handle = self._handle
    if handle.agent is not holder.get():
        raise RRefError(f"{self} was released at shutdown. Cannot call fork an UserRRef after deletion.")
    handle.check_usable(self, "fork an UserRRef")
    return SentReference(self)


def _deserialize(fork: object) -> RRef[Any]:
    """Returns the reference for what `_serialize` has returned. Raises RRefError if it is something else."""
    if not isinstance(fork, SentReference):
        raise RRefError(f"{fork!r} cannot be deserialized to an RRef: pass RRefs as arguments or results of calls")
    return fork.reference


def _get_profiling_future(self: RRef[Any]) -> torch.futures.Future[Any]:
    """Returns a future that is done when the call that creates the value, and its profiler event, have ended."""
    return self._get_future()


def _named_modules(
    self: RemoteModule, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yields this module in a traversal of a parent module; raises ValueError if the traversal begins here."""
    if memo is None:
        refuse_method("named_modules")(self)
    modules: Iterator[tuple[str, nn.Module]] = nn.Module.named_modules(self, memo, prefix, remove_duplicate)
    return modules


def _name_of_node(self: Any) -> str:
    return f"torch::distributed::autograd::{type(self).__name__}"


METHODS: Mapping[type, Mapping[str, object]] = {
    RRef: {
        "_deserialize": staticmethod(_deserialize),
        "_get_profiling_future": _get_profiling_future,
        "_serialize": _serialize,
    },
    RemoteModule: {
        "children": refuse_method("children"),
        "modules": refuse_method("modules"),
        "named_children": refuse_method("named_children"),
        "named_modules": _named_modules,
    },
    SendRpc._backward_cls: {"name": _name_of_node},
    RecvRpc._backward_cls: {"name": _name_of_node},
}
"""The methods of a class, by name; of nodes, those that `DistAutogradContext` returns."""


Names = Mapping[str, object]


def public_names(module: Any) -> Names:
    """Returns what a module shows, by name."""
    return {name: getattr(module, name) for name in module.__all__}


def _unavailable(name: str, instead: str) -> Callable[..., NoReturn]:
    """Returns a function that raises RpcError when it is called, naming what to use instead."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:  # noqa: ARG001
        raise RpcError(f"{name} is a part of torch's own agent, and this program runs on gradwire: use {instead}")

    refuse.__name__ = name
    return refuse


def _do_nothing(*_args: object, **_kwargs: object) -> None:
    """Takes the place of what prepares, or cleans up after, torch's own agent."""


def _wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """Returns the values of all futures, or raises the error of the first that fails as soon as it fails.

    torch documents the same of its own function. But torch's C++ takes a future that Python code has failed, as
    gradwire's are, for a successful one, and goes on waiting.
    """
    wait_for_futures(futures)
    return [future.wait() for future in futures]


REPLACEMENTS: Mapping[str, Names] = {
    "torch._C._distributed_autograd": {
        "DistAutogradContext": contexts.DistAutogradContext,
        "_current_context": contexts.current,
        "_get_debug_info": agents.autograd_info,
        "_get_max_id": contexts.max_id,
        "_init": _do_nothing,
        "_is_valid_context": contexts.check_valid,
        "_new_context": contexts.new,
        "_release_context": contexts.release,
        "_retrieve_context": contexts.retrieve,
        "backward": contexts.backward,
        "get_gradients": autograd.get_gradients,
    },
    "torch._C._distributed_rpc": {
        "PyRRef": rpc.RRef,
        "RpcAgent": agents.RpcAgent,
        "RpcBackendOptions": backends.RpcBackendOptions,
        "TensorPipeAgent": agents.TensorPipeAgent,
        "WorkerInfo": rpc.WorkerInfo,
        "_TensorPipeRpcBackendOptionsBase": backends.TensorPipeRpcBackendOptions,
        "_cleanup_python_rpc_handler": _do_nothing,
        "_delete_all_user_and_unforked_owner_rrefs": group.delete_references,
        "_destroy_rref_context": group.destroy_references,
        "_get_current_rpc_agent": agents.current,
        "_invoke_remote_builtin": _unavailable("_invoke_remote_builtin", "rpc.remote"),
        "_invoke_remote_python_udf": _unavailable("_invoke_remote_python_udf", "rpc.remote"),
        "_invoke_remote_torchscript": _unavailable("_invoke_remote_torchscript", "rpc.remote"),
        "_invoke_rpc_builtin": _unavailable("_invoke_rpc_builtin", "rpc.rpc_async"),
        "_invoke_rpc_python_udf": _unavailable("_invoke_rpc_python_udf", "rpc.rpc_async"),
        "_invoke_rpc_torchscript": _unavailable("_invoke_rpc_torchscript", "rpc.rpc_async"),
        "_is_current_rpc_agent_set": rpc.is_initialized,
        "_reset_current_rpc_agent": agents.stop_current,
        "_rref_context_get_debug_info": agents.references_info,
        "_set_and_start_rpc_agent": _do_nothing,
        "_set_rpc_timeout": rpc.set_rpc_timeout,
        "enable_gil_profiling": agents.enable_gil_profiling,
        "get_rpc_timeout": rpc.get_rpc_timeout,
    },
    "torch.distributed.autograd": {"context": contexts.context},
    "torch.distributed.nn.api.remote_module": {
        "RemoteModule": RemoteModule,
        "_REMOTE_MODULE_PICKLED_ATTRIBUTES": PICKLED_ATTRIBUTES,
        "_RemoteModule": RemoteModule,
    },
    "torch.distributed.optim.optimizer": {"DistributedOptimizer": optim.DistributedOptimizer},
    "torch.distributed.rpc": {
        "BackendType": rpc.BackendType,  # torch may have another class here than in backend_registry
        "_get_debug_info": agents.all_info,
        "_init_rpc_backend": group.init_rpc_backend,
        "init_rpc": group.init_rpc,
    },
    "torch.distributed.rpc._testing": {
        "FaultyTensorPipeRpcBackendOptions": backends.FaultyTensorPipeRpcBackendOptions
    },
    "torch.distributed.rpc.api": {
        "AllGatherStates": rpc.AllGatherStates,
        "RRef": rpc.RRef,
        "_all_gather": group.all_gather,
        "_barrier": rpc.barrier,
        "_init_rpc_states": _do_nothing,
        "_require_initialized": rpc.require_initialized,
        "_thread_local_var": thread_futures,
        "_to_worker_info": rpc.get_worker_info,
        "_wait_all": rpc.wait_all,
        "_wait_all_workers": group.wait_all_workers,
        "get_worker_info": rpc.get_worker_info,
        "remote": rpc.remote,
        "rpc_async": rpc.rpc_async,
        "rpc_sync": rpc.rpc_sync,
        "shutdown": group.shutdown,
    },
    "torch.distributed.rpc.backend_registry": public_names(rpc.backend_registry),
    "torch.distributed.rpc.functions": {"async_execution": rpc.functions.async_execution},
    "torch.distributed.rpc.options": {"TensorPipeRpcBackendOptions": backends.TensorPipeRpcBackendOptions},
    "torch.distributed.rpc.rref_proxy": {"RRefProxy": RRefProxy},
    "torch.distributed.rpc.server_process_global_profiler": {
        "_server_process_global_profile": rpc.server_process_global_profile
    },
    "torch.futures": {"wait_all": _wait_all},
    "torch.jit": {"script": scripting.script},
}
"""By the name of a torch module, the objects that take the place of its own."""
