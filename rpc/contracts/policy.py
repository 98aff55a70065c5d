"""What a worker accepts from other workers: the option `policy`, and the marks of what it exposes.

A mark is an attribute of a function or class. So nothing has to be registered, and what a module exposes can be
named once this worker has imported the module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any, Literal, TypeVar, final

__all__ = [
    "Accepts",
    "Exposure",
    "MethodGuard",
    "Policy",
    "check_counts",
    "expose",
    "exposure_of",
    "guarded_by",
    "message_value",
]

Accepts = Literal["anything", "exposed", "plain"]
"""What a policy accepts: see Policy."""

ACCEPTS = ("anything", "exposed", "plain")

MAX_DEPTH = 1000
"""Levels of containers whose hash does not overflow the stack of C, of a thread that has 512 KiB."""

T = TypeVar("T")

_MARK = "_gradwire_exposure"

MethodGuard = Callable[[object, str], None]
"""Raises PolicyError if the sender of a message may not call a method, or read an attribute, of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What this worker accepts from other workers, in their requests and in their answers to its own.

    A message is data until it has been checked: nothing of one that is refused runs, and its sender
    gets a PolicyError.

    accepts: what the values of messages may have besides plain data (see docs/policy.md), tensors and references:
        "anything", as in torch: a peer can run any code here;
        "exposed": exposed functions and classes, and instances of exposed classes;
        "plain": exposed functions and classes, by name, and no instances of classes.
        Only exposed functions can be called, except with "anything".
    exposed: names of functions and classes that are exposed besides those decorated with `rpc.expose`, such as
        "torch.add", or "app.serving.*" for all public functions and classes that the module
        `app.serving` defines.
    callers: policies for some workers, by their names or by patterns such as "trainer*"; the first that matches
        applies instead of this one.
    max_depth: levels of containers inside each other, 1000 at most: hashing and printing them takes the stack.
    max_operations: steps that it takes to decode a message: one for a number, some two for a text or container. A
        step creates some 300 bytes at most, besides the bytes of texts. It bounds the values in containers as
        well, where one that occurs in several places is counted in each, and what instances and dictionaries do
        with theirs; see docs/policy.md.
    """

    accepts: Accepts = "anything"
    exposed: Sequence[str] = ()
    callers: "Mapping[str, Policy]" = field(default_factory=dict)
    max_depth: int = 64
    max_operations: int = 1 << 20

    def __post_init__(self) -> None:
        if self.accepts not in ACCEPTS:
            raise ValueError(f"accepts is {self.accepts!r}: give one of {ACCEPTS}")
        if isinstance(self.exposed, str):
            raise TypeError(f"exposed is {self.exposed!r}: give a list of names")
        for name in self.exposed:
            if not isinstance(name, str) or not all(name.split(".")) or "." not in name:
                raise ValueError(
                    f"exposed has {name!r}: give names like 'package.module.function' or 'package.module.*'"
                )
        for worker, policy in self.callers.items():
            if not isinstance(worker, str) or not isinstance(policy, Policy):
                raise TypeError(f"callers has {worker!r}: {policy!r}: give a rpc.Policy by the name of a worker")
            if policy.callers:
                raise ValueError(f"callers has a policy for {worker!r} that has callers itself: give them here")
        check_counts(self, "max_depth", "max_operations")
        if self.max_depth > MAX_DEPTH:
            raise ValueError(f"max_depth is {self.max_depth}: give {MAX_DEPTH} at most")

    @property
    def restricts(self) -> bool:
        """Whether there may be a worker from which not anything is accepted."""
        return self.accepts != "anything" or any(each.accepts != "anything" for each in self.callers.values())

    def of(self, worker: str) -> "Policy":
        """Returns the policy for a worker, by its name."""
        for pattern, policy in self.callers.items():
            if fnmatchcase(worker, pattern):
                return policy
        return self

    def lists(self, name: str) -> bool:
        """Returns whether the name of a function or class is listed in `exposed` as it is."""
        return name in self.exposed

    def lists_by_pattern(self, name: str) -> bool:
        """Returns whether a pattern in `exposed` matches a name.

        `*` matches within one part of a name, and no part that begins with `_`.
        """
        parts = name.split(".")
        return any("*" in pattern and _matches(pattern.split("."), parts) for pattern in self.exposed)

    def names_module(self, module: str) -> bool:
        """Returns whether `exposed` has names of this module, written out: then it may be imported."""
        return any(pattern.startswith(f"{module}.") for pattern in self.exposed)


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    return len(pattern) == len(parts) and all(
        part == expected or (fnmatchcase(part, expected) and not part.startswith("_"))
        for part, expected in zip(parts, pattern, strict=True)
    )


def check_counts(options: object, *counts: str) -> None:
    """Checks that options are whole numbers of at least 1. Raises ValueError."""
    for name in counts:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: give a whole number, at least 1")


@final
@dataclass(frozen=True, slots=True)
class Exposure:
    """The mark of a function or class.

    target: the function or class. Others, such as those that `functools.wraps` gives the same attributes, are not
        exposed.
    guarded: what runs in its place. It takes the MethodGuard of the sender before all other arguments.
    is_value: whether it is a class of gradwire whose instances count as plain data, or a function that makes them.
    """

    target: object
    guarded: Callable[..., Any] | None = None
    is_value: bool = False


def expose(target: T) -> T:
    """Lets other workers call a function, or make and use instances of a class, where a policy restricts them.

        @rpc.expose
        def predict(batch): ...

    A class is exposed with its public methods, those it inherits included, and `__call__`; a method can be
    exposed by itself. Instances of exposed classes can be sent to workers whose policy accepts "exposed": they can
    have any attributes, as a pickle says, so the class must bear that. Among several decorators this is the first.

    Raises:
        TypeError: it cannot be marked; list its name in `exposed` of the rpc.Policy.
    """
    function = target.__func__ if isinstance(target, staticmethod | classmethod) else target
    if not callable(function):
        raise TypeError(f"{target!r} cannot be exposed: give a function or a class")
    _mark(function, Exposure(function))
    return target


def guarded_by(guarded: Callable[..., Any]) -> Callable[[T], T]:
    """Exposes a function of gradwire that uses methods of values; `guarded` checks them, and runs in its place."""

    def decorate(target: T) -> T:
        _mark(target, Exposure(target, guarded))
        return target

    return decorate


def message_value(target: T) -> T:
    """Marks a class of gradwire whose instances are parts of its own messages, or a function that makes them.

    Messages may have them under any policy.
    """
    _mark(target, Exposure(target, is_value=True))
    return target


def exposure_of(target: object) -> Exposure | None:
    """Returns the mark of a function, a method or a class; None if it has none of its own."""
    function = target.__func__ if isinstance(target, MethodType | staticmethod | classmethod) else target
    attributes = getattr(function, "__dict__", None) if callable(function) else None
    mark = None if attributes is None else attributes.get(_MARK)
    return mark if isinstance(mark, Exposure) and mark.target is function else None


def _mark(target: object, exposure: Exposure) -> None:
    try:
        setattr(target, _MARK, exposure)
    except (AttributeError, TypeError):
        raise TypeError(
            f"{target!r} cannot be marked: list its name in `exposed` of the rpc.Policy of the workers it runs on"
        ) from None
