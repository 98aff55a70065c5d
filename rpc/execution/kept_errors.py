"""Exceptions that are kept, to be raised later and perhaps by several threads."""

import copy

from ...errors import rebuild

__all__ = ["copy_error", "is_plain", "text_of"]


def copy_error(error: Exception) -> Exception:
    """An error to raise while the given one is kept; that one itself if its class cannot be copied."""
    try:
        if is_plain(error):
            return rebuild(type(error), error.args, error.__dict__)
        copied = copy.copy(error)
    except Exception:
        return error
    return copied if type(copied) is type(error) else error


def is_plain(error: Exception) -> bool:
    """Is everything in `args` and `__dict__`? Not if a base in C has fields, or the class knows better."""
    has_fields = isinstance(error, OSError | UnicodeError | ImportError | SyntaxError | StopIteration)
    own_way = type(error).__reduce__ is not BaseException.__reduce__
    return not has_fields and not own_way and type(error).__reduce_ex__ is object.__reduce_ex__


def text_of(error: BaseException) -> str:
    """What an exception says. Never raises."""
    try:
        return str(error)
    except Exception:
        return "(its text cannot be shown)"
