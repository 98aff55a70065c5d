"""TorchScript support of RemoteModule.

`torch.jit.script` compiles the source of methods, and RemoteModule's methods have no concrete types. So torch.jit
gets a substitute module instead. Its methods have the signature that the interface declares, and a body of one
statement that calls back into Python.
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

from ..torch_internals import (
    FunctionModifiers,
    RecursiveScriptModule,
    ScriptMethodStub,
    compile_script,
    createResolutionCallbackFromClosure,
    load_script,
    parse_def,
    save_script,
)

__all__ = ["check_interface", "compile_module", "reduce_script_module", "scriptable_module"]

_compile_lock = threading.Lock()
"""Held while torch.jit compiles, which is not thread-safe."""


def check_interface(interface: object) -> None:
    """Raises ValueError unless `interface` is a TorchScript interface that declares `forward`."""
    if not hasattr(interface, "__torch_script_interface__") or not hasattr(interface, "forward"):
        raise ValueError(
            f"module_interface_cls {interface} must be a type object decorated by @torch.jit.interface "
            "with a method forward"
        )


def compile_module(module: nn.Module) -> nn.Module:
    """Compiles a module as `torch.jit.script` does."""
    with _compile_lock:
        return compile_script(module)


def reduce_script_module(module: RecursiveScriptModule) -> tuple[Any, ...]:
    """Reduces a compiled module for pickling. Raises RuntimeError if it contains a RemoteModule."""
    if any(hasattr(part, "calls_another_worker") for part in module.modules()):
        raise RuntimeError(
            "Passing a script RemoteModule over RPC is not supported. Send the reference to its module, "
            "get_module_rref() before compilation, and pass that to RemoteModule.init_from_module_rref there"
        )
    return load_script, (save_script(module),)


def scriptable_module(interface: type, call: Callable[..., torch.futures.Future[Any]]) -> nn.Module:
    """Returns a module with `forward` and `forward_async` that `torch.jit.script` can compile.

    The `forward` of the interface declares the types; `call` starts the call that both methods make.
    """
    declaration = interface.forward  # type: ignore[attr-defined]
    signature = inspect.signature(declaration, eval_str=True)
    in_flight: dict[int, torch.futures.Future[Any]] = {}
    call_ids = itertools.count()

    # In two steps, because torch.jit.fork runs its function on another thread, which is in no autograd context.
    def start(*args: Any) -> int:
        call_id = next(call_ids)
        in_flight[call_id] = call(*args)
        return call_id

    def finish(call_id: int) -> Any:
        return in_flight.pop(call_id).wait()

    parameters = [each.replace(default=inspect.Parameter.empty) for each in signature.parameters.values()][1:]
    names = {
        "_start": _call_as_python(start, signature.replace(parameters=parameters, return_annotation=int)),
        "_finish": _call_as_python(
            finish, inspect.signature(finish).replace(return_annotation=signature.return_annotation)
        ),
        "_fork": torch.jit.fork,
    }
    arguments = ", ".join(each.name for each in parameters)

    class ScriptableRemoteModule(_NotPicklable):  # torch.jit compiles a class once, so each module needs its own
        forward: Any = _Method.from_declaration(
            declaration, "forward", f"return _finish(_start({arguments}))", names
        )
        forward_async = _Method.from_declaration(
            declaration, "forward_async", f"return _fork(_finish, _start({arguments}))", names
        )

    return ScriptableRemoteModule()


def _call_as_python(function: Callable[..., Any], signature: inspect.Signature) -> Any:
    """Makes compiled code call `function` in Python, with this signature, instead of compiling it."""
    vars(function)["__signature__"] = signature
    return torch.jit.ignore(function)  # type: ignore[no-untyped-call]


class _Method(ScriptMethodStub):
    """A method for torch.jit to compile, made from a syntax tree instead of source."""

    _torchscript_modifier = FunctionModifiers.EXPORT

    @classmethod
    def from_declaration(cls, declaration: Any, name: str, statement: str, names: dict[str, Any]) -> "_Method":
        """Makes a method with the parameters of a function; its body is a statement with these names."""
        parsed = parse_def(declaration)  # type: ignore[no-untyped-call]
        definition = parsed.ast.body[0]
        definition.body = ast.parse(statement).body
        definition.returns = None  # torch.jit infers it
        outer = createResolutionCallbackFromClosure(declaration)
        tree = build_def(  # type: ignore[no-untyped-call]
            parsed.ctx, definition, None, name, self_name="RecursiveScriptModule"
        )
        return cls(lambda text: names[text] if text in names else outer(text), tree, declaration)

    def __call__(self, *_: Any) -> NoReturn:
        """Exists because torch.jit only exports callables; the module must be compiled before it is called."""
        raise TypeError("this module can only be called after compiling it with torch.jit.script")


class _NotPicklable(nn.Module):
    """Base of all compiled RemoteModules: marks them, and refuses to be pickled."""

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
