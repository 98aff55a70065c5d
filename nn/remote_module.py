"""RemoteModule: an nn.Module whose parameters and computation are on another worker.

`torch.jit.script` compiles the source of methods, and RemoteModule's methods have no concrete types. So torch.jit
gets a substitute module instead. Its methods have the signature that the interface declares, and a body of one
statement that calls back into Python.
"""

import ast
import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.jit.frontend import build_def

from ..rpc.calls.sending import note_future
from ..rpc.contracts.agent import current_agent
from ..rpc.contracts.devices import Device
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.messages import check_call, check_received
from ..rpc.contracts.policy import MethodGuard, expose, guarded_by, message_value
from ..rpc.execution.futures import Future
from ..rref.rref import RRef, call_needing, remote
from ..torch_internals import (
    FunctionModifiers,
    RecursiveScriptModule,
    ScriptMethodStub,
    compile_script,
    createResolutionCallbackFromClosure,
    load_script,
    parse_def,
    save_script,
    tree_map_only,
)

__all__ = [
    "SENT_ATTRIBUTES",
    "ModuleReducers",
    "RemoteModule",
    "refuse_method",
]

_compile_lock = threading.Lock()
"""Held while torch.jit compiles, which is not thread-safe."""

M = TypeVar("M", bound=nn.Module)

TRAVERSAL_METHODS = ("children", "modules", "named_children", "named_modules")
"""Methods of nn.Module that list submodules. They work on a RemoteModule, which has none but itself."""


def _check_interface(interface: object) -> None:
    """Raises ValueError unless `interface` is a TorchScript interface that declares `forward`."""
    if not hasattr(interface, "__torch_script_interface__") or not hasattr(interface, "forward"):
        raise ValueError(
            f"module_interface_cls {interface} must be a type object decorated by @torch.jit.interface "
            "with a method forward"
        )


def _compile_module(module: nn.Module) -> nn.Module:
    """Compiles a module as `torch.jit.script` does."""
    with _compile_lock:
        return compile_script(module)


def _reduce_script_module(module: RecursiveScriptModule) -> tuple[Any, ...]:
    """Reduces a compiled module for pickling. Raises RuntimeError if it contains a RemoteModule."""
    if any(hasattr(part, "calls_another_worker") for part in module.modules()):
        raise RuntimeError(
            "Passing a script RemoteModule over RPC is not supported. Send the reference to its module, "
            "get_module_rref() before compilation, and pass that to RemoteModule.init_from_module_rref there"
        )
    return load_script, (save_script(module),)


def _scriptable_module(interface: type, call: Callable[..., torch.futures.Future[Any]]) -> nn.Module:
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


SENT_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "module_rref",
    "module_interface_cls",
)
"""The attributes that are sent when a RemoteModule is passed to another worker."""

ModuleReference = RRef[nn.Module]


def _refuse_inherited_methods(module_class: type[M]) -> type[M]:
    """Class decorator: public methods inherited from nn.Module raise ValueError, except TRAVERSAL_METHODS."""
    supported = {*vars(module_class), *TRAVERSAL_METHODS}
    for name, member in vars(nn.Module).items():
        if inspect.isfunction(member) and not name.startswith("_") and name not in supported:
            setattr(module_class, name, refuse_method(name))
    return module_class


