"""Exceptions that are stored, to be raised later and perhaps by several threads, or that are shown."""

import copy

from ...errors import rebuild_exception
from ...net.security import printable

__all__ = ["copy_error", "is_plain", "printable_text", "text_of", "without_frames"]

MAX_SHOWN = 500
"""Characters of the text of an error that a line of a log shows."""


def copy_error(error: Exception) -> Exception:
    """Returns a copy of a stored error, to be raised; the error itself if its class cannot be copied."""
    try:
        if is_plain(error):
            return rebuild_exception(type(error), error.args, error.__dict__)
        copied = copy.copy(error)
    except Exception:
        return error
    return copied if type(copied) is type(error) else error


def is_plain(error: Exception) -> bool:
    """Returns whether an error's state is in `args` and `__dict__`, and its class does not define its pickling."""
    has_c_fields = isinstance(error, OSError | UnicodeError | ImportError | SyntaxError | StopIteration)
    is_reduced_by_class = (
        type(error).__reduce__ is not BaseException.__reduce__
        or type(error).__reduce_ex__ is not object.__reduce_ex__
    )
    return not has_c_fields and not is_reduced_by_class


def without_frames(error: Exception) -> Exception:
    """Returns the exception without its traceback and context, and those of its causes.

    Their frames, and the callers of those, would keep all of their local variables as long as it is stored.
    """
    each: BaseException | None = error
    seen = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        each.__context__ = each.__traceback__ = None
        each = each.__cause__
    return error


def text_of(error: BaseException) -> str:
    """Returns the text of an exception. Never raises."""
    try:
        return str(error)
    except Exception:
        return "(its text cannot be shown)"


def printable_text(error: BaseException) -> str:
    """Returns the text of an exception that another worker may have made, for a log. Never raises."""
    return printable(text_of(error), MAX_SHOWN)
