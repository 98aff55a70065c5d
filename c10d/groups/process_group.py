"""The process group that users and torch hold.

ProcessGroup is a subclass of torch.distributed.ProcessGroup, so torch's functions, DDP, FSDP and others run on it.
Its methods turn each operation into a CollectiveCall (collectives.py); a GroupCore has an engine carry it out; the
caller gets a GroupWork.

It is its own backend, for all devices: torch's groups have one for each device, and torch.distributed looks for it
when it splits groups, connects devices early, or chooses the device for objects and barriers.

A group that nobody has shut down ends after its last reference is gone. A group that is formed anew gets other
ranks, and another GroupCore, but stays the same object.

From torch 2.14 on a Backend may be a Python class, and torch.distributed passes the Backend of a group to C++,
which accepts nothing else. Of a Work that such a Backend returns, C++ passes on only `wait` and `get_future`, not
`is_completed`, `result` or `source_rank`. So a group stays a ProcessGroup, whose Works are returned unchanged;
only operations that C++ starts, such as those of `torch.ops.c10d`, go through its GroupBackend.
"""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import Backend

from ...errors import GroupAbortedError
from ...torch_internals import HAS_PYTHON_BACKENDS, BackendConfig, TorchBackend, set_group_ranks
from ..debug.rank_checks import StoreBarrier
from ..engines.base import Engine
from ..engines.collective_call import CollectiveCall
from ..stores.base import Timeout, to_seconds
from ..torch_types import TorchProcessGroup, TorchStore
from .collectives import Collectives
from .core import GroupCore
from .member import GroupHandle, GroupMember
from .options import GroupOptions
from .work import GroupWork

__all__ = ["OPERATIONS", "GroupBackend", "ProcessGroup", "require_no_hints"]

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


