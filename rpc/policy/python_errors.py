"""Which exceptions of Python a message may have: those whose parts Python can handle, whatever they are.

Most classes keep what they are given. Those below do more with it, in C. They make tuples of what may be a range
of 2**60 numbers, hash it, and take numbers for indices: for the text of a UnicodeDecodeError, Python before 3.12.5
reads memory at its `start`, wherever that is.
"""

from inspect import getattr_static
from types import WrapperDescriptorType
from typing import Any

__all__ = ["check_error_arguments", "check_error_state"]

MAX_POSITION = 1 << 20
"""The largest line number, and column, of a SyntaxError. Showing it makes as many characters."""

_ATOMS = (type(None), bool, int, float, str, bytes)

_POSITIONS = ("lineno", "offset", "end_lineno", "end_offset")


def check_error_arguments(cls: type, args: tuple[Any, ...]) -> None:
    """Checks the arguments of a class of exceptions, before one is made.

    Raises:
        TypeError: they are of other types than Python gives.
    """
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


def check_error_state(error: BaseException) -> None:
    """Checks the numbers in an exception that has been made, or whose state has been set.

    Raises:
        ValueError: one is out of range.
    """
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
