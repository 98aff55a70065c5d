"""Converts exceptions of remote functions to those that torch raises.

torch sends the class and the message of an exception, and the caller constructs it anew from the message alone.
"""

import re

import torch

from ..errors import GradwireError

__all__ = ["as_torch_raises"]

_WRONG_ARGUMENTS = re.compile(r'received an invalid combination of arguments|required positional arguments?: "')
"""Matches the TypeErrors of torch's operators for wrong arguments; Python's own use single quotes."""


def as_torch_raises(error: Exception) -> Exception:
    """Returns what torch raises for a remote exception: the same if its class can be made from a message alone."""
    cls = type(error)
    if isinstance(error, GradwireError):
        return error
    # torch turns torch.jit.Error into RuntimeError, although its class could be made from a message.
    converted: Exception = RuntimeError(str(error))
    if cls is TypeError and _WRONG_ARGUMENTS.search(str(error)):
        converted = RuntimeError(
            f"Overloaded torch operator invoked from Python failed to match any schema: {error}"
        )
    elif cls is not torch.jit.Error:
        try:
            cls(str(error))
        except Exception as problem:
            converted = RuntimeError(
                f"Failed to create original exception type. Error msg was {problem} "
                f"Original exception on remote side was {cls.__name__}: {error}"
            )
        else:
            return error
    converted.__cause__ = error.__cause__
    return converted
