"""Exceptions that are stored, to be raised later and perhaps by several threads."""

import copy

from ...errors import rebuild_exception

__all__ = ["copy_error", "is_plain", "text_of", "without_frames"]


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
