"""Pickles the values of messages, without their tensors and remote references, and unpickles them.

Both travel beside the pickle, by index: tensors so that their bytes are copied as seldom as possible, references
so that the receiver can count them even if it cannot unpickle the value. In the pickle, each of them is a call of
a placeholder function with its index. The unpickler of a message resolves the placeholders to look-ups in that
message, so that no state is shared between messages or threads. (Persistent ids of pickle would do the same. But
a `persistent_id` hook is called for every object that is pickled, which makes large plain values ten times as slow
to pickle: a list of 10,000 integers takes 750 µs in place of 70 µs.)

The pickler is Python's own, or cloudpickle's, by the option `pickler`. cloudpickle writes ordinary pickles. It
names functions and classes that can be imported, as Python's does, and writes the code of others: of lambdas, of
functions inside functions, and of the program's `__main__`. TorchScript functions are sent by name if they can be
imported by their name, else with their code, and modules always with their code.

A worker with a policy that restricts what it accepts has a `RestrictedReader` in place of the `PickleReader`.
"""

import copyreg
import io
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from importlib import import_module
from operator import itemgetter
from typing import Any, NoReturn, final

import torch
from torch import nn

from ...errors import SerializationError
from ...torch_internals import RecursiveScriptModule, load_script, save_script
from ..contracts.devices import NO_DEVICES, DeviceMap
from ..contracts.extension import Extension
from ..contracts.messages import Buffer, Incoming
from ..contracts.options import BY_NAME, BY_VALUE
from ..contracts.worker import WorkerInfo
from .failures import explain_failure, explain_missing
from .small_tensors import MAX_SMALL_BYTES, SMALL_TENSOR_COST_BYTES, pickle_small, reduce_small
from .tensor_memory import storage_addresses
from .tensors import check_all_sendable, check_sendable

__all__ = [
    "MANY_OBJECTS",
    "ONE_TENSOR",
    "SMALL_BODY_BYTES",
    "Packed",
    "Packer",
    "PickleReader",
    "as_parameter",
    "dumps",
    "parameter_placeholder",
    "reference_placeholder",
    "tensor_placeholder",
    "unpickle",
]

PICKLE_PROTOCOL = 5

SMALL_BODY_BYTES = 8 << 10
"""Bytes of a pickle that has few objects, whatever they are."""

MANY_OBJECTS = 1 << 10
"""Objects of one value after which a pickler is not used again: all of its memo, which never shrinks, is cleared
after each value."""

READ_BYTES = 1 << 16
"""Bytes of a large body that are read at a time: those of one frame of pickle."""

Reducer = Callable[[Any], Any]
"""Returns how to pickle an object, as `__reduce__` does."""

Finder = Callable[[type], Reducer | None]
"""Returns the reducer of a class, if it knows one."""


_Parts = tuple[bytes, list[torch.Tensor], list[Any], AbstractSet[int]]


@final
class Packed(_Parts):
    """A pickled value: the pickle, the tensors, the references, and which tensors are leaves.

    No dataclass: each would be made by a function in Python, for each message.
    """

    __slots__ = ()

    body: bytes = property(itemgetter(0))  # type: ignore[assignment]
    """The pickle, with placeholders for tensors and references."""
    tensors: list[torch.Tensor] = property(itemgetter(1))  # type: ignore[assignment]
    """The tensors, by the index in their placeholders."""
    references: list[Any] = property(itemgetter(2))  # type: ignore[assignment]
    """The references, by the index in their placeholders."""
    leaves: AbstractSet[int] = property(itemgetter(3))  # type: ignore[assignment]
    """Indices of the tensors that the receiver gets as autograd leaves, even inside an autograd context."""


_CPU = torch.device("cpu")
_NO_LEAVES: AbstractSet[int] = frozenset()
_SCRIPT_PREFIX = "__torch__."


# What stands in pickles, by the names of these functions.


def tensor_placeholder(index: int) -> NoReturn:
    """Stands in a pickle for a tensor of the message."""
    raise pickle.UnpicklingError(f"malformed message: it has no tensor {index}")


def parameter_placeholder(index: int, requires_grad: bool) -> NoReturn:  # noqa: ARG001
    """Stands in a pickle for a tensor of the message that is a Parameter."""
    raise pickle.UnpicklingError(f"malformed message: it has no tensor {index}")


def reference_placeholder(index: int) -> NoReturn:
    """Stands in a pickle for a reference of the message."""
    raise pickle.UnpicklingError(f"malformed message: it has no reference {index}")


