"""Which functions and classes a message may name, if the policy does not accept anything.

A mark is an attribute of the function or class. So nothing has to be registered, and what a module exposes can be
named once this worker has imported the module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar, final

__all__ = ["Exposure", "MethodGuard", "expose", "exposure_of", "guarded_by", "message_value"]

T = TypeVar("T")

_MARK = "_gradwire_exposure"


MethodGuard = Callable[[object, str], None]
"""Raises PolicyError if the sender of a message may not call a method, or read an attribute, of a value."""


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