def refuse_method(name: str) -> Callable[..., NoReturn]:
    """Returns a method that raises ValueError: RemoteModule does not support the method of this name."""
    has_substitute = name in ("parameters", "named_parameters")

    def refuse(self: "RemoteModule", *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG001
        hint = (
            ". Please use ``remote_parameters`` instead."
            if has_substitute
            else f": the module is on {self.on}/{self.device}. Call a function there that gets get_module_rref()"
        )
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule{hint}")

    refuse.__name__ = name
    return refuse


@_refuse_inherited_methods
class RemoteModule(nn.Module):
    """An `nn.Module` whose parameters and `forward` are on another worker.

        layer = RemoteModule("worker1/cpu", nn.Linear, (20, 30))
        y = layer(x)                           # runs there; gradients flow back inside autograd.context()
        optimizer = DistributedOptimizer(torch.optim.SGD, layer.remote_parameters(), lr=0.1)

    It can be sent to other workers in calls and results. All copies refer to the same module, which is released
    with the last of them. It can be a submodule of another module, where it appears as a module without
    parameters, buffers and submodules. Methods of `nn.Module` that would return or change those raise ValueError.

    Attributes:
        on: the name of the worker that owns the module.
        device: the module's device on that worker, such as "cuda:0".
        is_device_map_set: whether this worker's options have a device map for that worker.
        is_scriptable: whether it has an interface, so that `torch.jit.script` can compile it.
        module_rref: the reference to the module.
        module_interface_cls: the interface; None if it has none.
    """

    on: str
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    module_rref: ModuleReference
    module_interface_cls: type | None

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: type | None = None,
    ) -> None:
        """Starts making the module on its worker, and does not wait for it.

        Args:
            remote_device: "<worker>/<device>" or "rank:<rank>/<device>". The device defaults to the worker's CPU,
                the worker to this one.
            module_cls: the module's class, or a function that returns a module; it must be importable on the
                worker. Its exceptions, and a ValueError if it returns anything else, are raised by the first use
                of the module.
            args: its positional arguments.
            kwargs: its keyword arguments.
            _module_interface_cls: a class decorated with `torch.jit.interface`. With it, the module is compiled by
                `torch.jit.script`, and so can this RemoteModule be.

        Raises:
            NotInitializedError: this worker has not called init_rpc.
            UnknownWorkerError: `remote_device` names no worker of the group.
            SerializationError: `module_cls` or an argument cannot be sent.
            TypeError, ValueError: an argument is invalid.
            RuntimeError: torch knows no such device.
        """
        super().__init__()
        worker, device = _parse_placement(remote_device)
        agent = current_agent()
        owner = agent.info if worker is None else agent.worker(worker)
        if _module_interface_cls is not None:
            _check_interface(_module_interface_cls)
        call = (*check_call(module_cls, args, kwargs), device, _module_interface_cls is not None)
        self._attach(remote(owner, _create_on_owner, call), device, _module_interface_cls)

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: ModuleReference, _module_interface_cls: type | None = None
    ) -> "RemoteModule":
        """Returns a RemoteModule for a module that exists already.

        Args:
            remote_device: as in the constructor. Its device must be the module's; its worker is ignored, because
                the reference has the owner.
            module_rref: a reference to the module.
            _module_interface_cls: as in the constructor; the module must implement it.

        Raises:
            NotInitializedError: this worker has not called init_rpc.
            TypeError, ValueError: an argument is invalid.
        """
        current_agent()
        if not isinstance(module_rref, RRef):
            raise TypeError(f"module_rref is of type {type(module_rref).__name__}: give an RRef to a module")
        if _module_interface_cls is not None:
            _check_interface(_module_interface_cls)
        module = _empty()
        _, device = _parse_placement(remote_device)
        module._attach(module_rref, device, _module_interface_cls)
        return module

    def _attach(self, module_rref: ModuleReference, device: str, interface: type | None) -> None:
        self.on = module_rref.owner_name()
        self.device = device
        self.is_device_map_set = bool(_device_map(module_rref))
        self.is_scriptable = interface is not None
        self.module_rref = module_rref
        self.module_interface_cls = interface

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, with its hooks, on its worker and returns the result.

        If the module is not on the CPU, tensors in the arguments are moved to its device, and tensors in the
        result to the CPU, unless a device map of this worker's options maps a local device to the module's.

        Raises:
            Exception: what making or calling the module raised.
            WorkerLostError: the worker is lost.
            RpcTimeoutError: the call did not finish within the RPC timeout.
            SerializationError: an argument or the result cannot be sent.
        """
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts a call as `forward` does, and returns a future of the result."""
        return _forward_async(self.module_rref, self.device, *args, **kwargs)

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Returns references to the module's parameters, for example for `DistributedOptimizer`.

        Args:
            recurse: whether to include the parameters of its submodules.
        """
        parameters: list[RRef[nn.Parameter]] = self._call_owner(_parameters_on_owner, recurse)
        return parameters

    def get_module_rref(self) -> ModuleReference:
        """Returns the reference to the module."""
        return self.module_rref

    def train(self, mode: bool = True) -> "RemoteModule":
        """Sets the module, which all copies share, to training mode, or to evaluation mode if `mode` is False."""
        if not isinstance(mode, bool):
            raise ValueError("training mode is expected to be boolean")
        self._call_owner(_train_on_owner, mode)
        self.training = mode
        return self

    def eval(self) -> "RemoteModule":
        """Sets the module, which all copies share, to evaluation mode."""
        return self.train(mode=False)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Returns an empty iterator if `recurse` is False; else raises ValueError: use `remote_parameters`."""
        return self._empty_or_refuse("parameters", recurse)

    def named_parameters(
        self,
        prefix: str = "",  # noqa: ARG002
        recurse: bool = True,
        remove_duplicate: bool = True,  # noqa: ARG002
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Returns an empty iterator if `recurse` is False; else raises ValueError: use `remote_parameters`."""
        return self._empty_or_refuse("named_parameters", recurse)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Returns an empty iterator if `recurse` is False; else raises ValueError."""
        return self._empty_or_refuse("buffers", recurse)

    def named_buffers(
        self,
        prefix: str = "",  # noqa: ARG002
        recurse: bool = True,
        remove_duplicate: bool = True,  # noqa: ARG002
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns an empty iterator if `recurse` is False; else raises ValueError."""
        return self._empty_or_refuse("named_buffers", recurse)

    def _empty_or_refuse(self, name: str, recurse: bool) -> Iterator[Any]:
        # A RemoteModule has no parameters of its own, but must not suggest that the remote module has none either.
        if recurse:
            refuse_method(name)(self)
        return iter(())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "RemoteModule":  # noqa: ARG002
        """Does nothing: a model's `to`, `cuda`, `float` and so on leave its RemoteModules as they are."""
        return self

    def _call_owner(self, function: Callable[..., Any], *args: Any) -> Any:
        return call_needing([self.module_rref], function, (self.module_rref, *args)).wait()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.on}/{self.device}, {self.module_rref!r})"

    def __getstate__(self) -> NoReturn:
        name = type(self).__name__
        hint = ""
        if type(self) is not RemoteModule:
            hint = f", and its subclass {name} not at all: send get_module_rref()"
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC" + hint
        )

    def __prepare_scriptable__(self) -> nn.Module:
        """Returns the module that `torch.jit.script` compiles instead. Raises RuntimeError if none is possible."""
        if self.module_interface_cls is None:
            raise RuntimeError(
                f"{self} has no interface for torch.jit.script: construct it with _module_interface_cls"
            )
        return _scriptable_module(self.module_interface_cls, self.forward_async)


