"""Registers engines, gradwire's and those of third parties, as backends of torch.distributed.

torch keeps the registry, in which an engine's name is the name of a backend. A group can have an engine for each
type of device; it looks up their names in the group's configuration, such as
`"cpu:gradwire_mpi,cuda:gradwire_nccl"`.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch.distributed
from torch.distributed import Backend

from ...errors import UnsupportedOperationError
from ...net.addresses import allows_insecure
from ...torch_internals import (
    HAS_PYTHON_BACKENDS,
    BackendConfig,
    backend_creator,
    backend_devices,
    backend_names,
    register_group_backend,
)
from ..engines.base import Engine, EngineFactory, Setup
from ..stores.describe import is_insecure_store, store_credentials
from ..stores.prefix import PrefixStore
from ..stores.sealed import SealedStore, seal
from ..torch_types import TorchStore
from .collectives import Collectives
from .core import GroupCore
from .dynamo import exclude_from_dynamo
from .member import Formation, GroupMember
from .options import GroupOptions
from .point_to_point import PointToPoint
from .process_group import ProcessGroup
from .work import GroupWork

__all__ = ["GroupFactory", "register_engine"]


exclude_from_dynamo(PointToPoint, Collectives, GroupCore, ProcessGroup, GroupWork)


def register_engine(
    name: str,
    factory: EngineFactory,
    devices: Sequence[str] = ("cpu",),
    *,
    cannot_reconfigure: str = "",
) -> None:
    """Registers an engine, so that `init_process_group(name)` and `new_group(backend=name)` make groups on it.

    Args:
        name: name of the backend; it may be combined with others, as in `"cpu:gloo,cuda:name"`.
        factory: an Engine class, or a function that makes an engine from a Setup.
        devices: types of the devices whose tensors the engine supports.
        cannot_reconfigure: why groups on this engine cannot be formed anew without a rank that was lost, and what
            to do instead; empty if they can, since the engine needs nothing but a Setup.

    Raises:
        ValueError: the name is not an identifier, or there are no devices.
    """
    if not name.isidentifier():
        raise ValueError(f"an engine cannot be called {name!r}: torch reads ':' and ',' in it; use letters and _")
    if not devices:
        raise ValueError(f"engine {name!r} is registered for no device: name at least one, such as 'cpu'")
    made = GroupFactory(name, factory, cannot_reconfigure)
    Backend.register_backend(name, made, extended_api=True, devices=list(devices))


@final
@dataclass(frozen=True, slots=True)
class GroupFactory:
    """Makes process groups when torch asks for a backend.

    name: of the backend.
    factory: makes its engine.
    cannot_reconfigure: why its groups cannot be formed anew; empty if they can.
    """

    name: str
    factory: EngineFactory
    cannot_reconfigure: str = ""

    def __call__(self, options: Any, group_options: GroupOptions | None = None) -> ProcessGroup:
        """Makes a group of the ranks that call this together.

        If this backend supports CPU tensors, its engine for them is made at once, while all ranks are here.
        Engines for other devices are made with the first operation there, since torch names those backends only
        later.

        Args:
            options: torch's _DistributedBackendOptions.
            group_options: the user's `pg_options`.
        """
        if not isinstance(group_options, GroupOptions | None):
            raise TypeError(f"pg_options is {group_options!r}: give gradwire.c10d.GroupOptions")
        group_options = group_options or GroupOptions()
        # From torch 2.14 on, init_process_group has the argument itself.
        enable_reconfigure = group_options.enable_reconfigure or getattr(options, "enable_reconfigure", False)
        store = options.store
        sealed = seal(store, store_credentials(store), insecure=allows_insecure(is_insecure_store(store)))
        options = _BackendOptions(
            store=sealed,
            group_rank=options.group_rank,
            group_size=options.group_size,
            timeout=options.timeout,
            group_id=options.group_id,
            global_ranks_in_group=options.global_ranks_in_group,
        )
        close = sealed.close if isinstance(sealed, SealedStore) and sealed is not store else None
        try:
            group = self._make(options, group_options, enable_reconfigure=enable_reconfigure)
        except BaseException:
            if close is not None:
                close()
            raise
        if close is not None:
            group.add_close_callback(close)
        return group

    def _make(
        self, options: "_BackendOptions", group_options: GroupOptions, *, enable_reconfigure: bool
    ) -> ProcessGroup:
        """Makes a group, of which only one without ranks is not connected yet."""
        if enable_reconfigure:
            if self.cannot_reconfigure:
                raise UnsupportedOperationError(self.name, "form groups anew", self.cannot_reconfigure)
            group_options = group_options.with_reconfigure(enabled=False)  # parts of the group get these options
            ranks = _BackendOptions(
                store=PrefixStore("unformed", options.store),
                group_rank=-1,
                group_size=0,
                timeout=options.timeout,
                group_id=options.group_id,
                global_ranks_in_group=(),
            )
            group = self._make_group(options, ranks, PrefixStore("0", ranks.store), group_options, "")
        else:
            count = _count_groups(options)
            store = PrefixStore(f"time/{count}", options.store)
            group = self._make_group(options, options, store, group_options, f"time/{count}")
            try:
                self._connect(group._core, options, options.timeout.total_seconds(), detector_timeout_s=None)
            except BaseException:
                group.shutdown()
                raise
        return group

    def _make_group(
        self, options: Any, ranks: Any, store: PrefixStore, group_options: GroupOptions, generation: str
    ) -> ProcessGroup:
        """Makes a group whose core is not connected yet.

        Args:
            options: torch's, with the store that the group keeps when its ranks change.
            ranks: the first ranks, as torch's options have them.
            store: of the first ranks.
            group_options: the user's options.
            generation: what the first ranks are called in the store.
        """

        def form(formation: Formation, old: GroupCore) -> GroupCore:
            new_ranks = _BackendOptions(
                store=options.store,
                group_rank=formation.rank,
                group_size=len(formation.global_ranks),
                timeout=old.timeout,
                group_id=options.group_id,
                global_ranks_in_group=formation.global_ranks,
            )
            part = PrefixStore(f"ranks/{formation.generation}", options.store)
            core = make_core(new_ranks, part, old.timeout)
            try:
                self._connect(core, new_ranks, formation.timeout_s, detector_timeout_s=formation.timeout_s)
            except BaseException:
                core.shutdown()
                raise
            return core

        def make_core(ranks: Any, store: PrefixStore, timeout: timedelta) -> GroupCore:
            return GroupCore(
                store,
                ranks.group_rank,
                global_ranks=_global_ranks(ranks),
                backend=self.name,
                timeout=timeout,
                options=group_options,
                make_engine=lambda device, core: _find_factory(device, group_ref()).make_engine(
                    _engine_setup(device, ranks, core, ranks.timeout.total_seconds())
                ),
            )

        core = make_core(ranks, store, group_options.effective_timeout(options.timeout))
        member = GroupMember(
            options.store, core, form, generation=generation, cannot_reconfigure=self.cannot_reconfigure
        )
        group = ProcessGroup(core, self._make_subgroup, member)
        group_ref = weakref.ref(group)  # alive whenever an engine is made: somebody is calling the group
        if HAS_PYTHON_BACKENDS:
            register_group_backend(group, group.as_backend, _all_device_types())
        return group

    def _connect(self, core: GroupCore, ranks: Any, timeout_s: float, *, detector_timeout_s: float | None) -> None:
        """Connects the ranks of a group, which all call this together."""
        if core.size > 1:
            core.start_failure_detector(detector_timeout_s)
        if "cpu" in backend_devices(self.name):
            core.add_engine("cpu", self.factory(_engine_setup("cpu", ranks, core, timeout_s)), self.name)

    def make_engine(self, setup: Setup) -> tuple[str, Engine]:
        """Makes an engine. Returns the name of the backend, and the engine."""
        return self.name, self.factory(setup)

    def _make_subgroup(
        self,
        member: GroupMember,
        ranks: Sequence[int],
        name: str,
        timeout: timedelta,
        group_options: GroupOptions,
    ) -> ProcessGroup:
        """Makes a group of some of the present ranks of a group, which call it together."""
        core = member.core
        subgroup_options = _BackendOptions(
            store=PrefixStore(f"part/{member.generation}/{name}", member.store),
            group_rank=list(ranks).index(core.rank),
            group_size=len(ranks),
            timeout=timeout,
            group_id=name,
            global_ranks_in_group=[core.global_ranks[rank] for rank in ranks],
        )
        return self(subgroup_options, group_options)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _BackendOptions:
    """What torch passes to the makers of backends, under torch's names."""

    store: TorchStore
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: Sequence[int]


