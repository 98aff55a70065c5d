"""Wraps every private name of torch that gradwire uses; the other modules use torch's public API only.

Differences between the supported releases of torch:

    2.11, 2.12   collectives on one tensor are `_allgather_base`, `_reduce_scatter_base` and `alltoall_base`
    2.13         they are `all_gather_single`, `reduce_scatter_single` and `all_to_all_single`
    2.14         backends, torch's own included, are found through the entry points `torch.distributed.backends`;
                 a Backend may be a Python class, and new_group passes the default group's to C++ if it has a
                 device; adds `gather_single`; backend options have `enable_reconfigure`; split_group keeps the
                 order of ranks; functions of torch.jit warn with FutureWarning, which Python shows by default,
                 instead of DeprecationWarning
    2.15         `supports_time_estimate` is `_supports_time_estimate`; split_group reads `_device_types` of a
                 group that is not registered with torch yet
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed
import torch.jit.frontend
from torch import Tensor
from torch._C import Future as AnyFuture
from torch._C._autograd import _disable_profiler_legacy as disable_legacy_profiler
from torch._C._autograd import _enable_profiler_legacy as enable_legacy_profiler
from torch._C._autograd import _enable_record_function as enable_record_function
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch._C._autograd import _record_function_with_args_enter as begin_record
from torch._C._distributed_c10d import AllgatherOptions
from torch._C._distributed_c10d import Backend as TorchBackend
from torch._C._distributed_c10d import PrefixStore as TorchPrefixStore
from torch._C._dynamo import eval_frame
from torch._C._profiler import ProfilerConfig, ProfilerState
from torch._C._profiler import _ExperimentalConfig as ExperimentalConfig
from torch._jit_internal import FunctionModifiers, createResolutionCallbackFromClosure
from torch._jit_internal import _qualified_name as qualified_name
from torch._sources import parse_def
from torch.autograd.profiler_legacy import _parse_legacy_records as parse_legacy_records
from torch.distributed import Backend, distributed_c10d
from torch.distributed.distributed_c10d import BackendConfig, DebugLevel, get_debug_level
from torch.distributed.distributed_c10d import default_pg_timeout as default_timeout
from torch.distributed.rendezvous import _create_store_from_options as create_store_from_options
from torch.jit._builtins import _find_builtin as find_builtin
from torch.jit._recursive import ScriptMethodStub, wrap_cpp_module
from torch.jit._script import RecursiveScriptModule
from torch.multiprocessing import _prctl_pr_set_pdeathsig as set_parent_death_signal  # type: ignore[attr-defined]
from torch.utils._pytree import tree_map_only

from .errors import RpcError

__all__ = [
    "HAS_PYTHON_BACKENDS",
    "AllgatherOptions",
    "AnyFuture",
    "BackendConfig",
    "DebugLevel",
    "ExperimentalConfig",
    "FunctionModifiers",
    "ProfilerConfig",
    "ProfilerState",
    "RecursiveScriptModule",
    "ScriptMethodStub",
    "TorchBackend",
    "TorchPrefixStore",
    "apply_function",
    "backend_creator",
    "backend_devices",
    "backend_names",
    "begin_profiler_event",
    "compile_script",
    "createResolutionCallbackFromClosure",
    "create_store_from_options",
    "default_timeout",
    "disable_legacy_profiler",
    "enable_legacy_profiler",
    "enable_record_function",
    "find_builtin",
    "get_debug_level",
    "has_local_modes",
    "known_groups",
    "load_script",
    "neg_view",
    "not_scriptable",
    "parse_def",
    "parse_legacy_records",
    "profiler_enabled",
    "qualified_name",
    "quantized",
    "quantized_per_channel",
    "register_group_backend",
    "rpc_class_reducers",
    "rpc_pickler_in_use",
    "run_backward",
    "save_script",
    "script_function_from_graph",
    "script_methods",
    "set_group_ranks",
    "set_parent_death_signal",
    "set_profiler_node_id",
    "skip_in_dynamo",
    "storage_use_count",
    "tcp_store_patched",
    "tree_map_only",
]

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M")

HAS_PYTHON_BACKENDS = torch.__version__ >= "2.14"  # a TorchVersion: compares as a version, not as text
"""Whether a Backend may be a Python class."""


# torch.distributed


def has_local_modes() -> bool:
    """Returns whether the calling thread has modes of torch that other threads do not have.

    They are inference mode, and modes that change what functions of torch do, such as that of a default device.
    """
    stacks = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    return stacks > 0 or torch.is_inference_mode_enabled()


def backend_devices(name: str) -> list[str]:
    """Returns the device types that a registered backend supports, such as "cpu"."""
    return Backend.backend_capability[name.lower()]


def backend_creator(name: str) -> Callable[..., Any] | None:
    """Returns the function that creates a backend; None for an unknown name or one built into torch's C++."""
    plugin = Backend._plugins.get(name.upper())
    return None if plugin is None else cast(Callable[..., Any], plugin.creator_fn)


