"""torch's private names that gradwire uses. Other modules use only what torch documents.

What the releases differ in:

    2.11, 2.12   collectives on one tensor are `_allgather_base`, `_reduce_scatter_base` and `alltoall_base`
    2.13         they are `all_gather_single`, `reduce_scatter_single` and `all_to_all_single`
    2.14         torch finds backends by the entry points `torch.distributed.backends`, and registers its own so;
                 a Backend may be a Python class, and new_group hands that of the default group to C++ if that has
                 a device; there is `gather_single`; the options of backends say `enable_reconfigure`; split_group
                 keeps the order of ranks; functions of torch.jit warn with FutureWarning, which Python shows,
                 instead of DeprecationWarning
    2.15         `supports_time_estimate` is `_supports_time_estimate`; split_group asks a group that torch does
                 not know yet for its `_device_types`
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

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
from torch.utils._pytree import tree_map_only

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
    "backend_devices",
    "backend_maker",
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
    "function_of_graph",
    "get_debug_level",
    "holders_of_storage",
    "known_groups",
    "load_script",
    "neg_view",
    "parse_def",
    "parse_legacy_records",
    "profiler_enabled",
    "qualified_name",
    "quantized",
    "quantized_per_channel",
    "register_group_backend",
    "rendezvous_stores_made_by",
    "run_untraced",
    "save_script",
    "script_methods",
    "set_profiler_node_id",
    "tree_map_only",
]

M = TypeVar("M")

HAS_PYTHON_BACKENDS = torch.__version__ >= "2.14"  # which torch compares as versions
"""May a Backend be a Python class?"""


# torch.distributed


def backend_devices(name: str) -> list[str]:
    """The types of the devices that a registered backend takes."""
    return Backend.backend_capability[name.lower()]


def backend_maker(name: str) -> Callable[..., Any] | None:
    """What makes a registered backend; None if there is none of this name, or only torch's C++ knows it."""
    plugin = Backend._plugins.get(name.upper())
    return None if plugin is None else cast(Callable[..., Any], plugin.creator_fn)


def backend_names() -> list[str]:
    """The names of the backends that have been registered by now."""
    return [name.lower() for name in Backend._plugins]


def known_groups() -> Iterable[Any]:
    """The process groups of this process."""
    return distributed_c10d._world.pg_map


def register_group_backend(group: Any, backend: TorchBackend, devices: Iterable[str]) -> None:
    """Has torch's C++ find a Backend in a group: for these devices, and as its default."""
    kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
    for device in devices:
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)


# torch.jit. Its own functions to compile, save and load warn that torch.jit is deprecated, which is for those to
# hear who call it, and not for those who send what they have compiled.


def compile_script(module: torch.nn.Module) -> torch.nn.Module:
    """As torch.jit.script."""
    compiler: Any = torch.jit._script  # its stub lacks the function
    return cast(torch.nn.Module, compiler._script_impl(module))


def function_of_graph(name: str, graph: Any) -> Any:
    """A torch.jit.ScriptFunction that runs a graph of TorchScript."""
    return torch._C._create_function_from_graph(name, graph)


def save_script(scripted: Any) -> bytes:
    """As torch.jit.save, of a function or a module."""
    return cast(bytes, scripted.save_to_buffer(_extra_files={}))


def load_script(data: bytes) -> Any:
    """As torch.jit.load."""
    unit = torch._C.CompilationUnit()
    load: Any = torch._C.import_ir_module_from_buffer  # its stub lacks the last argument
    restore_shapes = False
    return wrap_cpp_module(load(unit, data, None, {}, restore_shapes))  # type: ignore[no-untyped-call]


def script_methods(scripted: torch.jit.ScriptModule) -> list[Any]:
    """The compiled methods of a module."""
    return [getattr(scripted, name) for name in scripted._c._method_names()]


# The rest.


@contextmanager
def rendezvous_stores_made_by(make: Callable[..., Any]) -> Iterator[None]:
    """Has torch's rendezvous call this in place of TCPStore. One thread at a time may do so."""
    module: Any = sys.modules["torch.distributed.rendezvous"]  # torch.distributed.rendezvous is its function
    torchs, module.TCPStore = module.TCPStore, make
    try:
        yield
    finally:
        module.TCPStore = torchs


def holders_of_storage(tensor: Tensor) -> int:
    """How many tensors and storages hold the memory of a tensor; one of them is the storage that is asked here."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


def neg_view(tensor: Tensor) -> Tensor:
    """The negative of a tensor, as a view whose `is_neg` is set."""
    return torch._neg_view(tensor)


def quantized(integers: Tensor, dtype: torch.dtype, scale: float, zero_point: int) -> Tensor:
    """The tensor of a quantized dtype that has these integers, in their memory and with their strides."""
    made = torch._empty_affine_quantized([0], scale=scale, zero_point=zero_point, dtype=dtype)
    return _over(integers, made)


def quantized_per_channel(
    integers: Tensor, dtype: torch.dtype, scales: Tensor, zero_points: Tensor, axis: int
) -> Tensor:
    """As `quantized`, with a scale and a zero point for each index of one dimension, the axis."""
    made = torch._empty_per_channel_affine_quantized(
        integers.shape, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype
    )
    return _over(integers, made)


def _over(integers: Tensor, made: Tensor) -> Tensor:
    return made.set_(integers.untyped_storage(), integers.storage_offset(), integers.shape, integers.stride())


def run_untraced(functions: Iterable[Callable[..., Any]]) -> None:
    """Has Dynamo run these functions, and what they call, as they are."""
    skip = eval_frame._FrameAction.SKIP
    for function in functions:
        code = function.__code__
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


def begin_profiler_event(name: str, tensors: Iterable[Tensor]) -> "torch.futures.Future[None]":
    """Begins an event with these inputs in the profile of this thread; it ends where the future is set."""
    over: torch.futures.Future[None] = torch.futures.Future()
    torch.ops.profiler._call_end_callbacks_on_jit_fut(begin_record(name, *tensors), over)
    return over


def set_profiler_node_id(node: int) -> None:
    """Puts a worker's id into the events of torch's legacy profiler, where it stays until the next."""
    if torch.distributed.rpc.is_available():
        torch._C._distributed_rpc._set_profiler_node_id(node)