def _import(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


class _OneTensor:
    """Is pickled as the tensor of a message that is nothing else."""

    def __reduce__(self) -> tuple[Any, ...]:
        return tensor_placeholder, (0,)


ONE_TENSOR = pickle.dumps(_OneTensor(), PICKLE_PROTOCOL)
"""The body of a message whose value is a tensor that travels beside it, such as the result of most functions."""


# Pickling.


@final
class Packer:
    """Pickles the values of one agent's messages.

    Functions and classes are sent by name, as in pickle itself, unless the pickler is another. All extensions are
    added before the first message.
    """

    def __init__(self, pickler: str = BY_NAME) -> None:
        """Makes the pickler of one agent, by the option `pickler`."""
        self.pickler = pickler
        self._reference_types: list[type] = []
        self._reducers: dict[type, Reducer] = {
            torch.UntypedStorage: _reduce_storage,
            torch.jit.ScriptFunction: _reduce_script_function,
            RecursiveScriptModule: _reduce_script_module,
        }
        self._finders: list[Finder] = []
        self._detaches: list[Callable[[object], bool]] = []
        self._idle: deque[_Extractor] = deque()
        """Picklers that no thread uses: making one takes longer than pickling a small value."""

    def add(self, extension: Extension) -> None:
        """Has values pickled as an extension says: references, by its reducers, and Parameters as leaves."""
        if extension.reference_type is not None:
            self._reference_types.append(extension.reference_type)
        self._reducers.update(extension.reducers())
        if type(extension).find_reducer is not Extension.find_reducer:
            self._finders.append(extension.find_reducer)
        self._detaches.append(extension.detaches_parameters)
        self._idle.clear()

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
            if type(value) is torch.Tensor and (packed := _pack_alone(value, device_map)) is not None:
                return packed
            try:
                extractor = self._idle.pop()
            except IndexError:
                extractor = self._make_extractor()
            packed = extractor.pickle(value, device_map, with_small=_CPU not in device_map)
            if extractor.parameter_ids:
                packed = self._with_leaves(packed, extractor, value)
            if extractor.is_reusable:
                self._idle.append(extractor)
            return packed
        except _SharedMemoryError:
            pass
        except Exception as error:
            raise self._explained(error, value, label, device_map) from error
        try:
            return self._pack_apart(value, device_map)
        except Exception as error:
            raise self._explained(error, value, label, device_map) from error

    def _make_extractor(self) -> "_Extractor":
        return _Extractor(self.pickler, self._reducers, self._reference_types, self._finders)

    def _pack_apart(self, value: object, device_map: DeviceMap) -> Packed:
        """Pickles a value by a pickler of its own, with none of its tensors inside the pickle."""
        extractor = self._make_extractor()
        packed = extractor.pickle(value, device_map, with_small=False)
        return self._with_leaves(packed, extractor, value) if extractor.parameter_ids else packed

    def _explained(
        self, error: Exception, value: object, label: str | Sequence[str], device_map: DeviceMap
    ) -> SerializationError:
        """Returns an error that says which part of a value does not pickle."""

        def error_of(part: object) -> Exception | None:
            try:
                self._pack_apart(part, device_map)
            except Exception as found:
                return found
            return None

        return explain_failure(value, label, error, error_of, self.pickler)

    def _with_leaves(self, packed: Packed, extractor: "_Extractor", value: object) -> Packed:
        """Returns a pickled value with the indices of the tensors that arrive as leaves."""
        detached = any(detaches(value) for detaches in self._detaches)
        leaves = set(extractor.parameter_ids) if detached else extractor.owned_parameters()
        return Packed((packed.body, packed.tensors, packed.references, leaves))


@final
class _Extractor:
    """A pickler that takes tensors and references out of the values. Used by one thread at a time."""

    __slots__ = (
        "_addresses",
        "_owned_ids",
        "_pickler",
        "_references",
        "_reset_pickler",
        "_small_bytes_left",
        "_stream",
        "_tensors",
        "is_reusable",
        "parameter_ids",
    )

    def __init__(
        self,
        pickler: str,
        reducers: Mapping[type, Reducer],
        reference_types: Iterable[type],
        finders: Sequence[Finder],
    ) -> None:
        """Makes a pickler of this kind with these reducers by class, for these classes of references."""
        self.parameter_ids: dict[int, int] = {}
        """By the index of a tensor of the last value that is a Parameter, the `id` of the Parameter."""
        self.is_reusable = False
        """Whether pickling another value takes no longer than with another pickler."""
        self._tensors: list[torch.Tensor] = []
        self._references: list[Any] = []
        self._owned_ids: set[int] = set()
        """The `id` of each Parameter of a module or optimizer."""
        self._small_bytes_left = 0
        """Bytes of small tensors that may still be put into the pickle."""
        self._addresses: set[int] = set()
        """Of the memory of those that have been."""
        self._stream = io.BytesIO()
        kind = _class_of(pickler)
        fallbacks = kind.dispatch_table if pickler == BY_VALUE else copyreg.dispatch_table  # a part of the former
        table = _DispatchTable(reducers, finders, fallbacks, self._reduce_owner)
        table[torch.Tensor] = self._reduce_tensor
        table[nn.Parameter] = self._reduce_parameter
        for reference_type in reference_types:
            table[reference_type] = self._reduce_reference
        # cloudpickle's has an attribute `dispatch_table`, which the constructor in C reads, and nothing else does.
        self._pickler = kind.__new__(kind)
        self._pickler.dispatch_table = table
        kind.__init__(self._pickler, self._stream, protocol=PICKLE_PROTOCOL)
        self._reset_pickler = _resetter(self._pickler)

    def pickle(self, value: object, device_map: DeviceMap, *, with_small: bool) -> Packed:
        """Pickles a value, `with_small` with its small tensors in the pickle.

        Raises:
            _SharedMemoryError: tensors share memory, so small ones cannot be in the pickle.
            Exception: whatever pickling the value raises.
        """
        if self.parameter_ids:
            self.parameter_ids.clear()
        if self._owned_ids:
            self._owned_ids.clear()
        if self._addresses:
            self._addresses.clear()
        self._small_bytes_left = MAX_SMALL_BYTES if with_small else 0
        tensors = self._tensors = []
        references = self._references = []
        try:
            self._pickler.dump(value)
            body = self._stream.getvalue()
            if tensors:
                check_all_sendable(tensors, device_map)
                if self._addresses and not self._addresses.isdisjoint(storage_addresses(tensors)):
                    raise _SharedMemoryError
            self.is_reusable = len(body) < SMALL_BODY_BYTES or (
                2 * len(tensors) < MANY_OBJECTS and len(self._pickler.memo.copy()) < MANY_OBJECTS
            )  # a tensor is two objects
        finally:  # else it keeps the value until the next one, or until the garbage collector frees it
            self._tensors, self._references = [], []
            self._reset_pickler()
            self._stream.seek(0)
            self._stream.truncate()
        return Packed((body, tensors, references, _NO_LEAVES))

    def owned_parameters(self) -> AbstractSet[int]:
        """Returns the indices of the Parameters that belong to modules or optimizers."""
        return {index for index, identity in self.parameter_ids.items() if identity in self._owned_ids}

    def _reduce_tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if self._small_bytes_left > 0 and not tensor.requires_grad and (small := reduce_small(tensor)) is not None:
            address, reduced = small
            if address in self._addresses:
                raise _SharedMemoryError
            self._addresses.add(address)
            self._small_bytes_left -= tensor.nbytes + SMALL_TENSOR_COST_BYTES
            return reduced
        tensors = self._tensors
        tensors.append(tensor)
        return tensor_placeholder, (len(tensors) - 1,)

    def _reduce_parameter(self, parameter: nn.Parameter) -> tuple[Any, ...]:
        tensors = self._tensors
        index = len(tensors)
        tensors.append(parameter)
        self.parameter_ids[index] = id(parameter)
        reduced = parameter_placeholder, (index, parameter.requires_grad)
        attributes = vars(parameter)
        return (*reduced, attributes, None, None, _set_attributes) if attributes else reduced

    def _reduce_owner(self, owner: nn.Module | torch.optim.Optimizer) -> Any:
        self._owned_ids.update(map(id, _parameters_of(owner)))
        return owner.__reduce_ex__(PICKLE_PROTOCOL)

    def _reduce_reference(self, reference: object) -> tuple[Any, ...]:
        references = self._references
        references.append(reference)
        return reference_placeholder, (len(references) - 1,)


class _SharedMemoryError(Exception):
    """Several tensors of a value share memory."""


@final
class _DispatchTable(dict[type, Reducer]):
    """Reducers by exact class, those of `copyreg`, and one for nn.Modules and Optimizers, which own Parameters."""

    __slots__ = ("_fallbacks", "_finders", "_reduce_owner")

    def __init__(
        self,
        reducers: Mapping[type, Reducer],
        finders: Sequence[Finder],
        fallbacks: Mapping[type, Reducer],
        reduce_owner: Reducer,
    ) -> None:
        super().__init__(reducers)
        self._finders = finders
        self._fallbacks = fallbacks
        self._reduce_owner = reduce_owner

    def __missing__(self, kind: type) -> Reducer:
        for find in self._finders:
            if (reducer := find(kind)) is not None:
                return reducer
        if (reducer := self._fallbacks.get(kind)) is not None:
            return reducer
        if issubclass(kind, nn.Module | torch.optim.Optimizer):
            return self._reduce_owner
        raise KeyError(kind)


def _pack_alone(tensor: torch.Tensor, device_map: DeviceMap) -> Packed | None:
    """Returns a message that is nothing but a tensor; None if the pickler has to look at it."""
    if tensor.requires_grad:
        check_sendable(tensor, device_map)
        return Packed((ONE_TENSOR, [tensor], [], _NO_LEAVES))
    if _CPU in device_map or (body := pickle_small(tensor)) is None:
        return None
    return Packed((body, [], [], _NO_LEAVES))


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


def _reduce_script_function(function: Any) -> tuple[Any, ...]:
    module, _, name = function.qualified_name.removeprefix(_SCRIPT_PREFIX).rpartition(".")
    if getattr(sys.modules.get(module), name, None) is function:
        return _import, (module, name)
    return load_script, (save_script(function),)


def _reduce_script_module(module: Any) -> tuple[Any, ...]:
    return load_script, (save_script(module),)


def _class_of(name: str) -> type[pickle.Pickler]:
    """Returns the class of the pickler that the option `pickler` names."""
    if name != BY_VALUE:
        return pickle.Pickler
    import cloudpickle

    found: type[pickle.Pickler] = cloudpickle.Pickler
    return found


def _resetter(pickler: pickle.Pickler) -> Callable[[], None]:
    """Returns a function that makes a pickler ready for another value."""
    # cloudpickle's: the namespaces of the functions of one value, by the ids of what may be gone by now.
    namespaces: dict[int, Any] | None = getattr(pickler, "globals_ref", None)
    if namespaces is None:
        return pickler.clear_memo

    def reset() -> None:
        pickler.clear_memo()
        namespaces.clear()

    return reset


def dumps(name: str, value: object) -> bytes:
    """Returns a pickle of a value with all that is in it: tensors are copied into it, references do not pickle."""
    if name != BY_VALUE:
        return pickle.dumps(value, PICKLE_PROTOCOL)
    import cloudpickle

    data: bytes = cloudpickle.dumps(value, PICKLE_PROTOCOL)
    return data


# Unpickling.


def unpickle(body: Buffer, tensors: Sequence[torch.Tensor], references: Sequence[Any]) -> Any:
    """Returns the value of a message, given its tensors and references by index. Raises what unpickling raises."""
    if not tensors and not references:
        return pickle.loads(body)
    if body == ONE_TENSOR and len(tensors) == 1:
        return tensors[0]
    return _MessageUnpickler(body, tensors, references).load()


def as_parameter(tensor: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """Returns a Parameter; or the tensor itself if gradients flow back through it to the sender."""
    if tensor.grad_fn is not None:
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad)


@final
class _MessageUnpickler(pickle.Unpickler):
    """Resolves placeholders to the tensors and references of one message."""

    def __init__(self, body: Buffer, tensors: Sequence[torch.Tensor], references: Sequence[Any]) -> None:
        # BytesIO shares bytes, but copies any other buffer. Those are large.
        super().__init__(
            io.BytesIO(body) if isinstance(body, bytes) else io.BufferedReader(_MemoryReader(body), READ_BYTES)
        )
        self._tensors = tensors
        self._references = references

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == __name__:
            if global_name == "tensor_placeholder":
                return self._tensors.__getitem__
            if global_name == "parameter_placeholder":
                return self._parameter
            if global_name == "reference_placeholder":
                return self._references.__getitem__
        return super().find_class(module_name, global_name)

    def _parameter(self, index: int, requires_grad: bool) -> torch.Tensor:
        """Returns a Parameter; or the tensor itself if gradients flow back through it to the sender."""
        return as_parameter(self._tensors[index], requires_grad=requires_grad)


@final
class _MemoryReader(io.RawIOBase):
    """Reads a memoryview."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        part = self._data[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)


@final
class PickleReader:
    """Reads the values of messages, and accepts anything."""

    refused: Mapping[str, int] = {}

    def __init__(self, me: WorkerInfo) -> None:
        """Makes the reader of one worker."""
        self._me = me

    def read(self, message: Incoming) -> Any:
        """Returns the value of a message: see `RestrictedReader.read`."""
        try:
            if not message.tensors and not message.references:
                return pickle.loads(message.body)
            return unpickle(message.body, message.tensors, message.references)
        except (AttributeError, ImportError) as error:
            raise explain_missing(error, self._me.name) from error

    def load(self, source: WorkerInfo, data: Buffer | bytearray) -> Any:  # noqa: ARG002
        """Returns the value of a pickle without tensors."""
        return pickle.loads(data)
