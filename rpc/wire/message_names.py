"""Resolves the names in the pickle of a message whose sender may send exposed or plain values only.

Of exceptions, it accepts those whose parts Python can handle, whatever they are. Most classes keep what they are
given. Some do more with it, in C. They make tuples of what may be a range of 2**60 numbers, hash it, and take
numbers for indices: for the text of a UnicodeDecodeError, Python before 3.12.5 reads memory at its `start`,
wherever that is.
"""

import builtins
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, Flag
from functools import partial
from importlib import import_module
from inspect import getattr_static
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, WrapperDescriptorType
from typing import Any, NamedTuple, cast, final

import torch

from ... import errors
from ...errors import rebuild_exception
from ...proto.v1 import agent_pb2
from ..contracts.options import BY_VALUE
from ..contracts.policy import Exposure, MethodGuard, Policy, exposure_of
from . import pickling, small_tensors
from .pickling import as_parameter
from .tensor_memory import MAX_DIMENSIONS

__all__ = [
    "GETATTR",
    "MALFORMED",
    "Made",
    "MessageNames",
    "Name",
    "RefusedValueError",
    "is_method_exposed",
    "show",
]

GETATTR = ("builtins", "getattr")
"""Module and name of the function as whose calls methods are pickled."""

MALFORMED = "its pickle is malformed"

MAX_NAME_CHARS = 2000
"""Characters of a module and a qualified name. Each of its parts takes a step to look up."""

MAX_INDEX = 1 << 63
"""What no part of a range or slice reaches, nor a flag of an enum."""

MAX_SHOWN = 200
"""Characters that errors show of a peer's text, at most."""

_PACKAGE = errors.__name__.partition(".")[0]
_OWN_MODULES = (f"{_PACKAGE}.optim.grad_clip", f"{_PACKAGE}.optim.local_optimizer")
"""Modules of gradwire whose functions other workers call, and that this worker need not have imported."""

MAX_POSITION = 1 << 20
"""The largest line number, and column, of a SyntaxError. Showing it makes as many characters."""

_ATOMS = (type(None), bool, int, float, str, bytes)

_POSITIONS = ("lineno", "offset", "end_lineno", "end_offset")

_MISSING = object()
_ORIGINAL_NAMES = {"_VariableFunctionsClass": ("torch", ""), "TensorBase": ("torch", "Tensor.")}
"""The module, and prefix of the name, by which `exposed` lists the functions of these classes of torch._C.

torch's functions and methods pickle as attributes of them, as `torch.add` does of `_VariableFunctionsClass`."""


class RefusedValueError(Exception):
    """A pickle has what is not accepted, or is malformed. The text says what.

    Attributes:
        name: the name of the function, class or method that is refused, if it is one.
    """

    def __init__(self, problem: str, name: str = "") -> None:
        super().__init__(problem)
        self.name = name


