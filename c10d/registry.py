"""Engines by name: gradwire's and those of third parties, as backends of torch.distributed.

torch keeps the register; an engine's name is a backend's name. A group that is made for one device finds the
engines of the others in the group's configuration, such as `"cpu:gradwire_mpi,cuda:gradwire_nccl"`.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch.distributed
from torch.distributed import Backend

from ..errors import UnsupportedOperationError
from ..torch_internals import (
    HAS_PYTHON_BACKENDS,
    BackendConfig,
    backend_creator,
    backend_devices,
    backend_names,
    register_group_backend,
)
from .collectives import Collectives
from .dynamo import exclude_from_dynamo
from .engines.base import Engine, EngineFactory, Setup
from .group_core import GroupCore
from .group_options import GroupOptions
from .process_group import ProcessGroup
from .stores.prefix import PrefixStore
from .torch_types import TorchStore
from .work import GroupWork

__all__ = ["GroupMaker", "register_engine"]


exclude_from_dynamo(Collectives, GroupCore, ProcessGroup, GroupWork)


def register_engine(name: str, factory: EngineFactory, devices: Sequence[str] = ("cpu",)) -> None:
    """Makes an engine known, so that `init_process_group(name)` and `new_group(backend=name)` make groups on it.

    Args:
        name: of the backend; it may be combined as in `"cpu:gloo,cuda:name"`.
        factory: an Engine class, or what makes an engine of a Setup.
        devices: types of the devices whose tensors it takes.

    Raises:
        ValueError: the name or the devices cannot be used.
    """
    if not name.isidentifier():
        raise ValueError(f"an engine cannot be called {name!r}: torch reads ':' and ',' in it; use letters and _")
    if not devices:
        raise ValueError(f"engine {name!r} is registered for no device: name at least one, such as 'cpu'")
    Backend.register_backend(name, GroupMaker(name, factory), extended_api=True, devices=list(devices))


@final
@dataclass(frozen=True, slots=True)
class GroupMaker:
    """Makes a process group when torch asks for a backend."""

    name: str
    factory: EngineFactory

    def __call__(self, options: Any, group_options: GroupOptions | None = None) -> ProcessGroup:
        """A group of the ranks that call this together.

        Its engine for the CPU, if this backend takes CPU tensors, is made now, while all ranks are here; those of
        other devices with the first tensor there, for only then torch says which they are.
        """
        if getattr(options, "enable_reconfigure", False):
            raise UnsupportedOperationError(
                self.name, "change the ranks of a group", "leave out enable_reconfigure, and make the group anew"
            )
        if not isinstance(group_options, GroupOptions | None):
            raise TypeError(f"pg_options is {group_options!r}: give gradwire.c10d.GroupOptions")
        group_options = group_options or GroupOptions()
        store = _fresh(options)
        core = GroupCore(
            store,
            options.group_rank,
            global_ranks=_global_ranks(options),
            backend=self.name,
            timeout=group_options.timeout_instead_of(options.timeout),
            options=group_options,
            make_engine=lambda device, core: _maker(device, found()).make(_setup(device, options, store, core)),
        )
        core.at_end(store.close)  # with all stores that look into it
        group = ProcessGroup(core, partial(self._part, options))
        found = weakref.ref(group)  # engines are made while somebody calls the group
        if HAS_PYTHON_BACKENDS:
            register_group_backend(group, group.as_backend, _all_devices())
        try:
            if options.group_size > 1:
                core.watch()
            if "cpu" in backend_devices(self.name):
                core.adopt("cpu", self.factory(_setup("cpu", options, store, core)), self.name)
        except BaseException:
            group.shutdown()
            raise
        return group

    def make(self, setup: Setup) -> tuple[str, Engine]:
        """The name, and an engine."""
        return self.name, self.factory(setup)

    def _part(
        self, options: Any, ranks: Sequence[int], name: str, timeout: timedelta, group_options: GroupOptions
    ) -> ProcessGroup:
        """A group of some of the ranks of the group with these options; they call it together."""
        whole = _global_ranks(options)
        part = _PartOptions(
            store=PrefixStore(f"part/{name}", options.store),
            group_rank=list(ranks).index(options.group_rank),
            group_size=len(ranks),
            timeout=timeout,
            group_id=name,
            global_ranks_in_group=[whole[rank] for rank in ranks],
        )
        return self(part, group_options)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _PartOptions:
    """What torch gives to makers of backends, with torch's names."""

    store: TorchStore
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: Sequence[int]


def _all_devices() -> set[str]:
    """The types of devices that any of the engines takes: all that tensors of a group can be on."""
    makers = [name for name in backend_names() if isinstance(backend_creator(name), GroupMaker)]
    return {device for name in makers for device in backend_devices(name)}


def _global_ranks(options: Any) -> tuple[int, ...]:
    """Those of the group's ranks; torch gives none for the default group."""
    return tuple(options.global_ranks_in_group) or tuple(range(options.group_size))


def _fresh(options: Any) -> PrefixStore:
    """A place in the store that no earlier group of this name has used.

    Processes that destroy the default group and make it again may meet in the same store, as under torchrun. Every
    rank counts there how often it has come, which all ranks do equally often.
    """
    times = options.store.add(f"times/{options.group_rank}", 1)
    return PrefixStore(f"time/{times}", options.store)


def _setup(device: str, options: Any, store: PrefixStore, core: GroupCore) -> Setup:
    return Setup(
        store=PrefixStore(f"engine/{device}", store),
        rank=options.group_rank,
        size=options.group_size,
        timeout=options.timeout.total_seconds(),
        device_type=device,
        global_ranks=_global_ranks(options),
        group_name=options.group_id,
        on_failure=core.fail_for_engine,
    )


def _maker(device: str, group: ProcessGroup | None) -> "GroupMaker":
    """The backend that the group's configuration names for a device."""
    configuration = torch.distributed.get_backend_config(group)
    backends = BackendConfig(Backend(configuration)).get_device_backend_map()
    name = backends.get(device)
    if name is None:
        raise ValueError(
            f"the group has no backend for {device} tensors, only {configuration!r}: name one, as in "
            f'"{configuration},{device}:..."'
        )
    # torch's own are gradwire's here, as in "cpu:gloo,cuda:..."
    for maker in (backend_creator(name), backend_creator(f"gradwire_{name}")):
        if isinstance(maker, GroupMaker):
            return maker
    raise ValueError(f"gradwire cannot use backend {name!r} for {device} tensors: it is not one of its engines")
