"""The private methods of torch's RRef."""

from typing import Any, NoReturn

from ..errors import RRefError
from ..rpc.agent import holder
from ..rpc.failures import copy_error
from ..rref.rref import RRef, UserHandle

__all__ = ["METHODS"]


def _serialize(self: RRef[Any]) -> NoReturn:
    """Makes a fork and returns what names it: not here, where references travel in messages only.

    Raises:
        RRefError: always; it says what is wrong with the reference, if something is.
    """
    handle = self._handle
    if handle.agent is not holder.get():
        raise RRefError(f"{self} has gone with its agent. Cannot call fork an UserRRef after deletion.")
    if isinstance(handle, UserHandle) and handle.fork.error is not None:
        raise copy_error(handle.fork.error)
    raise RRefError(f"{self} cannot be serialized by itself: pass it to a call, or return it from one")


def _deserialize(fork: object) -> NoReturn:
    """Makes a reference of what `_serialize` returns. Raises RRefError: always."""
    raise RRefError(f"{fork!r} cannot become a reference: references travel in calls and their results")


METHODS = {"_deserialize": staticmethod(_deserialize), "_serialize": _serialize}
"""By name."""
