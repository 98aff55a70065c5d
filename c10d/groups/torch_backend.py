"""A group as a torch Backend, which torch's C++ finds when it looks up the backend of a group's device.

From torch 2.14 on a Backend may be a Python class, and torch.distributed passes the Backend of a group to C++,
which accepts nothing else. Of a Work that such a Backend returns, C++ passes on only `wait` and `get_future`, not
`is_completed`, `result` or `source_rank`. So gradwire's group itself stays a ProcessGroup, whose Works are
returned unchanged; only operations that C++ starts, such as those of `torch.ops.c10d`, go through the Backend.
"""

import weakref
from collections.abc import Callable
from typing import Any, final

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
"""The operations that a torch Backend and a ProcessGroup have under the same name."""

_OTHER_METHODS = (
    "abort",
    "eager_connect_single_device",
    "getBackendName",
    "get_reconfigure_handle",
    "perform_nocolor_split",
    "rank",
    "reconfigure",
    "set_timeout",
    "shutdown",
    "size",
)

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

    @property
    def options(self) -> TorchBackend.Options:
        """The name of the backend, and the default timeout of operations."""
        group = self._require_group()
        return TorchBackend.Options(group.getBackendName(), group.timeout)

    def _require_group(self) -> Any:
        group = self._group()
        if group is None:
            raise GroupAbortedError("the process group of this backend no longer exists")
        return group


def _forward(name: str) -> Callable[..., Any]:
    def method(self: GroupBackend, *args: Any) -> Any:
        return getattr(self._require_group(), name)(*args)

    method.__name__ = name
    method.__doc__ = f"Calls the group's `{name}`."
    return method


for _name in (*OPERATIONS, *_OTHER_METHODS):
    setattr(GroupBackend, _name, _forward(_name))
