"""RemoteModules in TorchScript.

`torch.jit` compiles the source of methods, and those of a RemoteModule say nothing about types. So it is given a
module in its place whose methods are declared as in the interface, with a body of one statement that calls Python.
"""

import ast
import inspect
import itertools
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.jit.frontend import build_def

from ..rpc.wire.script import reduce_script_module as reduce_any_script_module
from ..torch_internals import (
    FunctionModifiers,
    RecursiveScriptModule,
    ScriptMethodStub,
    compile_script,
    createResolutionCallbackFromClosure,
    parse_def,
)

__all__ = ["check_interface", "compile_module", "reduce_script_module", "scriptable"]

_compiling = threading.Lock()
"""Held while torch.jit compiles, which it cannot do on two threads at once."""


def check_interface(interface: object) -> None:
    """Raises ValueError unless it is an interface of TorchScript that declares `forward`."""
    if not hasattr(interface, "__torch_script_interface__") or not hasattr(interface, "forward"):
        raise ValueError(
            f"module_interface_cls {interface} must be a type object decorated by @torch.jit.interface "
            "with a method forward"
        )


def compile_module(module: nn.Module) -> nn.Module:
    """The module, compiled by `torch.jit.script`."""
    with _compiling:
        return compile_script(module)


def reduce_script_module(module: RecursiveScriptModule) -> tuple[Any, ...]:
    """How a compiled module travels. Raises RuntimeError if there is a RemoteModule in it."""
    if any(hasattr(part, "calls_another_worker") for part in module.modules()):
        raise RuntimeError(
            "Passing a script RemoteModule over RPC is not supported. Send the reference to its module, "
            "get_module_rref() before compilation, and pass that to RemoteModule.init_from_module_rref there"
        )
    return reduce_any_script_module(module)


def scriptable(interface: type, call: Callable[..., torch.futures.Future[Any]]) -> nn.Module:
    """A module with `forward` and `forward_async` that `torch.jit.script` can compile.

    Args:
        interface: declares `forward`.
        call: what both do. It gets all arguments by position.
    """
    declaration = interface.forward  # type: ignore[attr-defined]
    declared = inspect.signature(declaration, eval_str=True)
    under_way: dict[int, torch.futures.Future[Any]] = {}
    numbers = itertools.count()

    # Two steps, because torch.jit runs what it forks on another thread, which is in no autograd context.
    def start(*args: Any) -> int:
        number = next(numbers)
        under_way[number] = call(*args)
        return number

    def finish(number: int) -> Any:
        return under_way.pop(number).wait()

    parameters = [each.replace(default=inspect.Parameter.empty) for each in declared.parameters.values()][1:]
    names = {
        "_start": _declare(start, declared.replace(parameters=parameters, return_annotation=int)),
        "_finish": _declare(
            finish, inspect.signature(finish).replace(return_annotation=declared.return_annotation)
        ),
        "_fork": torch.jit.fork,
    }
    arguments = ", ".join(each.name for each in parameters)

    class ScriptableRemoteModule(_Unsaveable):  # torch.jit compiles a class once, so each module has its own
        forward: Any = _Method.like(declaration, "forward", f"return _finish(_start({arguments}))", names)
        forward_async = _Method.like(
            declaration, "forward_async", f"return _fork(_finish, _start({arguments}))", names
        )

    return ScriptableRemoteModule()


def _declare(function: Callable[..., Any], signature: inspect.Signature) -> Any:
    """Has torch.jit take a function for one of these types, and call it as Python."""
    vars(function)["__signature__"] = signature
    return torch.jit.ignore(function)  # type: ignore[no-untyped-call]


class _Method(ScriptMethodStub):
    """A method for torch.jit to compile."""

    _torchscript_modifier = FunctionModifiers.EXPORT

    @classmethod
    def like(cls, declaration: Any, name: str, statement: str, names: dict[str, Any]) -> "_Method":
        """One with the parameters of `declaration`.

        Args:
            declaration: a function.
            name: the method's.
            statement: its body.
            names: what the names in the body mean.
        """
        parsed = parse_def(declaration)  # type: ignore[no-untyped-call]
        definition = parsed.ast.body[0]
        definition.body = ast.parse(statement).body
        definition.returns = None  # torch.jit finds it out
        outer = createResolutionCallbackFromClosure(declaration)
        tree = build_def(  # type: ignore[no-untyped-call]
            parsed.ctx, definition, None, name, self_name="RecursiveScriptModule"
        )
        return cls(lambda text: names[text] if text in names else outer(text), tree, declaration)

    def __call__(self, *_: Any) -> NoReturn:
        """torch.jit exports only what can be called."""
        raise TypeError("compile it first")


class _Unsaveable(nn.Module):
    """The methods that every compiled RemoteModule has."""

    calls_another_worker: bool

    def __init__(self) -> None:
        super().__init__()
        self.calls_another_worker = True

    @torch.jit.export
    def __getstate__(self) -> None:
        raise RuntimeError("RemoteModule can only be pickled when using RPC")

    @torch.jit.export
    def __setstate__(self, state: torch.Tensor) -> None:
        raise RuntimeError("RemoteModule can only be unpickled when using RPC")
