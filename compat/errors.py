"""Errors of remote functions as torch's callers get them.

torch sends the class of an exception and a text, and makes the exception anew from the text alone.
"""

import re

import torch

from ..errors import GradwireError

__all__ = ["as_torch_raises"]

_WRONG_OPERANDS = re.compile(r'received an invalid combination of arguments|required positional arguments?: "')
"""How torch's operators complain of their arguments. Python's functions put names in other quotes."""

_SEEN = "Original exception on remote side was"


def as_torch_raises(error: Exception) -> Exception:
    """The error that torch would raise for a remote one; that one itself where its class takes a text alone."""
    kind = type(error)
    if isinstance(error, GradwireError):
        return error
    # What torch.jit raises is no RuntimeError, and never reaches torch's callers.
    made: Exception = RuntimeError(str(error))
    if kind is TypeError and _WRONG_OPERANDS.search(str(error)):
        made = RuntimeError(f"Overloaded torch operator invoked from Python failed to match any schema: {error}")
    elif kind is not torch.jit.Error:
        try:
            kind(str(error))
        except Exception as problem:
            seen = f"{_SEEN} {kind.__name__}: {error}"
            made = RuntimeError(f"Failed to create original exception type. Error msg was {problem} {seen}")
        else:
            return error
    made.__cause__ = error.__cause__
    return made
