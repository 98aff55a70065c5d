"""Checks of the arguments that the calling functions share, and of options that are counts."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["CALL_PARTS", "UNSET_RPC_TIMEOUT", "check_call", "check_counts", "check_received", "check_timeout"]

UNSET_RPC_TIMEOUT = -1.0
"""The timeout argument that means "the timeout of the options"."""

CALL_PARTS = ("the function", "args", "kwargs")
"""Names of the parts of a call, for a SerializationError."""


def check_timeout(timeout: float) -> float | None:
    """Returns a call's timeout in seconds as the agent takes it; None for that of the options.

    Raises ValueError if the timeout is negative, infinite or not a number.
    """
    if timeout == UNSET_RPC_TIMEOUT:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r}: give seconds, 0 for none, or leave it out")
    return float(timeout)


def check_call(
    function: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns the function, the positional arguments as a tuple and the named arguments as a dict.

    Raises TypeError if the function is not callable, args is no sequence, or kwargs has keys that are not strings.
    """
    if not callable(function):
        raise TypeError(f"func is {function!r}, which cannot be called")
    is_tuple = type(args) is tuple or args is None  # mostly; to ask for a Sequence takes longer than the rest
    if not is_tuple and (isinstance(args, str | bytes) or not isinstance(args, Sequence)):
        raise TypeError(f"args is {args!r}: give a tuple, (x,) for one argument")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(k, str) for k in kwargs)):
        raise TypeError(f"kwargs is {kwargs!r}: give a dictionary of names")
    return function, tuple(args or ()), dict(kwargs or {})


def check_received(args: object) -> None:
    """Raises TypeError if positional arguments of another worker are neither a tuple nor a list.

    Other sequences have 2**60 items in a few bytes.
    """
    if not isinstance(args, tuple | list):
        raise TypeError(f"args is a {type(args).__name__}: give a tuple")


def check_counts(options: object, *counts: str) -> None:
    """Checks that options are whole numbers of at least 1. Raises ValueError."""
    for name in counts:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: give a whole number, at least 1")
