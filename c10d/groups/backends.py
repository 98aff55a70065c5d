"""Registers engines, gradwire's and those of third parties, as backends of torch.distributed.

torch keeps the registry, in which an engine's name is the name of a backend. A group can have an engine for each
type of device; it looks up their names in the group's configuration, such as
`"cpu:gradwire_mpi,cuda:gradwire_nccl"`.
"""

import inspect
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed
from torch.distributed import Backend

from ...errors import ProcessGroupError, UnsupportedOperationError
from ...net.addresses import allows_insecure
from ...net.host_identity import can_share_memory
from ...torch_internals import (
    HAS_PYTHON_BACKENDS,
    BackendConfig,
    backend_creator,
    backend_devices,
    backend_names,
    register_group_backend,
    skip_in_dynamo,
)
from ..engines.base import Engine, EngineFactory, Setup
from ..engines.shm.segment import check_platform, is_supported
from ..rendezvous.hosts import gather_hosts
from ..stores.sealed import SealedStore, seal
from ..stores.views import PrefixStore, is_insecure_store, store_credentials
from ..torch_types import TorchStore
from .collectives import Collectives
from .core import GroupCore, Place
from .member import GroupMember
from .options import GroupOptions
from .process_group import ProcessGroup
from .work import GroupWork

__all__ = [
    "BUILTIN_ENGINES",
    "GroupFactory",
    "best_engine",
    "register_backends",
    "register_engine",
    "why_unavailable",
]

BUILTIN_ENGINES = frozenset({"gloo", "mpi", "nccl", "shm"})
"""Names of gradwire's engines. torch knows each as the backend `gradwire_NAME`."""

_MPI_CANNOT_RECONFIGURE = (
    "a process stays in the MPI world in which it started, and that world cannot replace a rank; restart all "
    "processes, or use gradwire_gloo or gradwire_shm"
)


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
    """Makes process groups on the engine of a backend when torch asks for it; see `register_engine`."""

    name: str
    factory: EngineFactory
    cannot_reconfigure: str = ""

    def __call__(self, options: Any, group_options: GroupOptions | None = None) -> ProcessGroup:
        """Makes a group of the ranks that call this together.

        If this backend supports CPU tensors, its engine for them is made at once, while all ranks are here.
        Engines for other devices are made with the first operation there, since torch names those backends only
        later. The options are torch's _DistributedBackendOptions, and the user's `pg_options`.
        """
        group_options = _checked(GroupOptions() if group_options is None else group_options)
        if getattr(options, "enable_reconfigure", False):  # an argument of init_process_group from torch 2.14 on
            group_options = group_options.with_reconfigure(enabled=True)
        store = options.store
        sealed = seal(store, store_credentials(store), insecure=allows_insecure(is_insecure_store(store)))
        close = sealed.close if isinstance(sealed, SealedStore) and sealed is not store else lambda: None
        # Of the default group itself, torch gives no ranks.
        global_ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        try:
            group = self._make(
                sealed, options.group_id, options.group_rank, global_ranks, options.timeout, group_options
            )
        except BaseException:
            close()
            raise
        group.add_close_callback(close)
        return group

    def _make(
        self,
        store: TorchStore,
        name: str,
        rank: int,
        global_ranks: tuple[int, ...],
        timeout: timedelta,
        group_options: GroupOptions,
    ) -> ProcessGroup:
        """Makes a group, which keeps the store when its ranks change. Connects its ranks, if it has any yet."""

        def form(
            part: PrefixStore, rank: int, global_ranks: tuple[int, ...], timeout: timedelta, connect_s: float
        ) -> GroupCore:
            core = GroupCore(part, Place(name, self.name, rank, global_ranks), timeout, options, make_engine)
            try:
                if core.size > 1:
                    core.start_failure_detector(connect_s)
                if global_ranks and "cpu" in backend_devices(self.name):
                    core.add_engine("cpu", self.factory(_engine_setup("cpu", core, connect_s)), self.name)
            except BaseException as error:
                core.shutdown(str(error) or type(error).__name__)  # the other ranks may wait for this one
                raise
            return core

        def make_engine(device: str, core: GroupCore) -> tuple[str, Engine]:
            found = _find_factory(device, group_ref())
            return found.name, found.factory(_engine_setup(device, core, core.timeout.total_seconds()))

        options = group_options.with_reconfigure(enabled=False)  # parts of the group get these options
        timeout = options.effective_timeout(timeout)
        if group_options.enable_reconfigure:
            if self.cannot_reconfigure:
                raise UnsupportedOperationError(self.name, "form groups anew", self.cannot_reconfigure)
            generation, part, rank, global_ranks = "", PrefixStore("unformed/0", store), -1, ()
        else:
            # Processes that destroy the default group and make it again may use the same store, as under torchrun.
            # Each rank counts in the store how many groups it has made; the counts are the same on all ranks.
            generation = f"time/{store.add(f'times/{rank}', 1)}"
            part = PrefixStore(generation, store)
        core = form(part, rank, global_ranks, timeout, timeout.total_seconds())
        member = GroupMember(store, core, form, generation=generation, cannot_reconfigure=self.cannot_reconfigure)
        group = ProcessGroup(member, self._make_subgroup)
        group_ref = weakref.ref(group)  # alive whenever an engine is made: somebody is calling the group
        if HAS_PYTHON_BACKENDS:
            names = [each for each in backend_names() if isinstance(backend_creator(each), GroupFactory)]
            devices = {device for each in names for device in backend_devices(each)}
            register_group_backend(group, group.as_backend, devices)
        return group

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
        store = PrefixStore(f"part/{member.generation}/{name}", member.store)
        global_ranks = tuple(core.global_ranks[rank] for rank in ranks)
        rank, options = list(ranks).index(core.rank), _checked(group_options)
        return self._make(store, name, rank, global_ranks, timeout, options)