def _parse_placement(text: str) -> tuple[str | int | None, str]:
    """Returns the worker of a placement, by name or rank, None for this one; and the device in its process.

    It is "<worker>/<device>", "rank:<rank>/<device>", "<device>" on this worker, or "<worker>" on its CPU.

    Raises:
        TypeError: `text` is not a string.
        ValueError: `text` has none of these forms.
        RuntimeError: torch knows no such device.
    """
    if not isinstance(text, str):
        raise TypeError(f"remote_device is {text!r}: give a string such as 'worker1/cuda:0'")
    worker, slash, device = text.partition("/")
    if not slash:
        with contextlib.suppress(RuntimeError):
            return None, str(torch.device(text))
        device = "cpu"
    kind, colon, rank = worker.partition(":")
    if not worker or "/" in device or (kind == "rank" and colon and not rank.isdecimal()):
        raise ValueError(
            f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>' "
            "or 'rank:<rank>/<device>' or '<device>'"
        )
    return int(rank) if kind == "rank" and colon else worker, str(torch.device(device))


def _forward_async(module_rref: ModuleReference, device: str, *args: Any, **kwargs: Any) -> Future[Any]:
    if device == "cpu":  # a proxy sends the id of the reference, not a fork of it
        future: Future[Any] = module_rref.rpc_async().__call__(*args, **kwargs)
        return future
    to_cpu = torch.device(device) not in _device_map(module_rref).values()
    future = call_needing([module_rref], _call_on_owner, (module_rref, device, to_cpu, args, kwargs))
    note_future(future)
    return future


