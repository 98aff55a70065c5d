"""Private methods of torch's RRef, for gradwire's."""

from typing import Any, NoReturn

import torch

from ..errors import RRefError
from ..rpc.contracts.agent import holder
from ..rref.rref import RRef

__all__ = ["METHODS"]


def _serialize(self: RRef[Any]) -> NoReturn:
    """Always raises RRefError: references can only be pickled in messages. torch returns a new fork's ids."""
    handle = self._handle
    if handle.agent is not holder.get():
        raise RRefError(f"{self} was released at shutdown. Cannot call fork an UserRRef after deletion.")
    handle.check_usable(self, "fork an UserRRef")
    raise RRefError(f"{self} cannot be serialized outside a call: pass it as an argument, or return it")


def _deserialize(fork: object) -> NoReturn:
    """Always raises RRefError, since `_serialize` returns nothing to deserialize."""
    raise RRefError(f"{fork!r} cannot be deserialized to an RRef: pass RRefs as arguments or results of calls")


def _get_profiling_future(self: RRef[Any]) -> torch.futures.Future[Any]:
    """Returns a future that is done when the call that creates the value, and its profiler event, have ended.

    Raises:
        RRefError: the reference was not created by `remote` on this worker.
    """
    return self._get_future()


METHODS = {
    "_deserialize": staticmethod(_deserialize),
    "_get_profiling_future": _get_profiling_future,
    "_serialize": _serialize,
}
"""The methods, by name."""
