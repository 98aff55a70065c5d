"""A group as a Backend: what torch finds when it looks for the backend of a device of a group.

From torch 2.14 on a Backend may be a Python class, and torch.distributed hands the one of a group to C++, which
takes nothing else. Of a Work that such a Backend returns, C++ hands on only `wait` and `get_future`: not
`is_completed`, `result` and the source of a message. So a group stays a ProcessGroup, whose Works come as they
are; and operations that C++ starts itself, such as `torch.ops.c10d`, go through this.
"""

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch

from ..errors import GroupAbortedError
from ..torch_internals import TorchBackend
from .torch_types import TorchProcessGroup

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


_true = property(lambda _: True)
_false = property(lambda _: False)


@final
class GroupBackend(TorchBackend):
    """Hands everything on to a group, without keeping it alive: the group keeps this."""

    def __init__(self, group: TorchProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)

    # Each must be said: torch looks for those of a Python class until the stack is full.
    supports_splitting = _true
    supports_coalescing = _false
    supports_shrinking = _false
    supports_time_estimate = _false
    _supports_time_estimate = _false
    supports_reconfigure = _false
    supports_window = _false

    @property
    def options(self) -> TorchBackend.Options:
        """The name of the backend, and how long operations may take."""
        group = self._there()
        return TorchBackend.Options(group.getBackendName(), group.timeout)

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Remembers the device of this rank."""
        self._there().eager_connect_single_device(device)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """On ranks that are not in a new group: nothing, as groups are made by their own ranks."""

    def getBackendName(self) -> str:  # noqa: N802
        """The name under which the group's backend is registered."""
        return str(self._there().getBackendName())

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
