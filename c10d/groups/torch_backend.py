"""A group as a torch Backend, which torch's C++ finds when it looks up the backend of a group's device.

From torch 2.14 on a Backend may be a Python class, and torch.distributed passes the Backend of a group to C++,
which accepts nothing else. Of a Work that such a Backend returns, C++ passes on only `wait` and `get_future`, not
`is_completed`, `result` or `source_rank`. So gradwire's group itself stays a ProcessGroup, whose Works are
returned unchanged; only operations that C++ starts, such as those of `torch.ops.c10d`, go through the Backend.
"""

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch

from ...errors import GroupAbortedError
from ...torch_internals import TorchBackend
from ..torch_types import TorchProcessGroup

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
"""The methods that a torch Backend and a ProcessGroup have under the same name."""


_true = property(lambda _: True)
_false = property(lambda _: False)


@final
class GroupBackend(TorchBackend):
    """Forwards everything to a group. The group refers to its Backend, which refers back weakly."""

    def __init__(self, group: TorchProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)

    # All must be defined: torch's lookup of one that a Python class lacks recurses until the stack overflows.
    supports_splitting = _true
    supports_coalescing = _false
    supports_shrinking = _false
    supports_time_estimate = _false
    _supports_time_estimate = _false
    supports_window = _false

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group can be formed anew."""
        return bool(self._require_group().supports_reconfigure)

    def get_reconfigure_handle(self) -> str:
        """Returns the text by which the other members name this process."""
        return str(self._require_group().get_reconfigure_handle())

    def reconfigure(self, opts: Any) -> Any:
        """Forms the group anew."""
        return self._require_group().reconfigure(opts)

    def rank(self) -> int:
        """Returns this process's rank in the group."""
        return int(self._require_group().rank())

    def size(self) -> int:
        """Returns the number of ranks."""
        return int(self._require_group().size())

    @property
    def options(self) -> TorchBackend.Options:
        """The name of the backend, and the default timeout of operations."""
        group = self._require_group()
        return TorchBackend.Options(group.getBackendName(), group.timeout)

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Stores the device of this rank."""
        self._require_group().eager_connect_single_device(device)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing: torch calls it on ranks outside a split, which gradwire does not need."""

    def getBackendName(self) -> str:  # noqa: N802
        """Returns the name under which the group's backend is registered."""
        return str(self._require_group().getBackendName())

    def abort(self) -> None:
        """Ends the operations in flight with GroupAbortedError."""
        self._require_group().abort()

    def shutdown(self) -> None:
        """Releases what the group holds."""
        self._require_group().shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the default timeout of later operations."""
        self._require_group().set_timeout(timeout)

    def _require_group(self) -> Any:
        group = self._group()
        if group is None:
            raise GroupAbortedError("the process group of this backend no longer exists")
        return group


def _forward(name: str) -> Callable[..., Any]:
    def operation(self: GroupBackend, *args: Any) -> Any:
        return getattr(self._require_group(), name)(*args)

    operation.__name__ = name
    operation.__doc__ = f"Calls the group's `{name}`."
    return operation


for _name in OPERATIONS:
    setattr(GroupBackend, _name, _forward(_name))
