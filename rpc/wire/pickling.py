"""Pickles the values of messages, without their tensors and remote references.

Both travel beside the pickle, by index: tensors so that their bytes are copied as seldom as possible, references
so that the receiver can count them even if it cannot unpickle the value. `unpickling` is the other direction.
"""

import copyreg
import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, final

import torch
from torch import nn

from ...torch_internals import RecursiveScriptModule
from ..contracts.devices import NO_DEVICES, DeviceMap
from ..contracts.messages import Buffer
from .script import reduce_script_function, reduce_script_module
from .tensors import check_sendable
from .unpickling import parameter_placeholder, reference_placeholder, tensor_placeholder, unpickle
from .unsendable import explain_failure

__all__ = ["Packed", "Packer"]

PICKLE_PROTOCOL = 5

Reducer = Callable[[Any], Any]
"""Returns how to pickle an object, as `__reduce__` does."""


class Packed:
    """A pickled value."""

    __slots__ = ("body", "leaves", "references", "tensors")

    def __init__(self) -> None:
        self.body = b""
        """The pickle, with placeholders for tensors and references."""
        self.tensors: list[torch.Tensor] = []
        """The tensors, by the index in their placeholders."""
        self.references: list[Any] = []
        """The references, by the index in their placeholders."""
        self.leaves: AbstractSet[int] = frozenset()
        """Indices of the tensors that the receiver gets as autograd leaves, even inside an autograd context."""


@final
class Packer:
    """Pickles and unpickles the values of one agent's messages.

    Functions and classes are sent by name, as in pickle itself. Everything is registered before the first message.
    """

    def __init__(self) -> None:
        self._reference_types: list[type] = []
        self._reducers: dict[type, Reducer] = {
            torch.UntypedStorage: _reduce_storage,
            torch.jit.ScriptFunction: reduce_script_function,
            RecursiveScriptModule: reduce_script_module,
        }
        self._detaches: list[Callable[[object], bool]] = []

    def register_reference_type(self, reference_type: type) -> None:
        """Has instances of exactly this class travel as references."""
        self._reference_types.append(reference_type)

    def register_reducers(self, reducers: Mapping[type, Reducer]) -> None:
        """Has instances of exactly these classes pickled by functions, as in `copyreg`."""
        self._reducers.update(reducers)

    def detach_parameters_if(self, predicate: Callable[[object], bool]) -> None:
        """Has every Parameter of a value that satisfies `predicate` arrive as a leaf.

        Parameters of modules and optimizers always do.
        """
        self._detaches.append(predicate)

    def pack(self, value: object, label: str | Sequence[str], device_map: DeviceMap = NO_DEVICES) -> Packed:
        """Pickles a value.

        Args:
            value: anything that pickles.
            label: what to call the value in errors; for a tuple, what to call each of its items.
            device_map: devices of this worker to devices of the receiver. Tensors on the CPU need no entry.

        Raises:
            SerializationError: some part does not pickle; `path` says which.
        """
        try:
            return self._pack(value, device_map)
        except Exception as error:
            raise explain_failure(
                value, label, error, lambda part: self._pickling_error(part, device_map)
            ) from error

    def unpack(self, body: Buffer, tensors: Sequence[torch.Tensor], references: Sequence[Any]) -> Any:
        """Returns the value of a message; see `unpickle`."""
        return unpickle(body, tensors, references)

    def _pack(self, value: object, device_map: DeviceMap) -> Packed:
        extractor = _Extractor(device_map)
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, protocol=PICKLE_PROTOCOL)
        pickler.dispatch_table = extractor.dispatch_table(self._reducers, self._reference_types)
        pickler.dump(value)
        packed = extractor.packed
        packed.body = stream.getvalue()
        if extractor.parameter_ids:
            detached = any(detaches(value) for detaches in self._detaches)
            packed.leaves = extractor.parameter_ids.keys() if detached else extractor.owned_parameters()
        return packed

    def _pickling_error(self, value: object, device_map: DeviceMap) -> Exception | None:
        try:
            self._pack(value, device_map)
        except Exception as error:
            return error
        return None


@final
class _Extractor:
    """Takes tensors and references out of one value while it is pickled."""

    __slots__ = ("_device_map", "_owned_ids", "packed", "parameter_ids")

    def __init__(self, device_map: DeviceMap) -> None:
        self.packed = Packed()
        self.parameter_ids: dict[int, int] = {}
        """By the index of a tensor that is a Parameter, the `id` of the Parameter."""
        self._owned_ids: set[int] = set()
        """The `id` of each Parameter of a module or optimizer."""
        self._device_map = device_map

    def dispatch_table(
        self, reducers: Mapping[type, Reducer], reference_types: Iterable[type]
    ) -> "_DispatchTable":
        """Returns the table for the pickler; this object does not refer to it, so no cycle keeps tensors alive."""
        table = _DispatchTable(copyreg.dispatch_table)
        table.update(reducers)
        table.reduce_owner = self._reduce_owner
        table[torch.Tensor] = self._reduce_tensor
        table[nn.Parameter] = self._reduce_parameter
        for reference_type in reference_types:
            table[reference_type] = self._reduce_reference
        return table

    def owned_parameters(self) -> AbstractSet[int]:
        """Returns the indices of the Parameters that belong to modules or optimizers."""
        return {index for index, identity in self.parameter_ids.items() if identity in self._owned_ids}

    def _reduce_tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor_placeholder, (self._extract(tensor),)

    def _reduce_parameter(self, parameter: nn.Parameter) -> tuple[Any, ...]:
        index = self._extract(parameter)
        self.parameter_ids[index] = id(parameter)
        reduced = parameter_placeholder, (index, parameter.requires_grad)
        attributes = vars(parameter)
        return (*reduced, attributes, None, None, _set_attributes) if attributes else reduced

    def _reduce_owner(self, owner: nn.Module | torch.optim.Optimizer) -> Any:
        self._owned_ids.update(map(id, _parameters_of(owner)))
        return owner.__reduce_ex__(PICKLE_PROTOCOL)

    def _reduce_reference(self, reference: object) -> tuple[Any, ...]:
        references = self.packed.references
        references.append(reference)
        return reference_placeholder, (len(references) - 1,)

    def _extract(self, tensor: torch.Tensor) -> int:
        """Adds a tensor to the message and returns its index. Raises ValueError if it cannot travel."""
        check_sendable(tensor, self._device_map)
        tensors = self.packed.tensors
        tensors.append(tensor)
        return len(tensors) - 1


@final
class _DispatchTable(dict[type, Reducer]):
    """Reducers by exact class, and one for all subclasses of nn.Module and Optimizer, which own Parameters."""

    __slots__ = ("reduce_owner",)

    reduce_owner: Reducer

    def __missing__(self, kind: type) -> Reducer:
        if issubclass(kind, nn.Module | torch.optim.Optimizer):
            return self.reduce_owner
        raise KeyError(kind)


def _parameters_of(owner: nn.Module | torch.optim.Optimizer) -> Iterable[Any]:
    """Returns the Parameters of an optimizer, or of a module without its submodules."""
    if isinstance(owner, nn.Module):
        parameters: Mapping[str, Any] = vars(owner).get("_parameters", {})  # not there before nn.Module.__init__
        return parameters.values()
    return (parameter for group in owner.param_groups for parameter in group["params"])


def _set_attributes(parameter: torch.Tensor, attributes: Mapping[str, Any]) -> None:
    vars(parameter).update(attributes)


def _reduce_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    return torch.Tensor.untyped_storage, (torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage),)