@final
class Name:
    """The name of a function, class or constant in a pickle, before it is known what the pickle does with it."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    @property
    def full(self) -> str:
        """The module and the qualified name."""
        return f"{self.module}.{self.name}"


class Made(NamedTuple):
    """A value that MessageNames has made, and what sets its state, if the pickle may do that."""

    value: Any
    set_state: Callable[[Any, Any], None] | None = None


@final
class MessageNames:
    """Decides what the names in a message stand for. Its methods raise RefusedValueError if it is refused."""

    def __init__(
        self, policy: Policy, guard: MethodGuard, tensors: Sequence[torch.Tensor], references: Sequence[Any]
    ) -> None:
        """Resolves the names in a message with these tensors and references, by the policy for its sender."""
        self.has_run = False
        """Whether an exposed class or function has run."""
        self._policy = policy
        self._guard = guard
        self._unused: dict[Name, None] = {}
        """Names in the pickle that it has not used yet. All must be accepted before anything exposed runs."""
        self._makers: Mapping[tuple[str, str], Callable[..., Any]] = {
            **_MAKERS,
            (pickling.__name__, "tensor_placeholder"): partial(_item, tensors),
            (pickling.__name__, "reference_placeholder"): partial(_item, references),
            (pickling.__name__, "parameter_placeholder"): partial(_make_parameter, tensors),
            (pickling.__name__, "_import"): self._script_function,
            (errors.__name__, "rebuild_exception"): self._rebuild_exception,
        }

    def name(self, module: str, name: str) -> Name:
        """Returns a name that the pickle has."""
        if len(module) + len(name) > MAX_NAME_CHARS:
            raise RefusedValueError(f"it has a name of more than {MAX_NAME_CHARS} characters: {show(module)}")
        if module.partition(".")[0] == BY_VALUE:  # whatever `exposed` says: its functions make others of any code
            raise RefusedValueError(
                "it has code: a function or class by value, which only a worker whose policy accepts anything "
                "runs; define it at the top level of a module that both workers can import, and expose it there"
            )
        made = Name(module, name)
        self._unused[made] = None
        return made

    def value(self, name: Name) -> Any:
        """Returns what a name stands for as a part of a value: a function, a class or a constant of torch."""
        self._unused.pop(name, None)
        if (constant := _constant(name)) is not None:
            return constant
        if (error_class := _error_class(name)) is not None:
            return error_class
        exposure = self._exposure(name)
        if exposure.is_value:
            raise RefusedValueError(f"it names {show(name.full)}, which only gradwire makes", name.full)
        return exposure.target if exposure.guarded is None else partial(exposure.guarded, self._guard)

    def call(self, name: Name, args: tuple[Any, ...]) -> Made:
        """Returns what a call of what the name stands for makes."""
        self._unused.pop(name, None)
        make = self._makers.get((name.module, name.name))
        if make is None and name.module == "builtins":  # gradwire's own errors pickle without their constructors
            error_class = _error_class(name)
            make = None if error_class is None else partial(_make_error, error_class)
        if make is None:
            return self._make_instance(name, args, lambda maker: maker(*args))
        try:
            made = make(*args)
        except RefusedValueError:
            raise
        except Exception as error:
            raise RefusedValueError(f"its {show(name.full)} is malformed: {show(str(error))}") from error
        if isinstance(made, Exception):
            return Made(made, _set_attributes)
        return Made(made, _set_metadata if type(made) is OrderedDict else None)

    def new(self, name: Name, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Made:
        """Returns a new instance of the class that the name stands for, without its state."""
        self._unused.pop(name, None)
        return self._make_instance(name, args, lambda cls: cls.__new__(cls, *args, **kwargs))

    def attribute(self, target: Any, name: Any) -> Any:
        """Returns an attribute of a Name, which is a Name again, or a method of an instance."""
        if type(name) is not str:
            raise RefusedValueError(MALFORMED)
        if not isinstance(target, Name):
            cls = type(target)
            self._begin_to_run(Name(cls.__module__, f"{cls.__qualname__}.{name}"))
            self._guard(target, name)
            return getattr(target, name)
        self._unused.pop(target, None)
        module, prefix = target.module, f"{target.name}."
        if module == "torch._C" and target.name in _ORIGINAL_NAMES:
            module, prefix = _ORIGINAL_NAMES[target.name]
        return self.name(module, f"{prefix}{name}")

    def _make_instance(self, name: Name, args: tuple[Any, ...], make: Callable[[Any], Any]) -> Made:
        """Makes an instance of a class of gradwire's messages, of an exposed class, or by an exposed function."""
        exposure = self._exposure(name)
        if not exposure.is_value:
            self._begin_to_run(name)
            if exposure.guarded is not None:
                raise RefusedValueError(f"its pickle calls {show(name.full)}", name.full)
            _check_arguments(exposure.target, args)
        made = make(exposure.target)
        _check_instance(made)
        return Made(made, _set_state if isinstance(exposure.target, type) else None)

    def _begin_to_run(self, name: Name) -> None:
        """Notes that something exposed is about to run. Raises RefusedValueError if it may not."""
        for unused in self._unused:  # such as the function that is called
            key = unused.module, unused.name
            is_known = key in self._makers or key == GETATTR
            if not is_known and _constant(unused) is None and _error_class(unused) is None:
                self._exposure(unused)
        self._unused.clear()
        if self._policy.accepts != "exposed":
            raise RefusedValueError(
                f"it has an instance of {show(name.full)}, but may have plain data only: send it as a tuple or "
                "dict, or accept 'exposed' in the rpc.Policy",
                name.full,
            )
        self.has_run = True

    def _exposure(self, name: Name) -> Exposure:
        found = _find_exposure(self._policy, name.module, name.name)
        if found is not None:
            return found
        shown = show(name.full)
        if name.module not in sys.modules:
            problem = f"it names {shown}, but {show(name.module)} is not imported here"
        else:
            problem = f"it names {shown}, which is not exposed"
        raise RefusedValueError(
            f"{problem}: decorate it with rpc.expose in a module that this worker imports, or list {shown} in "
            "`exposed` of the rpc.Policy in this worker's RpcBackendOptions",
            name.full,
        )

    def _script_function(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise RefusedValueError(MALFORMED)
        return self._exposure(Name(module, name)).target

    def _rebuild_exception(self, cls: Any, args: Any, attributes: Any) -> Exception:
        """Returns an exception without calling its constructor; see `rebuild_exception`."""
        is_error = isinstance(cls, type) and issubclass(cls, Exception)
        if not is_error or type(args) is not tuple or type(attributes) is not dict:
            raise RefusedValueError(MALFORMED)
        name = Name(cls.__module__, cls.__qualname__)
        if _error_class(name) is not cls:
            self._begin_to_run(name)
        _check_error_arguments(cls, args)
        rebuilt: Exception = rebuild_exception(cls, args, attributes)
        _check_error_state(rebuilt)
        return rebuilt


def _find_exposure(policy: Policy, module: str, name: str) -> Exposure | None:
    """Returns the mark of the function or class of this name, or what `exposed` of the policy makes of it."""
    found = _find(policy, module, name)
    if found is _MISSING:
        return None
    if (exposure := exposure_of(found)) is not None:
        return exposure
    full = f"{module}.{name}"
    if policy.lists(full) or (policy.lists_by_pattern(full) and _is_defined_as(found, module, name)):
        return Exposure(found)
    owner, _, attribute = name.rpartition(".")
    if owner and not attribute.startswith("_"):  # such as a class method of an exposed class
        of_class = _find_exposure(policy, module, owner)
        if of_class is not None and isinstance(of_class.target, type) and not of_class.is_value:
            return Exposure(found)
    return None


def is_method_exposed(policy: Policy, value: object, name: str) -> bool:
    """Returns whether a method or attribute of a value may be used: by its class, or by itself."""
    if type(name) is not str or (name.startswith("_") and name != "__call__"):
        return False
    cls = type(value)
    of_class = _find_exposure(policy, cls.__module__, cls.__qualname__)
    if of_class is not None and of_class.target is cls and not of_class.is_value:
        return True
    exposure = exposure_of(getattr_static(cls, name, None))
    full = f"{cls.__module__}.{cls.__qualname__}.{name}"
    return exposure is not None or policy.lists(full) or policy.lists_by_pattern(full)


def _find(policy: Policy, module: str, name: str) -> Any:
    """Returns what a name names, in a module that is imported or that the policy lists.

    Passes through classes only: a pattern must not reach what a module has imported, such as `os.system`.
    """
    root: Any = sys.modules.get(module)
    if root is None and (module in _OWN_MODULES or policy.names_module(module)):
        root = import_module(module)
    first, *others = name.split(".")
    listed = policy.lists(f"{module}.{name}")
    found = getattr(root, first, _MISSING) if listed else getattr(root, "__dict__", {}).get(first, _MISSING)
    for attribute in others:
        found = _class_attribute(found, attribute) if isinstance(found, type) else _MISSING
    return found


def _class_attribute(cls: type, name: str) -> Any:
    """Returns a method or class of a class. Other attributes may be descriptors, which would run."""
    found = getattr_static(cls, name, _MISSING)
    if isinstance(found, staticmethod | classmethod):
        return getattr(cls, name)
    return found if isinstance(found, type | FunctionType | MethodDescriptorType) else _MISSING


def _is_defined_as(found: Any, module: str, name: str) -> bool:
    if not isinstance(found, type | FunctionType | BuiltinFunctionType | MethodType):
        return False
    return found.__module__ == module and found.__qualname__ == name


def _constant(name: Name) -> Any:
    """Returns a dtype or memory format of torch."""
    if name.module not in ("torch", "torch._utils"):
        return None
    found = vars(torch).get(name.name.removeprefix("torch."))
    return found if isinstance(found, torch.dtype | torch.memory_format) else None


def _error_class(name: Name) -> type[Exception] | None:
    """Returns a class of exceptions of Python or gradwire."""
    module = {"builtins": builtins, errors.__name__: errors}.get(name.module)
    found = vars(module).get(name.name) if module is not None else None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _make_layout(name: str) -> torch.layout:
    layout = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(layout, torch.layout):
        raise TypeError(f"{name!r} is no layout")
    return layout


def _make_device(*args: Any) -> torch.device:
    if not all(type(each) in (str, int) for each in args):
        raise TypeError("a device has a name and an index")
    return torch.device(*args)


def _make_size(sizes: Any) -> torch.Size:
    if type(sizes) is not tuple or not all(type(size) is int for size in sizes):
        raise TypeError("a torch.Size has ints")
    return torch.Size(sizes)


def _make_ordered_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _make_number(*args: Any) -> complex:
    if not all(type(part) is float for part in args):
        raise TypeError("a complex number has floats")
    return complex(*args)


def _make_member(kind: type[Enum], number: Any) -> Enum:
    if type(number) is not int:
        raise TypeError(f"{kind.__name__} has a number")
    return kind(number)


def _make_range(kind: type, *args: Any) -> Any:
    """Returns a range or slice. The length of a range is a quotient, which takes long if its parts are large."""
    if not all(part is None or (type(part) is int and -MAX_INDEX <= part < MAX_INDEX) for part in args):
        raise TypeError(f"a {kind.__name__} has ints of 64 bits")
    return kind(*args)


def _make_error(cls: type[Exception], *args: Any) -> Exception:
    _check_error_arguments(cls, args)
    error = cls(*args)
    _check_error_state(error)
    return error


def _make_small_tensor(number: Any, sizes: Any, data: Any) -> torch.Tensor:
    if type(sizes) is not tuple or len(sizes) > MAX_DIMENSIONS or not isinstance(data, bytes | bytearray):
        raise TypeError("a tensor has sizes and bytes")
    if type(number) is not int:
        raise TypeError("a dtype has a number")
    if not all(type(size) is int and 0 <= size <= len(data) for size in sizes):
        raise ValueError("it has bytes for other sizes")
    return small_tensors.small_tensor(cast(agent_pb2.DType.ValueType, number), sizes, data)


def _item(items: Sequence[Any], index: Any) -> Any:
    """Returns a tensor or reference of the message."""
    if type(index) is not int or not 0 <= index < len(items):
        raise TypeError("the message has fewer")
    return items[index]


def _make_parameter(tensors: Sequence[torch.Tensor], index: Any, requires_grad: Any) -> torch.Tensor:
    return as_parameter(_item(tensors, index), requires_grad=bool(requires_grad))


_MAKERS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "complex"): _make_number,
    ("builtins", "range"): partial(_make_range, range),
    ("builtins", "slice"): partial(_make_range, slice),
    ("collections", "OrderedDict"): _make_ordered_dict,
    (errors.__name__, "LossCause"): partial(_make_member, errors.LossCause),
    (errors.__name__, "Outcome"): partial(_make_member, errors.Outcome),
    ("torch", "Size"): _make_size,
    ("torch", "device"): _make_device,
    ("torch.serialization", "_get_layout"): _make_layout,
    (small_tensors.__name__, "small_tensor"): _make_small_tensor,
}
"""What makes plain data that pickle has no opcode for."""