def _all_device_types() -> set[str]:
    """Returns the types of devices that any registered engine supports."""
    names = [name for name in backend_names() if isinstance(backend_creator(name), GroupFactory)]
    return {device for name in names for device in backend_devices(name)}


def _global_ranks(options: Any) -> tuple[int, ...]:
    """Returns the ranks of the group in the default group; for the default group itself torch gives none."""
    return tuple(options.global_ranks_in_group) or tuple(range(options.group_size))


def _count_groups(options: Any) -> int:
    """Returns how many groups of this name have been made in the store, this one included.

    Processes that destroy the default group and make it again may use the same store, as under torchrun. Each rank
    counts in the store how many groups it has made; the counts are the same on all ranks.
    """
    return int(options.store.add(f"times/{options.group_rank}", 1))


def _engine_setup(device: str, options: Any, core: GroupCore, timeout_s: float) -> Setup:
    return Setup(
        store=PrefixStore(f"engine/{device}", core.store),
        rank=options.group_rank,
        size=options.group_size,
        timeout=timeout_s,
        device_type=device,
        global_ranks=_global_ranks(options),
        group_name=options.group_id,
        on_failure=core.fail_from_engine,
        wait_for_cause=core.wait_for_cause,
        insecure=core.insecure,
    )


def _find_factory(device: str, group: ProcessGroup | None) -> GroupFactory:
    """Returns the factory of the backend that the group's configuration names for a type of device."""
    configuration = torch.distributed.get_backend_config(group)
    backends = BackendConfig(Backend(configuration)).get_device_backend_map()
    name = backends.get(device)
    if name is None:
        raise ValueError(
            f"the group has no backend for {device} tensors, only {configuration!r}: name one, as in "
            f'"{configuration},{device}:..."'
        )
    # A torch backend's name, as in "cpu:gloo,cuda:...", stands for gradwire's engine of that name.
    for factory in (backend_creator(name), backend_creator(f"gradwire_{name}")):
        if isinstance(factory, GroupFactory):
            return factory
    raise ValueError(f"gradwire cannot use backend {name!r} for {device} tensors: it is not one of its engines")