def _checked(options: Any) -> GroupOptions:
    if not isinstance(options, GroupOptions):
        raise TypeError(f"pg_options is {options!r}: give gradwire.c10d.GroupOptions")
    return options


def _engine_setup(device: str, core: GroupCore, timeout_s: float) -> Setup:
    return Setup(
        store=PrefixStore(f"engine/{device}", core.store),
        rank=core.rank,
        size=core.size,
        timeout=timeout_s,
        device_type=device,
        global_ranks=core.global_ranks,
        group_name=core.name,
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


def register_backends() -> None:
    """Registers `gradwire_gloo`, `gradwire_mpi`, `gradwire_nccl`, `gradwire_shm` and `gradwire`.

    `gradwire` chooses the best engine for each device: shm if all ranks can share memory, otherwise gloo; nccl for
    CUDA tensors.
    """
    register_engine("gradwire", best_engine, devices=["cpu", "cuda"])
    register_engine("gradwire_gloo", _gloo, devices=["cpu"])
    register_engine("gradwire_mpi", _mpi, devices=["cpu"], cannot_reconfigure=_MPI_CANNOT_RECONFIGURE)
    register_engine("gradwire_nccl", _nccl, devices=["cuda"])
    register_engine("gradwire_shm", _shm, devices=["cpu"])


def best_engine(setup: Setup) -> Engine:
    """Makes the fastest engine that all ranks can use. All ranks must call it together."""
    if setup.device_type == "cuda":
        return _nccl(setup)
    hosts = gather_hosts(setup.store, setup.rank, setup.size, setup.wait_for_keys, insecure=setup.insecure)
    return _shm(setup) if can_share_memory(hosts) and is_supported() else _gloo(setup)


def _gloo(setup: Setup) -> Engine:
    from ..engines.gloo import GlooEngine

    return GlooEngine(setup)


def _mpi(setup: Setup) -> Engine:
    from ..engines.mpi.engine import MpiEngine  # needs the extra `mpi`

    return MpiEngine(setup)


def _nccl(setup: Setup) -> Engine:
    from ..engines.nccl import NcclEngine  # needs the extra `cuda`

    return NcclEngine(setup, blocking_wait=os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1")


def _shm(setup: Setup) -> Engine:
    from ..engines.shm.engine import ShmEngine

    return ShmEngine(setup)


# While a compiled program runs, Dynamo traces every Python function that is called. Those of a group, which C++
# calls back, as for a broadcast that DDP starts, are no part of the program, and cannot be traced.
# torch.compiler.disable would do the same, but imports the compiler and costs time with every call.
for _class in (Collectives, GroupCore, ProcessGroup, GroupWork):
    skip_in_dynamo(method for method in vars(_class).values() if inspect.isfunction(method))


def why_unavailable(engine: str) -> str | None:
    """Returns why an engine cannot run in this process, in one line; None if it can.

    Initializes nothing. Whether the ranks of a group can use the engine together is known only when the group is
    made.
    """
    checks = {"gloo": _check_gloo, "mpi": _check_mpi, "nccl": _check_nccl, "shm": check_platform}
    if engine not in checks:
        raise ValueError(f"unknown engine {engine!r}: the engines are {', '.join(sorted(checks))}")
    try:
        checks[engine]()
    except (ImportError, ProcessGroupError) as error:
        return " ".join(str(error).split())
    return None


def _check_gloo() -> None:
    if not torch.distributed.is_gloo_available():
        raise ProcessGroupError("this build of torch has no Gloo")


def _check_mpi() -> None:
    from ..engines.mpi.world import load_mpi

    load_mpi()


def _check_nccl() -> None:
    from ..engines.nccl.library import CudaGpus, load

    CudaGpus()
    load()
