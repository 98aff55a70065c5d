"""Private methods of torch's RRef, for gradwire's."""

from typing import Any

import torch

from ..errors import RRefError
from ..rpc.contracts.agent import holder
from ..rref.rref import RRef
from .pickling import SentReference

__all__ = ["METHODS"]


def _serialize(self: RRef[Any]) -> SentReference:
    """Returns what stands for this reference in the pickle of a call, for a program's own pickler or reducer.

    torch returns the ids of a new fork; here, that is made when the message is sent.

    Raises:
        RRefError: the reference was released at shutdown.
    """
    handle = self._handle
    if handle.agent is not holder.get():
        raise RRefError(f"{self} was released at shutdown. Cannot call fork an UserRRef after deletion.")
    handle.check_usable(self, "fork an UserRRef")
    return SentReference(self)


def _deserialize(fork: object) -> RRef[Any]:
    """Returns the reference for what `_serialize` has returned. Raises RRefError if it is something else."""
    if not isinstance(fork, SentReference):
        raise RRefError(f"{fork!r} cannot be deserialized to an RRef: pass RRefs as arguments or results of calls")
    return fork.reference


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
