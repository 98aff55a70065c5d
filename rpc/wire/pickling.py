"""Python objects as pickle, with tensors and remote references taken out.

Both travel beside the pickle, by index: tensors so that their bytes are copied as seldom as possible,
references so that the receiver can count them even where the pickle itself cannot be read.
"""

import copyreg
import io
import pickle
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, final

import torch
from torch import nn

from ...errors import SerializationError
from ...torch_internals import AnyFuture, RecursiveScriptModule
from ..contracts.devices import NO_DEVICES, DeviceMap
from ..contracts.messages import Buffer
from .script import reduce_script_function, reduce_script_module
from .tensors import check_sendable

__all__ = ["Packed", "Packer"]

PROTOCOL = 5
"""Of pickle."""

_arriving = threading.local()


class Packed:
    """A pickled object: the body, and what was taken out of it."""

    __slots__ = ("body", "leaves", "references", "tensors")

    def __init__(self) -> None:
        self.body = b""
        self.tensors: list[torch.Tensor] = []
        self.references: list[Any] = []
        self.leaves: AbstractSet[int] = frozenset()
        """The tensors, by index, that arrive as leaves even where gradients could flow back through them."""


@final
class Packer:
    """Pickles the values of messages. Functions and classes go by name, as in pickle itself."""

    def __init__(self) -> None:
        self._reference_types: list[type] = []
        self._reducers: dict[type, Callable[[Any], Any]] = {
            torch.UntypedStorage: _reduce_storage,
            torch.jit.ScriptFunction: reduce_script_function,
            RecursiveScriptModule: reduce_script_module,
        }
        self._detaching: list[Callable[[object], bool]] = []

    def register_reference_type(self, reference_type: type) -> None:
        """Has instances of exactly this class travel as references."""
        self._reference_types.append(reference_type)

    def register_reducers(self, reducers: Mapping[type, Callable[[Any], Any]]) -> None:
        """Has instances of exactly these classes pickled by functions, as in `copyreg`."""
        self._reducers.update(reducers)

    def detach_parameters_if(self, predicate: Callable[[object], bool]) -> None:
        """Has every Parameter of a value that satisfies this arrive as a leaf, as those of modules always do."""
        self._detaching.append(predicate)

    def pack(self, value: object, what: str | Sequence[str], device_map: DeviceMap = NO_DEVICES) -> Packed:
        """Pickles a value.

        Args:
            value: anything that pickles.
            what: what to call it in errors; for a tuple, what to call each of its items.
            device_map: where tensors on which devices go; those that are not on the CPU must be in it.

        Raises:
            SerializationError: some part does not pickle; `path` says which.
        """
        try:
            return self._pack(value, device_map)
        except Exception as error:
            path, problem = self._find_culprit(value, what, error, device_map)
            raise SerializationError(path, problem) from error

    def unpack(self, body: Buffer, tensors: Sequence[torch.Tensor], references: Sequence[Any]) -> Any:
        """The value of a body. Raises whatever unpickling it raises."""
        before = getattr(_arriving, "parts", None)
        _arriving.parts = (tensors, references)
        try:
            return pickle.loads(body)
        finally:
            _arriving.parts = before

    def _pack(self, value: object, device_map: DeviceMap) -> Packed:
        packed = Packed()
        parameters: dict[int, int] = {}  # by index, the id
        owned: set[int] = set()  # ids of Parameters of modules and optimizers

        def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
            check_sendable(tensor, device_map)
            packed.tensors.append(tensor)
            return _tensor, (len(packed.tensors) - 1,)

        def reduce_parameter(parameter: nn.Parameter) -> tuple[Any, ...]:
            check_sendable(parameter, device_map)
            parameters[len(packed.tensors)] = id(parameter)
            packed.tensors.append(parameter)
            reduced = _parameter, (len(packed.tensors) - 1, parameter.requires_grad)
            attributes = vars(parameter)
            return (*reduced, attributes, None, None, _set_attributes) if attributes else reduced

        def reduce_owner(owner: nn.Module | torch.optim.Optimizer) -> Any:
            owned.update(map(id, _parameters_of(owner)))
            return owner.__reduce_ex__(PROTOCOL)

        def reduce_reference(reference: object) -> tuple[Any, ...]:
            packed.references.append(reference)
            return _reference, (len(packed.references) - 1,)

        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, protocol=PROTOCOL)
        table = _DispatchTable(copyreg.dispatch_table | self._reducers)
        table.reduce_owner = reduce_owner
        table[torch.Tensor] = reduce_tensor
        table[nn.Parameter] = reduce_parameter
        for reference_type in self._reference_types:
            table[reference_type] = reduce_reference
        pickler.dispatch_table = table
        pickler.dump(value)
        packed.body = stream.getvalue()
        if parameters and any(detaches(value) for detaches in self._detaching):
            packed.leaves = parameters.keys()
        elif owned:
            packed.leaves = {index for index, identity in parameters.items() if identity in owned}
        return packed

    def _find_culprit(
        self, value: object, what: str | Sequence[str], error: Exception, device_map: DeviceMap
    ) -> tuple[str, str]:
        """The path of the innermost part that does not pickle, and why not."""
        if isinstance(what, str):
            path = what
        elif isinstance(value, tuple) and len(value) == len(what):
            for part, name in zip(value, what, strict=True):
                if problem := self._problem(part, device_map):
                    return self._find_culprit(part, name, problem, device_map)
            path = " and ".join(what)
        for _ in range(32):
            for name, part in _parts(value):
                if problem := self._problem(part, device_map):
                    path, value, error = path + name, part, problem
                    break
            else:
                break
        return path, _explain(value, error)

    def _problem(self, value: object, device_map: DeviceMap) -> Exception | None:
        try:
            self._pack(value, device_map)
        except Exception as error:
            return error
        return None