@final
class ProcessGroup(Collectives):
    """A process group on gradwire's engines.

    Made by torch.distributed's init_process_group and new_group for the backends that gradwire registers.

    Args:
        member: this process's membership, whose ranks can change. The group closes its core.
        make_subgroup: makes a group of some of this group's ranks, with this name, timeout and options. All of
            these ranks call it together.
    """

    supports_splitting = True
    supports_coalescing = False  # by torch's calls around several operations; a list in one call is one operation
    supports_shrinking = False
    supports_time_estimate = False
    _supports_time_estimate = False  # torch's name for it from 2.15 on

    expected_devices: Sequence[torch.device] = ()
    """The value of `_device_types` until torch has registered the group. torch reads it during a split."""

    def __init__(
        self,
        member: GroupMember,
        make_subgroup: "Callable[[GroupMember, Sequence[int], str, timedelta, GroupOptions], ProcessGroup]",
    ) -> None:
        super().__init__(member.core.rank, member.core.size)  # type: ignore[call-arg]  # a form that the stubs lack
        self._make_subgroup = make_subgroup
        self._member = member
        self._use_core(member.core)

    def _use_core(self, core: GroupCore) -> None:
        self._core = core
        self._store_barrier = StoreBarrier(core.store, core.rank, core.global_ranks)
        self._finalizer = weakref.finalize(self, core.close_in_background)
        self._finalizer.atexit = False  # at interpreter exit the failure detector tells the other ranks

    def engine(self, device_type: str) -> Engine:
        """Returns the engine for a type of device.

        The first call for a device makes the engine, so all ranks must make that call together.
        """
        return self._core.engine(device_type)

    def start(self, call: CollectiveCall) -> GroupWork | None:
        """Starts an operation on the engine of the tensors' device.

        Returns None if the caller asked to wait; the operation is then done.
        """
        pending = self._core.start(call)
        if call.is_sync:
            return None
        devices = []
        if self._core.engine(call.device.type).uses_streams:
            tensors = (*call.inputs, *call.outputs)
            devices = list({tensor.device for tensor in tensors if tensor.device.type != "cpu"})
        return GroupWork(call.name, call.result, pending, devices, group=self)

    def abort(self) -> None:
        """Ends this rank's operations in flight with GroupAbortedError. The other ranks notice that it left."""
        self._core.abort()

    def shutdown(self) -> None:
        """Releases what the group holds. Operations still in flight raise GroupAbortedError."""
        self._finalizer.detach()
        self._core.shutdown()

    def add_close_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the group has shut down, or has ended after its last reference was dropped."""
        self._core.add_close_callback(callback)

    def flight_record(self) -> dict[str, Any]:
        """Returns the group and the last operations in its flight recorder, as JSON values."""
        return self._core.flight_record()

    @property
    def failure(self) -> Exception | None:
        """The error that ended the group, which every operation raises; None while the group works.

        torch's C++, such as DDP's, raises only its text, as a RuntimeError.
        """
        return self._core.failure

    # Changes of the ranks, under the names of torch 2.14.

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group can be formed anew."""
        return not self._member.cannot_reconfigure

    def get_reconfigure_handle(self) -> str:
        """Returns the text by which the other members name this process in `reconfigure`."""
        return self._handle().to_text()

    def reconfigure(self, opts: Any) -> GroupWork:
        """Forms the group anew, by options of gradwire or torch; see gradwire.c10d.reconfigure."""
        require_no_hints(opts.hints)
        self._member.use_uuid(opts.uuid)
        return self.form_anew(f"uuid/{opts.uuid}", opts.handles, opts.timeout)

    def rendezvous_reconfigure(
        self, *, timeout: Timeout | None, min_size: int | None, max_size: int | None, window: Timeout
    ) -> tuple[int, list[str]]:
        """Agrees with all who call this on the members of a group; see gradwire.c10d.rendezvous_reconfigure."""
        least = min_size if min_size is not None else (1 if self._core.size > 0 else 2)
        if least < 1 or (max_size is not None and max_size < least):
            raise ValueError(
                f"min_size is {least} and max_size {max_size}: give at least 1, and max_size no less than min_size"
            )
        return self._member.agree(
            self._handle(),
            min_size=least,
            max_size=max_size,
            window_s=to_seconds(window),
            timeout_s=self._timeout_s(timeout),
        )

    def form_anew(self, key: str, handles: Collection[str], timeout: Timeout | None) -> GroupWork:
        """Forms the group of these members, who all give this key. The Work that it returns is done."""
        core = self._member.reconfigure(key, handles, self._timeout_s(timeout))
        self._finalizer.detach()
        self._use_core(core)
        set_group_ranks(self, core.global_ranks)
        return GroupWork("reconfigure", [], None)

    def _handle(self) -> GroupHandle:
        return self._member.handle(is_default_group=self is dist.group.WORLD)

    def _timeout_s(self, timeout: Timeout | None) -> float:
        return self.timeout.total_seconds() if timeout is None else to_seconds(timeout)

    # Methods and properties that torch calls.

    def rank(self) -> int:
        """Returns this process's rank in the group; -1 if the group has no ranks yet."""
        return self._core.rank

    def size(self) -> int:
        """Returns the number of ranks; -1 if the group has none yet."""
        return self._core.size

    getRank, getSize = rank, size  # noqa: N815  # for torch's C++

    @property
    def options(self) -> GroupOptions:
        """The options with which the group was made."""
        return self._core.options

    def split_group(  # type: ignore[override]  # returns None on ranks that are not in the new group
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: GroupOptions | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> "ProcessGroup | None":
        """Makes a group of some of this group's ranks, which all of them must call. torch's split_group calls it.

        No other part of this group may have had the name. Returns None on ranks that are not in the new group.
        """
        if self.rank() not in ranks:
            return None
        name = group_name or f"part {sorted(ranks)} of {self._core.name}"
        subgroup = self._make_subgroup(
            self._member, ranks, name, timeout or self._core.timeout, opts or self._core.options
        )
        subgroup._set_group_desc(group_desc or "undefined")
        subgroup.expected_devices = self._device_types if device_types is None else device_types
        return subgroup

    def monitored_barrier(self, timeout: Timeout | None = None, wait_all_ranks: bool = False) -> None:
        """Waits until all ranks have called it; see gradwire.c10d.monitored_barrier."""
        self._core.require_own_process()
        self._store_barrier.wait(
            self._timeout_s(timeout), self._core.wait_for_all_ranks, wait_all_ranks=wait_all_ranks
        )

    def _get_sequence_number_for_group(self) -> int:
        return self._core.collective_count()

    def _wait_for_pending_works(self) -> None:
        self._core.wait_for_operations()

    @property
    def timeout(self) -> timedelta:
        """Default timeout of operations."""
        return self._core.timeout

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The rank in the default group of each rank of this group. Errors name ranks by it."""
        return self._core.global_ranks

    def getBackendName(self) -> str:  # noqa: N802
        """Returns the name under which the group's backend is registered."""
        return self._core.backend

    def get_group_store(self) -> TorchStore:
        """Returns the store of this group."""
        return self._core.store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the default timeout of later operations."""
        if timeout <= timedelta(0):
            raise ValueError(f"the timeout is {timeout}: give a positive timedelta")
        self._core.set_timeout(timeout)

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name under which torch registers the group."""
        return self._core.name

    @property
    def group_desc(self) -> str:
        """The description that was given when the group was made."""
        return self._core.description

    def getGroupName(self) -> str:  # noqa: N802
        """Returns `group_name`, for torch's C++."""
        return self._core.name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Returns `group_desc`, for torch's C++."""
        return self._core.description

    def _set_group_name(self, name: str) -> None:
        self._core.name = name

    def _set_group_desc(self, description: str) -> None:
        self._core.description = description

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices for which the group's configuration names engines."""
        try:
            configuration = dist.get_backend_config(self)
        except (TypeError, ValueError):
            return list(self.expected_devices)
        return [torch.device(name) for name in BackendConfig(Backend(configuration)).get_device_backend_map()]

    @cached_property
    def as_backend(self) -> GroupBackend:
        """The group as a torch Backend, which exists from torch 2.14 on."""
        return GroupBackend(self)

    def _get_backend(self, device: torch.device | str) -> Any:
        """Returns the backend of a device: this group; from torch 2.14 on, which passes it to C++, its Backend."""
        types = [each.type for each in self._device_types]
        if types and torch.device(device).type not in types:
            raise RuntimeError(f"the group has no backend for {device}, only for {', '.join(types)}")
        return self.as_backend if HAS_PYTHON_BACKENDS else self

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Stores the device of this rank. Engines connect with the first operation."""
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing: torch calls it on ranks outside a split, which gradwire does not need."""

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the flight recorder counts collectives."""

    def _has_hooks(self) -> bool:
        """Returns False: hooks on completed Works exist in torch for NCCL only."""
        return False

    @property  # type: ignore[misc]  # torch's can be set
    def use_pg_for_symm_mem_rendezvous(self) -> bool:
        """Whether symmetric memory exchanges its handles by collectives: False, it uses the store."""
        return False


def require_no_hints(hints: Mapping[str, str]) -> None:
    """Raises ValueError if there are hints. Called first, so that a refused call does not end the group."""
    if hints:
        raise ValueError(f"the hints are {dict(hints)!r}: leave them out, gradwire's engines have none")


for _name in (*OPERATIONS, *_OTHER_METHODS):
    setattr(GroupBackend, _name, _forward(_name))
