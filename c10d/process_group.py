"""The process group: what torch and users hold, and the face of a GroupCore.

It is a torch.distributed.ProcessGroup, so torch's functions, DDP, FSDP and the rest run on it. What is called on
it is a Call (collectives.py); an engine does it (engines/); the caller gets a GroupWork.

It ends with the last reference to it, if nobody has shut it down before.
"""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

import torch

from .call import CollectiveCall
from .debug.store_barrier import StoreBarrier
from .engines.base import Engine
from .group_core import GroupCore
from .group_options import GroupOptions
from .own_backend import OwnBackend
from .stores.base import Timeout, to_seconds
from .torch_types import TorchStore
from .work import GroupWork

__all__ = ["ProcessGroup"]


@final
class ProcessGroup(OwnBackend):
    """A group of ranks.

    Made by torch.distributed's init_process_group and new_group with the backends that gradwire registers.

    Args:
        core: what it consists of; the group ends it.
        make_part: makes a group of some of its ranks, with this name, timeout and options.
    """

    def __init__(
        self,
        core: GroupCore,
        make_part: "Callable[[Sequence[int], str, timedelta, GroupOptions], ProcessGroup]",
    ) -> None:
        super().__init__(core.rank, core.size)
        self._core = core
        self._make_part = make_part
        self._barrier = StoreBarrier(core.store, core.rank, core.global_ranks)
        self._finalizer = weakref.finalize(self, core.hand_over)
        self._finalizer.atexit = False  # a process that ends says goodbye by itself

    def engine(self, device_type: str) -> Engine:
        """That of a type of device, which is made when it is first asked for: all ranks must do so together."""
        return self._core.engine(device_type)

    def start(self, call: CollectiveCall) -> GroupWork | None:
        """Has the engine of the tensors' device do what was called for.

        Returns None if the caller wanted to wait at once: that has been done.
        """
        pending = self._core.start(call)
        if call.now:
            return None
        devices = _devices(call) if self._core.engine(call.device.type).uses_streams else ()
        return GroupWork(call.name, call.result, pending, devices, group=self)

    def abort(self) -> None:
        """Ends all that is in flight with GroupAbortedError, on this rank; the others notice that it is gone."""
        self._core.abort()

    def shutdown(self) -> None:
        """Gives back what the group holds. What is still in flight ends with GroupAbortedError."""
        self._finalizer.detach()
        self._core.shutdown()

    def at_end(self, function: Callable[[], None]) -> None:
        """Has `function` called once when the group has shut down, or after its last reference has gone."""
        self._core.at_end(function)

    def record(self) -> dict[str, Any]:
        """What the flight recorder has, as JSON."""
        return self._core.record()

    # What torch asks of a group.

    @property
    def options(self) -> GroupOptions:
        """How it behaves."""
        return self._core.options

    def split_group(  # type: ignore[override]  # there is None where a rank is in no part
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: GroupOptions | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> "ProcessGroup | None":
        """Makes a group of some ranks, which all of them call; None on others.

        What torch.distributed.split_group calls.

        Args:
            ranks: as this group numbers them.
            timeout: of its operations; this group's if None.
            opts: this group's if None.
            group_name: not used before in this group.
            group_desc: what it is for.
            device_types: what it is for; those of this group if None. Engines are made when they are used.
        """
        if self.rank() not in ranks:
            return None
        name = group_name or f"part {sorted(ranks)} of {self._core.name}"
        part = self._make_part(ranks, name, timeout or self._core.timeout, opts or self._core.options)
        part._set_group_name(name)
        part._set_group_desc(group_desc or "undefined")
        part.expected_devices = self._device_types if device_types is None else device_types
        return part

    def monitored_barrier(
        self,
        timeout: Timeout | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        """Returns once all ranks have called it, as barrier does, but goes through the group's store.

        Args:
            timeout: a timedelta or seconds; that of the group if None.
            wait_all_ranks: the error on rank 0 names all missing ranks in torch's words as well.

        Raises:
            CollectiveTimeoutError: ranks did not come in time; it names every one, on all ranks that came.
        """
        self._barrier.wait(
            self.timeout.total_seconds() if timeout is None else to_seconds(timeout), all_ranks=wait_all_ranks
        )

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has called."""
        return self._core.collectives()

    def _wait_for_pending_works(self) -> None:
        """Waits for what is in flight, but for receives, however it ends."""
        self._core.wait_for_all()

    @property
    def timeout(self) -> timedelta:
        """How long operations may take that do not say it themselves."""
        return self._core.timeout

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The number that each rank of the group has in the default group; errors name ranks so."""
        return self._core.global_ranks

    def getBackendName(self) -> str:  # noqa: N802
        """What it is registered as."""
        return self._core.backend

    def get_group_store(self) -> TorchStore:
        """The store that the ranks met through."""
        return self._core.store

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations may take that do not say it themselves."""
        if timeout <= timedelta(0):
            raise ValueError(f"the timeout is {timeout}: give a positive timedelta")
        self._core.set_timeout(timeout)

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name by which torch knows it."""
        return self._core.name

    @property
    def group_desc(self) -> str:
        """What it is for, as its maker said."""
        return self._core.description

    def getGroupName(self) -> str:  # noqa: N802
        """As group_name; torch's C++ asks so."""
        return self._core.name

    def getGroupDesc(self) -> str:  # noqa: N802
        """As group_desc; torch's C++ asks so."""
        return self._core.description

    def _set_group_name(self, name: str) -> None:
        self._core.name = name

    def _set_group_desc(self, description: str) -> None:
        self._core.description = description


def _devices(call: CollectiveCall) -> list[torch.device]:
    """Those with streams that its tensors are on."""
    return list({tensor.device for tensor in (*call.inputs, *call.outputs) if tensor.device.type != "cpu"})
