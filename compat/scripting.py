"""torch.jit where it meets calls.

TorchScript knows torch.distributed.rpc's functions by identity and compiles them into calls of torch's own agent,
which is not there. It knows only the references of that agent too; gradwire.rpc.execution.script_functions deals
with those.
"""

import warnings
from typing import Any

import torch

from ..errors import RpcError
from ..rpc.execution.script_functions import check_references
from ..torch_internals import script_methods

__all__ = ["script"]

_compile: Any = torch.jit.script
_CALLS = ("prim::rpc_async", "prim::rpc_remote", "prim::rpc_sync")


def script(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
    """Compiles a function, a class or a module: torch.jit.script.

    Warns if there is a remote call in it, or if it does with references what gradwire cannot. That is no error
    yet: many a module compiles what nobody calls. So does torch.distributed itself when it is imported, which is
    therefore no reason to warn.
    """
    scripted = _compile(obj, optimize, _frames_up + 1, *args, **kwargs)
    if str(getattr(obj, "__module__", "")).startswith("torch.distributed."):
        return scripted
    for graph in _graphs(scripted):
        for kind in _CALLS:
            if graph.findNode(kind) is not None:
                _warn(
                    f"{obj} calls {kind.removeprefix('prim::')} from inside TorchScript, which gradwire does not "
                    "carry (torch.jit is deprecated), so calling it will fail: make the call in Python, and send "
                    "the script function"
                )
        try:
            check_references(graph)
        except RpcError as error:
            _warn(f"calling {obj} will fail: {error}")
    return scripted


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)  # who calls torch.jit.script


def _graphs(scripted: Any) -> list[Any]:
    if isinstance(scripted, torch.jit.ScriptFunction):
        return [scripted.inlined_graph]
    if isinstance(scripted, torch.jit.ScriptModule):
        return [method.inlined_graph for method in script_methods(scripted)]
    return []
