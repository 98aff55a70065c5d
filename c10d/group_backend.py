"""A group as a Backend: what torch's C++ finds when it looks for the backend of a device.

From torch 2.14 on a Backend may be a Python class. Of a Work that such a Backend returns, C++ hands on only `wait`
and `get_future`: `is_completed`, `result` and the source of a message do not reach the caller. So a group stays a
ProcessGroup, whose Works come as they are; and operations that C++ starts itself, such as `torch.ops.c10d`, go
through this.
"""

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

from ..errors import GroupAbortedError
from ..torch_internals import TorchBackend
from .collectives import Collectives

__all__ = ["OPERATIONS", "GroupBackend"]

OPERATIONS = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "gather_single",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
)
"""The methods that a Backend and a group have under one name."""


@final
class GroupBackend(TorchBackend):
    """Hands everything on to a group, without keeping it alive: the group keeps this."""

    def __init__(self, group: Collectives) -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)

    def getBackendName(self) -> str:  # noqa: N802
        """The name under which the group's backend is registered."""
        return self._there().getBackendName()

    def abort(self) -> None:
        """Ends what is in flight with GroupAbortedError."""
        self._there().abort()

    def shutdown(self) -> None:
        """Releases what the group holds."""
        self._there().shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations."""
        self._there().set_timeout(timeout)

    def _there(self) -> Any:
        group = self._group()
        if group is None:
            raise GroupAbortedError("the group of this backend is gone")
        return group


def _handing_on(name: str) -> Callable[..., Any]:
    def operation(self: GroupBackend, *args: Any) -> Any:
        return getattr(self._there(), name)(*args)

    operation.__name__ = name
    operation.__doc__ = f"As the group's `{name}`."
    return operation


for _name in OPERATIONS:
    setattr(GroupBackend, _name, _handing_on(_name))
