"""A module that lives on another worker."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from ..rpc.calls import rpc_async, rpc_sync
from ..rpc.contracts.agent import current_agent
from ..rpc.contracts.arguments import check_call
from ..rpc.contracts.devices import Device
from ..rpc.contracts.extension import Extension
from ..rpc.execution.futures import Future
from ..rref.api import remote
from ..rref.rref import RRef
from ..torch_internals import RecursiveScriptModule, tree_map_only
from .placement import Placement
from .script import check_interface, compile_module, reduce_script_module, scriptable

__all__ = ["TRAVELLING_ATTRIBUTES", "ModuleReducers", "RemoteModule", "refuse_method"]

TRAVELLING_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "module_rref",
    "module_interface_cls",
)
"""What of a RemoteModule goes to another worker."""

ModuleReference = RRef[nn.Module]


M = TypeVar("M", bound=nn.Module)

WALKS = ("children", "modules", "named_children", "named_modules")
"""Methods of nn.Module that tell which modules there are, which is true of a RemoteModule too: itself."""


def _refuse_the_rest(module_class: type[M]) -> type[M]:
    """Has all public methods of nn.Module that a subclass does not define itself raise ValueError."""
    for name, member in vars(nn.Module).items():
        if inspect.isfunction(member) and not name.startswith("_") and name not in {*vars(module_class), *WALKS}:
            setattr(module_class, name, refuse_method(name))
    return module_class


def refuse_method(name: str) -> Callable[..., NoReturn]:
    """Returns a method that raises ValueError, which says that RemoteModule has no method of this name."""
    parameters = name in ("parameters", "named_parameters")

    def refuse(self: "RemoteModule", *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG001
        hint = (
            ". Please use ``remote_parameters`` instead."
            if parameters
            else f": the module is on {self.on}/{self.device}. Call a function there that gets get_module_rref()"
        )
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule{hint}")

    refuse.__name__ = name
    return refuse


@_refuse_the_rest
class RemoteModule(nn.Module):
    """An `nn.Module` whose parameters and `forward` are on another worker.

        layer = RemoteModule("worker1/cpu", nn.Linear, (20, 30))
        y = layer(x)                           # runs there; gradients flow back inside autograd.context()
        optimizer = DistributedOptimizer(torch.optim.SGD, layer.remote_parameters(), lr=0.1)

    It can be sent to other workers in calls and results; all copies share the one module, which lives as long
    as any of them. It may be part of another module, and walks over that find a module without parameters, buffers
    and submodules. Methods of `nn.Module` that would change these, or tell of all there are, raise ValueError.

    Attributes:
        on: the name of the worker that has the module.
        device: the module's device there, as text.
        is_device_map_set: do this worker's options have a device map for that one?
        is_scriptable: has it an interface, so that `torch.jit.script` can compile it?
        module_rref: the reference to the module.
        module_interface_cls: the interface, if it has one.
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
        """Has a worker make the module, and does not wait for it.

        Args:
            remote_device: "<worker>/<device>" or "rank:<rank>/<device>"; without a device, the worker's CPU;
                without a worker, this one.
            module_cls: the module's class, or a function that returns a module. The worker must be able to
                import it. What it raises is raised by the first use of the module, and so is a ValueError if
                it returns anything else.
            args: its positional arguments.
            kwargs: its named arguments.
            _module_interface_cls: a class decorated with `torch.jit.interface`; the module is then compiled
                by `torch.jit.script`, and so can this be.

        Raises:
            NotInitializedError, UnknownWorkerError, SerializationError, TypeError, ValueError: nothing was sent.
            RuntimeError: torch knows no such device.
        """
        super().__init__()
        placement = Placement.parse(remote_device)
        agent = current_agent()
        owner = agent.info if placement.worker is None else agent.worker(placement.worker)
        if _module_interface_cls is not None:
            check_interface(_module_interface_cls)
        device, scripted = str(placement.device), _module_interface_cls is not None
        creation = (*check_call(module_cls, args, kwargs), device, scripted)
        self._attach(remote(owner, _create, creation), device, _module_interface_cls)

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: ModuleReference, _module_interface_cls: type | None = None
    ) -> "RemoteModule":
        """A RemoteModule over a module that exists already.

        Args:
            remote_device: as in the constructor. Only its device counts, which must be the module's; the
                worker is the reference's owner.
            module_rref: a reference to the module.
            _module_interface_cls: as in the constructor; the module must implement it.

        Raises:
            NotInitializedError, TypeError, ValueError
        """
        current_agent()
        if not isinstance(module_rref, RRef):
            raise TypeError(f"module_rref is of type {type(module_rref).__name__}: give an RRef to a module")
        if _module_interface_cls is not None:
            check_interface(_module_interface_cls)
        module = _empty()
        module._attach(module_rref, str(Placement.parse(remote_device).device), _module_interface_cls)
        return module

    def _attach(self, module_rref: ModuleReference, device: str, interface: type | None) -> None:
        self.on = module_rref.owner_name()
        self.device = device
        self.is_device_map_set = bool(_device_map(module_rref))
        self.is_scriptable = interface is not None
        self.module_rref = module_rref
        self.module_interface_cls = interface

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module on its worker, where its hooks run, and waits for what it returns.

        If the module is not on the CPU, tensors in the arguments are moved to its device. Tensors in what it
        returns are moved to the CPU, unless a device map of this worker's options leads back from there.

        Raises:
            Exception: what making the module or calling it raised.
            WorkerLostError, RpcTimeoutError, SerializationError
        """
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Calls the module on its worker and returns a future of what it returns."""
        return _forward_async(self.module_rref, self.device, *args, **kwargs)

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the module's parameters, as `DistributedOptimizer` takes them.

        Args:
            recurse: also those of its submodules.
        """
        parameters: list[RRef[nn.Parameter]] = self._on_owner(_parameters, recurse)
        return parameters

    def get_module_rref(self) -> ModuleReference:
        """The reference to the module."""
        return self.module_rref

    def train(self, mode: bool = True) -> "RemoteModule":
        """Puts the module, for all who share it, into training mode, or evaluation mode if not `mode`."""
        if not isinstance(mode, bool):
            raise ValueError("training mode is expected to be boolean")
        self._on_owner(_train, mode)
        self.training = mode
        return self

    def eval(self) -> "RemoteModule":
        """Puts the module, for all who share it, into evaluation mode."""
        return self.train(mode=False)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """None if not `recurse`: it has none of its own. Else raises ValueError: see `remote_parameters`."""
        return self._own("parameters", recurse)

    def named_parameters(
        self,
        prefix: str = "",  # noqa: ARG002
        recurse: bool = True,
        remove_duplicate: bool = True,  # noqa: ARG002
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As `parameters`."""
        return self._own("named_parameters", recurse)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """None if not `recurse`: it has none of its own. Else raises ValueError."""
        return self._own("buffers", recurse)

    def named_buffers(
        self,
        prefix: str = "",  # noqa: ARG002
        recurse: bool = True,
        remove_duplicate: bool = True,  # noqa: ARG002
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As `buffers`."""
        return self._own("named_buffers", recurse)

    def _own(self, name: str, recurse: bool) -> Iterator[Any]:
        if recurse:
            refuse_method(name)(self)
        return iter(())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "RemoteModule":  # noqa: ARG002
        """What `to`, `cuda`, `float` and so on of a module do to each part: here there is nothing to move."""
        return self

    def _on_owner(self, function: Callable[..., Any], *args: Any) -> Any:
        return rpc_sync(self.module_rref.owner(), function, (self.module_rref, *args))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.on}/{self.device}, {self.module_rref!r})"

    def __getstate__(self) -> NoReturn:
        name = type(self).__name__
        hint = (
            "" if type(self) is RemoteModule else f", and its subclass {name} not at all: send get_module_rref()"
        )
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC" + hint
        )

    def __prepare_scriptable__(self) -> nn.Module:
        """What `torch.jit.script` compiles in its place. Raises RuntimeError if there is no interface."""
        if self.module_interface_cls is None:
            raise RuntimeError(
                f"{self} has no interface for torch.jit.script: construct it with _module_interface_cls"
            )
        return scriptable(self.module_interface_cls, self.forward_async)


def _forward_async(module_rref: ModuleReference, device: str, *args: Any, **kwargs: Any) -> Future[Any]:
    if device == "cpu":  # a proxy names the module by its id, which costs no fork of the reference
        future: Future[Any] = module_rref.rpc_async().__call__(*args, **kwargs)
        return future
    to_cpu = torch.device(device) not in _device_map(module_rref).values()
    return rpc_async(module_rref.owner(), _call_on_device, (module_rref, device, to_cpu, args, kwargs))


def _forward(module_rref: ModuleReference, device: str, *args: Any, **kwargs: Any) -> Any:
    return _forward_async(module_rref, device, *args, **kwargs).wait()


def _device_map(module_rref: ModuleReference) -> Mapping[Device, Device]:
    """Which devices of this worker become which of the module's worker in calls."""
    return current_agent().options.device_maps.get(module_rref.owner_name(), {})


# The next four run on the module's worker.


def _create(
    module_cls: Callable[..., nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
    scripted: bool,
) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    module.to(device)
    return compile_module(module) if scripted else module


def _call_on_device(
    module_rref: ModuleReference, device: str, to_cpu: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (tuple(args), dict(kwargs)))
    result = module_rref.local_value()(*args, **kwargs)
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, result) if to_cpu else result


def _parameters(module_rref: ModuleReference, recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _train(module_rref: ModuleReference, mode: bool) -> None:
    module_rref.local_value().train(mode)


def _empty() -> RemoteModule:
    """Returns one that knows of no module yet."""
    module = RemoteModule.__new__(RemoteModule)
    nn.Module.__init__(module)
    return module


def _reduce(module: RemoteModule) -> tuple[Any, ...]:
    return _receive, (module.training, *(getattr(module, name) for name in TRAVELLING_ATTRIBUTES))


def _receive(training: bool, *values: Any) -> RemoteModule:
    module = _empty()
    vars(module).update(zip(TRAVELLING_ATTRIBUTES, values, strict=True), training=training)
    module.is_device_map_set = bool(_device_map(module.module_rref))  # of this worker
    # In torch each instance has its own forward and forward_async, and programs find them in its __dict__.
    vars(module).update(
        forward_async=partial(_forward_async, module.module_rref, module.device),
        forward=partial(_forward, module.module_rref, module.device),
    )
    return module


class ModuleReducers(Extension):
    """Has modules travel that pickle refuses."""

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        """RemoteModules, and modules compiled by torch.jit."""
        return {RemoteModule: _reduce, RecursiveScriptModule: reduce_script_module}