def _forward(module_rref: ModuleReference, device: str, *args: Any, **kwargs: Any) -> Any:
    return _forward_async(module_rref, device, *args, **kwargs).wait()


def _device_map(module_rref: ModuleReference) -> Mapping[Device, Device]:
    """Returns the device map of calls to the module's worker, from local to remote devices."""
    return current_agent().options.device_maps.get(module_rref.owner_name(), {})


# The next functions run on the worker that owns the module; those that end in `_guarded` do so if its policy does
# not accept anything.


@expose
def _create_on_owner(
    module_cls: Callable[..., nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
    scripted: bool,
) -> nn.Module:
    check_received(args)
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    module.to(device)
    return _compile_module(module) if scripted else module


def _call_guarded(guard: MethodGuard, module_rref: ModuleReference, *args: Any) -> Any:
    guard(module_rref._value_here(), "__call__")
    return _call_on_owner(module_rref, *args)


def _parameters_guarded(guard: MethodGuard, module_rref: ModuleReference, recurse: bool) -> Any:
    guard(module_rref._value_here(), "parameters")
    return _parameters_on_owner(module_rref, recurse)


def _train_guarded(guard: MethodGuard, module_rref: ModuleReference, mode: bool) -> None:
    guard(module_rref._value_here(), "train")
    _train_on_owner(module_rref, mode)


@guarded_by(_call_guarded)
def _call_on_owner(
    module_rref: ModuleReference, device: str, to_cpu: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    check_received(args)
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (tuple(args), dict(kwargs)))
    result = module_rref._value_here()(*args, **kwargs)
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, result) if to_cpu else result


@guarded_by(_parameters_guarded)
def _parameters_on_owner(module_rref: ModuleReference, recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in module_rref._value_here().parameters(recurse)]


@guarded_by(_train_guarded)
def _train_on_owner(module_rref: ModuleReference, mode: bool) -> None:
    module_rref._value_here().train(mode)


def _empty() -> RemoteModule:
    """Returns a RemoteModule to which no module is attached yet."""
    module = RemoteModule.__new__(RemoteModule)
    nn.Module.__init__(module)
    return module


def _reduce(module: RemoteModule) -> tuple[Any, ...]:
    """Reduces a RemoteModule for pickling, as `__reduce__` would."""
    return _receive, (module.training, *(getattr(module, name) for name in SENT_ATTRIBUTES))


@message_value
def _receive(training: bool, *values: Any) -> RemoteModule:
    module = _empty()
    vars(module).update(zip(SENT_ATTRIBUTES, values, strict=True), training=training)
    if not isinstance(module.module_rref, RRef):
        raise TypeError(f"malformed RemoteModule: its reference is a {type(module.module_rref).__name__}")
    module.is_device_map_set = bool(_device_map(module.module_rref))  # in the options of this worker
    # In torch, a received RemoteModule has forward and forward_async in its __dict__; programs look for them
    # there.
    vars(module).update(
        forward_async=partial(_forward_async, module.module_rref, module.device),
        forward=partial(_forward, module.module_rref, module.device),
    )
    return module


class ModuleReducers(Extension):
    """Pickles RemoteModules and compiled modules in messages; they cannot be pickled otherwise."""

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        """Returns the reducers of RemoteModule and of modules compiled by torch.jit."""
        return {RemoteModule: _reduce, RecursiveScriptModule: _reduce_script_module}