def backend_names() -> list[str]:
    """Returns the names, in lower case, of the backends registered so far."""
    return [name.lower() for name in Backend._plugins]


def known_groups() -> Iterable[Any]:
    """Returns the process groups of this process that torch knows."""
    return distributed_c10d._world.pg_map


def set_group_ranks(group: Any, global_ranks: Sequence[int]) -> None:
    """Tells torch which ranks of the default group a group has now, if torch knows the group."""
    if group in distributed_c10d._world.pg_group_ranks:
        ranks = {global_rank: rank for rank, global_rank in enumerate(global_ranks)}
        distributed_c10d._world.pg_group_ranks[group] = ranks


def register_group_backend(group: Any, backend: TorchBackend, devices: Iterable[str]) -> None:
    """Registers a Backend with a group, so that torch's C++ finds it for these device types and as the default."""
    kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
    for device in devices:
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)


# torch.jit. Its public functions warn that torch.jit is deprecated. The warning is for programs that call them,
# not for those that only send a compiled module through gradwire, so the functions below bypass it.


def compile_script(module: torch.nn.Module) -> torch.nn.Module:
    """Compiles a module as torch.jit.script does."""
    compiler: Any = torch.jit._script  # its stub lacks the function
    return cast(torch.nn.Module, compiler._script_impl(module))


def script_function_from_graph(name: str, graph: Any) -> Any:
    """Returns a torch.jit.ScriptFunction that runs a TorchScript graph."""
    return torch._C._create_function_from_graph(name, graph)


def save_script(scripted: Any) -> bytes:
    """Returns a script function or module as the bytes that torch.jit.save writes."""
    return cast(bytes, scripted.save_to_buffer(_extra_files={}))


def load_script(data: bytes) -> Any:
    """Returns the function or module that `save_script` saved."""
    unit = torch._C.CompilationUnit()
    load: Any = torch._C.import_ir_module_from_buffer  # its stub lacks the last argument
    restore_shapes = False
    return wrap_cpp_module(load(unit, data, None, {}, restore_shapes))  # type: ignore[no-untyped-call]


def not_scriptable(function: F) -> F:
    """Decorates a function so that `torch.jit.script` refuses code that calls it, with an error that says why."""

    def refuse() -> NoReturn:
        raise RpcError(
            f"{function.__name__} cannot be called from inside TorchScript (torch.jit is deprecated): make the "
            "call in Python, and send the script function"
        )

    function.__prepare_scriptable__ = refuse  # type: ignore[attr-defined]
    return function


def script_methods(scripted: torch.jit.ScriptModule) -> list[Any]:
    """Returns the compiled methods of a module."""
    return [getattr(scripted, name) for name in scripted._c._method_names()]


# Autograd.