def _set_attributes(error: Exception, state: Any) -> None:
    """Sets the attributes of an exception."""
    if type(state) is not dict or not all(type(name) is str for name in state):
        raise RefusedValueError(MALFORMED)
    if any(callable(getattr(type(error), name, None)) for name in state):  # whoever calls it would call that
        raise RefusedValueError("it has an exception with an attribute in place of a method")
    vars(error).update(state)


def _set_metadata(state_dict: Any, state: Any) -> None:
    """Sets what the state_dict of a torch module has besides its items."""
    if type(state) is not dict or set(state) != {"_metadata"}:
        raise RefusedValueError("it has an OrderedDict with attributes")
    vars(state_dict).update(state)


def _set_state(instance: Any, state: Any) -> None:
    """Sets the state of an instance of an exposed class as pickle does."""
    if (set_state := getattr(instance, "__setstate__", None)) is not None:
        set_state(state)
        _check_instance(instance)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if attributes:
        vars(instance).update(attributes)
    for name, value in (slots or {}).items():
        if name.startswith("__"):
            raise RefusedValueError(MALFORMED)
        setattr(instance, name, value)


def _check_arguments(target: Any, args: tuple[Any, ...]) -> None:
    """Checks the arguments of an exposed class whose base has a constructor that bounds nothing."""
    if not isinstance(target, type):
        return
    if issubclass(target, Flag) and not all(type(arg) is int and abs(arg) < MAX_INDEX for arg in args):
        raise RefusedValueError(MALFORMED)  # the members of which it consists take quadratic time
    if issubclass(target, Exception):
        try:
            _check_error_arguments(target, args)
        except TypeError as error:
            raise RefusedValueError(f"its exception is malformed: {error}") from error


