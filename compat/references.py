"""The private methods of torch's RRef."""

from typing import Any, NoReturn

import torch

from ..errors import RRefError
from ..rpc.contracts.agent import holder
from ..rref.rref import RRef

__all__ = ["METHODS"]


def _serialize(self: RRef[Any]) -> NoReturn:
    """Makes a fork and returns what names it: not here, where references travel in messages only.

    Raises:
        RRefError: always; it says what is wrong with the reference, if something is.
    """
    handle = self._handle
    if handle.agent is not holder.get():
        raise RRefError(f"{self} has gone with its agent. Cannot call fork an UserRRef after deletion.")
    handle.check_usable(self, "fork an UserRRef")
    raise RRefError(f"{self} cannot be serialized by itself: pass it to a call, or return it from one")


def _deserialize(fork: object) -> NoReturn:
    """Makes a reference of what `_serialize` returns. Raises RRefError: always."""
    raise RRefError(f"{fork!r} cannot become a reference: references travel in calls and their results")


def _get_profiling_future(self: RRef[Any]) -> torch.futures.Future[Any]:
    """Done when the call that makes the value is over, and its event in the profile.

    Raises:
        RRefError: this worker did not create the reference by `remote`.
    """
    return self._get_future()


METHODS = {
    "_deserialize": staticmethod(_deserialize),
    "_get_profiling_future": _get_profiling_future,
    "_serialize": _serialize,
}
"""By name."""