def run_backward(
    outputs: Sequence[Any],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Any],
    *,
    retain_graph: bool,
) -> tuple[Tensor | None, ...]:
    """Does what torch.autograd.grad does with `allow_unused=True`, in about half the time for small graphs.

    Args:
        outputs: scalar tensors, and GradientEdges.
        gradients: one for each; None for that of a scalar, which is 1.
        inputs: leaves, and GradientEdges.
        retain_graph: keep the graph for further passes over it.
    """
    complete = []
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is not None:
            complete.append(gradient)
        elif type(output) is Tensor and output.is_floating_point():
            complete.append(torch.ones_like(output))
        else:  # a subclass, which may change what happens; or torch refuses it
            return torch.autograd.grad(outputs, inputs, gradients, retain_graph, allow_unused=True)
    # Not `torch.autograd.graph._engine_run_backward`, which has every node logged if torch's log asks for that.
    run: Any = torch.autograd.Variable._execution_engine.run_backward
    create_graph, allow_unused = False, True
    found: tuple[Tensor | None, ...] = run(
        tuple(outputs), tuple(complete), retain_graph, create_graph, inputs, allow_unused, accumulate_grad=False
    )
    return found


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Does what `function.apply(*args)` does, in about half the time; not for Tensors of functorch transforms."""
    is_transformed = torch._C._are_functorch_transforms_active()  # raises an error that explains it
    applied: Any = function if is_transformed else super(torch.autograd.Function, function)
    return applied.apply(*args)


# Rendezvous, tensors, Dynamo, profiler.


@contextmanager
def tcp_store_patched(factory: Callable[..., Any]) -> Iterator[None]:
    """Context manager in which torch's rendezvous calls `factory` in place of TCPStore. Not thread-safe."""
    module: Any = sys.modules["torch.distributed.rendezvous"]  # torch.distributed.rendezvous is its function
    original, module.TCPStore = module.TCPStore, factory
    try:
        yield
    finally:
        module.TCPStore = original


def storage_use_count(tensor: Tensor) -> int:
    """Returns how many tensors and storage objects refer to a tensor's memory; this call itself counts as one."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


def neg_view(tensor: Tensor) -> Tensor:
    """Returns the negation of a tensor as a view with its `is_neg` bit set."""
    return torch._neg_view(tensor)


def quantized(integers: Tensor, dtype: torch.dtype, scale: float, zero_point: int) -> Tensor:
    """Returns a per-tensor quantized tensor over the memory of `integers`, with the same shape and strides."""
    empty = torch._empty_affine_quantized([0], scale=scale, zero_point=zero_point, dtype=dtype)
    return _with_memory_of(integers, empty)


def quantized_per_channel(
    integers: Tensor, dtype: torch.dtype, scales: Tensor, zero_points: Tensor, axis: int
) -> Tensor:
    """As `quantized`, with one scale and one zero point for each index of dimension `axis`."""
    empty = torch._empty_per_channel_affine_quantized(
        integers.shape, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype
    )
    return _with_memory_of(integers, empty)


def _with_memory_of(integers: Tensor, empty: Tensor) -> Tensor:
    return empty.set_(integers.untyped_storage(), integers.storage_offset(), integers.shape, integers.stride())


def skip_in_dynamo(functions: Iterable[Callable[..., Any]]) -> None:
    """Makes Dynamo run these functions, and whatever they call, uncompiled."""
    skip = eval_frame._FrameAction.SKIP
    for function in functions:
        code = function.__code__
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


def begin_profiler_event(name: str, tensors: Iterable[Tensor]) -> "torch.futures.Future[None]":
    """Begins an event with these inputs in this thread's profile; setting the returned future ends the event."""
    ended: torch.futures.Future[None] = torch.futures.Future()
    torch.ops.profiler._call_end_callbacks_on_jit_fut(begin_record(name, *tensors), ended)
    return ended


def set_profiler_node_id(node: int) -> None:
    """Sets the worker id that torch's legacy profiler records in its events from now on, if this torch has RPC."""
    extension = getattr(torch._C, "_distributed_rpc", None)
    if (set_id := getattr(extension, "_set_profiler_node_id", None)) is not None:
        set_id(node)


def rpc_pickler_in_use() -> Any:
    """Returns the pickler that torch's `_use_rpc_pickler` has set for this process; None if it is torch's own."""
    api, internal = (sys.modules.get(f"torch.distributed.rpc.{name}") for name in ("api", "internal"))
    pickler = getattr(api, "_default_pickler", None)  # which a torch without RPC does not have
    return None if pickler is getattr(internal, "_internal_rpc_pickler", None) else pickler


def rpc_class_reducers() -> dict[type, Callable[[Any], Any]]:
    """Returns the reducers that the program has registered with torch's own RPC pickler, by class."""
    pickler = getattr(sys.modules.get("torch.distributed.rpc.internal"), "_internal_rpc_pickler", None)
    reducers: dict[type, Callable[[Any], Any]] = {} if pickler is None else pickler._class_reducer_dict
    return reducers