@final
class _DispatchTable(dict[type, Callable[[Any], Any]]):
    """How instances of exactly these classes are pickled; and those of all subclasses of what owns Parameters."""

    __slots__ = ("reduce_owner",)

    reduce_owner: Callable[[Any], Any]

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, nn.Module | torch.optim.Optimizer):
            return self.reduce_owner
        raise KeyError(kind)


def _parameters_of(owner: nn.Module | torch.optim.Optimizer) -> Iterable[Any]:
    """Its own ones: submodules are pickled by themselves."""
    if isinstance(owner, nn.Module):
        parameters: Mapping[str, Any] = vars(owner).get("_parameters", {})  # not there before nn.Module.__init__
        return parameters.values()
    return (parameter for group in owner.param_groups for parameter in group["params"])


def _tensor(index: int) -> torch.Tensor:
    tensors: Sequence[torch.Tensor] = _arriving.parts[0]
    return tensors[index]


def _parameter(index: int, requires_grad: bool) -> torch.Tensor:
    """A Parameter again; but a tensor that leads back to its sender stays what gradients flow through."""
    tensor = _tensor(index)
    if tensor.grad_fn is not None:
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad)


def _set_attributes(parameter: torch.Tensor, attributes: Mapping[str, Any]) -> None:
    vars(parameter).update(attributes)


def _reduce_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    return torch.Tensor.untyped_storage, (torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage),)


def _reference(index: int) -> Any:
    return _arriving.parts[1][index]


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
        yield from ((f" key {key!r}", key) for key in value)
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((f" item {item!r}", item) for item in value)
    elif not isinstance(value, type) and hasattr(value, "__dict__") and not callable(value):
        yield from ((f".{name}", item) for name, item in vars(value).items())


_UNSENDABLE: tuple[tuple[type, str], ...] = (
    (
        Generator,
        "it is a generator: call the function by rpc_stream, which sends what it yields item by item, or return a "
        "list",
    ),
    (
        AsyncGenerator,
        "it is an asynchronous generator: make the function an ordinary one and call it by rpc_stream, which "
        "sends what it yields item by item",
    ),
    (
        Coroutine,
        "it is a coroutine, which nobody awaits there: call an ordinary function that runs it, as by asyncio.run",
    ),
    (
        AnyFuture,
        # Programs look for torch's words, which are the first.
        "Can not pickle torch.futures.Future: wait for it, or mark the function that returns it with "
        "rpc.functions.async_execution, so that the call is answered when the future is done",
    ),
)
"""What does not pickle, and what to do instead."""


def _explain(value: object, error: Exception) -> str:
    for kind, advice in _UNSENDABLE:
        if isinstance(value, kind):
            return advice
    name = getattr(value, "__qualname__", "")
    if isinstance(name, str) and ("<lambda>" in name or "<locals>" in name):
        return (
            f"{name} has no importable name; functions and classes are sent by name, "
            "so define it at the top level of a module that the other worker can import"
        )
    return f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
