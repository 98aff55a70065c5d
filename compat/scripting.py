"""Replaces torch.jit.script, to warn about RPC inside TorchScript.

TorchScript recognizes the functions of torch.distributed.rpc by identity, and compiles them into calls of torch's
own agent, which does not run under gradwire. It recognizes only torch's RRefs, too:
gradwire.rpc.calls.handler converts them.
"""

import warnings
from typing import Any

import torch

from ..errors import RpcError
from ..rpc.calls.handler import check_references
from ..torch_internals import script_methods

__all__ = ["script"]

_compile: Any = torch.jit.script
_CALLS = ("prim::rpc_async", "prim::rpc_remote", "prim::rpc_sync")


def script(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
    """Compiles a function, a class or a module as torch.jit.script does.

    Warns if it contains a remote call, or an operation on an RRef that gradwire does not support. Only calling it
    would fail, and many compiled functions are never called. torch.distributed compiles such functions when it is
    imported; these do not cause a warning.
    """
    scripted = _compile(obj, optimize, _frames_up + 1, *args, **kwargs)
    if str(getattr(obj, "__module__", "")).startswith("torch.distributed."):
        return scripted
    for graph in _graphs(scripted):
        for kind in _CALLS:
            if graph.findNode(kind) is not None:
                _warn(
                    f"{obj} calls {kind.removeprefix('prim::')} from inside TorchScript, which gradwire "
                    "does not support (torch.jit is deprecated), so calling it will fail: make the remote call in "
                    "Python, and pass the script function to it"
                )
        try:
            check_references(graph)
        except RpcError as error:
            _warn(f"calling {obj} will fail: {error}")
    return scripted


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)  # the caller of torch.jit.script


def _graphs(scripted: Any) -> list[Any]:
    if isinstance(scripted, torch.jit.ScriptFunction):
        return [scripted.inlined_graph]
    if isinstance(scripted, torch.jit.ScriptModule):
        return [method.inlined_graph for method in script_methods(scripted)]
    return []