def _check_instance(instance: Any) -> None:
    """Checks an instance of an exposed class once its state has been set."""
    if isinstance(instance, Exception):
        try:
            _check_error_state(instance)
        except ValueError as error:
            raise RefusedValueError(f"its exception is malformed: {error}") from error


def _check_error_arguments(cls: type, args: tuple[Any, ...]) -> None:
    """Checks arguments of an exception before it is made. Raises TypeError for types that Python never gives."""
    if issubclass(cls, BaseExceptionGroup) and [type(arg) for arg in args] not in ([str, list], [str, tuple]):
        raise TypeError("an ExceptionGroup has a text and a list")
    if len(args) < 2 or not isinstance(getattr_static(cls, "__init__"), WrapperDescriptorType):
        return  # an exposed class may take what it likes
    if issubclass(cls, OSError) and not all(type(arg) in _ATOMS for arg in args):  # it hashes the first one
        raise TypeError("an OSError has numbers and texts")
    if issubclass(cls, SyntaxError) and not (
        type(args[1]) is tuple and all(type(part) in _ATOMS for part in args[1])
    ):
        raise TypeError("the place of a SyntaxError has numbers and texts")


def _check_error_state(error: BaseException) -> None:
    """Checks the numbers in an exception, once its state is set. Raises ValueError if one is out of range."""
    if isinstance(error, UnicodeDecodeError | UnicodeEncodeError | UnicodeTranslateError):
        data = getattr(error, "object", None)  # of one whose constructor has not run
        length = len(data) if isinstance(data, str | bytes) else 0
        if not 0 <= error.start <= length or not 0 <= error.end <= length:
            raise ValueError(f"positions {error.start} and {error.end} in {length} characters")
    elif isinstance(error, SyntaxError):
        for name in _POSITIONS:
            number = getattr(error, name)
            if number is not None and (type(number) is not int or abs(number) > MAX_POSITION):
                raise ValueError(f"{name} of a SyntaxError is no number up to {MAX_POSITION}")


def show(text: str) -> str:
    """Returns a text that a peer has sent for errors and logs: in quotes, escaped and not too long."""
    return ascii(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
