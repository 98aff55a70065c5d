"""The public functions on process groups: they make them, split them, form them anew, and show where they hang.

Groups are made by torch's functions, with gradwire's rendezvous and short names of its engines. The functions that
form a group anew have the names and the meaning of torch 2.14's `torch.distributed._reconfigure` and related ones.
They work on every torch that gradwire supports; from 2.14 on torch's own functions work, too.
"""

import logging
import os
import signal
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import Backend

from ...errors import ProcessGroupError, RendezvousError
from ...net.addresses import LOOPBACK, address_for_others
from ...net.host_identity import HostIdentity, can_share_loopback
from ...net.security import Credentials
from ...torch_internals import default_timeout, known_groups
from ..debug.flight_recorder import write_flight_records
from ..engines.mpi.world import MpiWorld, under_mpiexec
from ..rendezvous.api import Rendezvous, rendezvous
from ..rendezvous.hosts import linger
from ..rendezvous.start_barrier import GroupKind
from ..stores.base import Timeout, to_seconds
from ..stores.tcp import TCPStore
from ..stores.views import PrefixStore
from ..torch_types import TorchProcessGroup, TorchStore, TorchWork
from .backends import BUILTIN_ENGINES
from .options import GroupOptions
from .process_group import ProcessGroup, require_no_hints

__all__ = [
    "ReconfigureOptions",
    "dump_flight_recorder",
    "dump_flight_recorder_on_signal",
    "full_names",
    "get_reconfigure_handle",
    "init_process_group",
    "monitored_barrier",
    "new_group",
    "reconfigure",
    "rendezvous_reconfigure",
    "split_group",
    "supports_reconfigure",
]

_PROCESS_GROUP = GroupKind("group", how_to_allow="pass insecure=True to gradwire.c10d.init_process_group")

_RECONFIGURABLE_GROUP = GroupKind("reconfigurable", how_to_allow=_PROCESS_GROUP.how_to_allow)

HOST_LINGER_S = 2.0
"""Seconds for which the store's host stays after a failure, so that the other ranks can read the reason."""

DEFAULT_WINDOW_S = 10.0

log = logging.getLogger(__name__)


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: TorchStore | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
    *,
    insecure: bool = False,
    credentials: Credentials | None = None,
    enable_reconfigure: bool = False,
) -> None:
    """Makes the default group, which torch.distributed's functions then use.

    The same as torch.distributed.init_process_group, but with gradwire's stores and rendezvous.

    Args:
        backend: `"shm"`, `"gloo"`, `"mpi"` or `"nccl"`, for all tensors or by device as in `"cpu:shm,cuda:nccl"`;
            any name that torch knows; or None for the best for each device.
        init_method: a rendezvous URL (see gradwire.c10d.rendezvous); `"env://"` if neither it nor a store is
            given. Under mpiexec none is needed, unless the environment has MASTER_ADDR.
        timeout: default timeout of operations, a timedelta or seconds; 30 minutes if None.
        world_size: number of ranks, if neither the URL nor the environment has it.
        rank: this process's rank, if neither the URL nor the environment has it.
        store: a store to use instead of a URL. It stays open.
        group_name: not used, as in torch.
        pg_options: a GroupOptions.
        device_id: this rank's device, if it uses only one.
        insecure: allow addresses that are not loopback addresses, without credentials. Ranks on several hosts need
            credentials or this, and this for Gloo, MPI and NCCL; see docs/hosts.md. GRADWIRE_INSECURE=1 in the
            environment stands for it.
        credentials: what the ranks recognize each other by; see docs/security.md for what they protect. By default
            those in the environment: see Credentials.from_environment.
        enable_reconfigure: make the group without ranks, and without waiting for anybody: `reconfigure` gives it
            ranks. Leave out `world_size`; `rank` only says whether this process hosts the store of a tcp URL (0).

    Raises:
        RendezvousError: the ranks cannot find each other, or conflict with each other; all ranks raise the same.
        ValueError: the backend is unknown.
    """
    names = full_names(backend)
    _check_names(names)  # before this rank waits for the others
    limit = default_timeout if timeout is None else _timedelta(timeout)
    if store is None and init_method is None and under_mpiexec() and "MASTER_ADDR" not in os.environ:
        found = _rendezvous_under_mpiexec(limit, insecure=insecure, credentials=credentials)
    else:
        found = rendezvous(
            init_method,
            rank=rank,
            world_size=world_size,
            store=store,
            timeout=limit,
            insecure=insecure,
            credentials=credentials,
            dynamic=enable_reconfigure,
            kind=_RECONFIGURABLE_GROUP if enable_reconfigure else _PROCESS_GROUP,
        )
    if enable_reconfigure:
        pg_options = (pg_options or GroupOptions()).with_reconfigure(enabled=True)
    root = PrefixStore("process_groups", found.store)
    # Engines of this group, and of groups that are made later, look these up there.
    root.insecure, root.credentials = insecure, credentials
    try:
        if not enable_reconfigure:
            found.wait_for_all(limit)
        dist.init_process_group(
            names,
            timeout=limit,
            world_size=found.world_size or 1,  # torch wants a rank and a size of groups without ranks, too
            rank=max(found.rank, 0),
            store=root,
            group_name=group_name,
            pg_options=pg_options,
            device_id=device_id,
        )
    except BaseException as error:
        if isinstance(error, ProcessGroupError):
            linger(found.store, "no_group", found.rank, found.world_size or 0, HOST_LINGER_S)
        found.close()
        raise
    # C++ holds the stores, but does not keep their Python objects alive; they are closed with the group.
    world: Any = dist.group.WORLD
    if isinstance(world, ProcessGroup):
        world.add_close_callback(partial(_close, found, root))
    else:  # a group of a backend that is not gradwire's
        weakref.finalize(world, _close, found, root)


def _rendezvous_under_mpiexec(
    timeout: timedelta, *, insecure: bool, credentials: Credentials | None
) -> Rendezvous:
    """Opens a TCPStore that rank 0 of MPI's world hosts. All processes of that world must call it together."""
    comm = MpiWorld.from_mpiexec().comm
    rank, size = comm.rank, comm.size
    host = LOOPBACK if can_share_loopback(comm.allgather(HostIdentity.here())) else address_for_others()
    open_store = partial(
        TCPStore, timeout=timeout, wait_for_workers=False, insecure=insecure, credentials=credentials
    )
    store: TCPStore | None = None
    problem = ""
    if rank == 0:
        try:
            store = open_store(host, 0, is_master=True)
        except Exception as error:
            problem = str(error)
    host, port, problem = comm.bcast((host, 0 if store is None else store.port, problem))
    if problem:
        raise RendezvousError(f"rank 0 under mpiexec cannot host the store: {problem}")
    if store is None:
        store = open_store(host, port)
    return Rendezvous(store, rank, size, store.close)


def _close(found: Rendezvous, root: PrefixStore) -> None:
    root.close()
    found.close()


def full_names(backend: str | None) -> str:
    """Returns torch's names for backends in gradwire's short names: `"cpu:gradwire_shm"` for `"cpu:shm"`."""
    if backend is None:
        return "gradwire"
    parts = []
    for part in backend.lower().split(","):
        device, colon, name = part.rpartition(":")
        parts.append(f"{device}{colon}{f'gradwire_{name}' if name in BUILTIN_ENGINES else name}")
    return ",".join(parts)


def _check_names(backend: str) -> None:
    """Raises ValueError if torch knows no backend of a name, and finds none by an entry point."""
    known = {*Backend.backend_list, *(each.name for each in entry_points(group="torch.distributed.backends"))}
    for part in backend.split(","):
        name = part.rpartition(":")[2]
        if name not in known:
            short = ", ".join(map(repr, sorted(BUILTIN_ENGINES)))
            raise ValueError(
                f"there is no backend {name!r}: give {short}, as in 'cpu:shm,cuda:nccl', or a backend that is "
                "registered with torch, or None for the best for each device"
            )


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
) -> TorchProcessGroup | Any:
    """Makes a group of some ranks of the default group. All ranks of the default group must call it.

    The same as torch.distributed.new_group, but `timeout` may be seconds, and `backend` any name that
    init_process_group accepts; None for the default group's.

    Returns:
        The group; torch.distributed.GroupMember.NON_GROUP_MEMBER on ranks that are not in it.
    """
    return dist.new_group(
        None if ranks is None else list(ranks),
        timeout=None if timeout is None else _timedelta(timeout),
        backend=None if backend is None else full_names(backend),
        pg_options=pg_options,
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
        device_id=device_id,
    )


def split_group(
    parent_pg: TorchProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> TorchProcessGroup | None:
    """Splits a group into disjoint groups. All ranks of the parent must call it with the same arguments.

    The same as torch.distributed.split_group, but works without an accelerator too.

    Args:
        parent_pg: the group to split; the default group if None.
        split_ranks: for each new group, its ranks in the parent.
        timeout: default timeout of operations, a timedelta or seconds; torch's default if None.
        pg_options: a GroupOptions.
        group_desc: a description of the groups, for people.

    Returns:
        The new group that this rank is in; None if it is in none.

    Raises:
        ValueError: there is no parent, or `split_ranks` is empty, has a rank twice, or one that is not in the
            parent.
    """
    parent = dist.group.WORLD if parent_pg is None else parent_pg
    if parent is None:
        raise ValueError("there is no default group to split: call init_process_group first")
    if not split_ranks:
        raise ValueError("split_ranks is empty: give the ranks of each new group")
    all_ranks = [rank for ranks in split_ranks for rank in ranks]
    if len(all_ranks) != len(set(all_ranks)) or not all(0 <= rank < parent.size() for rank in all_ranks):
        raise ValueError(
            f"split_ranks is {split_ranks}: give each rank of the parent, 0 to {parent.size() - 1}, once at most"
        )
    own_ranks = next((ranks for ranks in split_ranks if parent.rank() in ranks), None)
    if own_ranks is None:
        return None
    group = new_group(
        [dist.get_global_rank(parent, rank) for rank in sorted(own_ranks)],
        timeout,
        dist.get_backend_config(parent),
        pg_options,
        use_local_synchronization=True,
        group_desc=group_desc,
    )
    assert isinstance(group, TorchProcessGroup)
    return group


def monitored_barrier(
    group: TorchProcessGroup | None = None, timeout: Timeout | None = None, wait_all_ranks: bool = False
) -> None:
    """Waits until all ranks have called it, as barrier does, but through the group's store.

    Args:
        group: the default group if None.
        timeout: a timedelta or seconds; the group's timeout if None.
        wait_all_ranks: have the error on rank 0 name all absent ranks, not only the first, in torch's wording too.

    Raises:
        CollectiveTimeoutError: ranks did not reach the barrier in time. Raised on all ranks that did; it names
            every absent rank.
        RankLostError: a rank has died, or has left without reaching the barrier.
    """
    found = dist.group.WORLD if group is None else group
    if isinstance(found, ProcessGroup):
        found.monitored_barrier(timeout, wait_all_ranks)
    else:
        dist.monitored_barrier(found, None if timeout is None else _timedelta(timeout), wait_all_ranks)


def _timedelta(timeout: Timeout) -> timedelta:
    return timedelta(seconds=to_seconds(timeout))


def dump_flight_recorder(folder: Path | str) -> Path:
    """Writes the last operations of all of gradwire's groups in this process to a file in `folder`.

    Returns:
        The file's path.
    """
    groups = [group.flight_record() for group in list(known_groups()) if isinstance(group, ProcessGroup)]
    return write_flight_records(groups, Path(folder))


def dump_flight_recorder_on_signal(folder: Path | str, number: int = signal.SIGUSR1) -> None:
    """Installs a signal handler that calls `dump_flight_recorder(folder)`. Must be called on the main thread.

    The program goes on afterwards, also if that fails, which is logged. The handler runs when the
    main thread next executes Python code, which gradwire's engines do while they wait.
    """

    def handle(_: int, __: FrameType | None) -> None:
        try:
            dump_flight_recorder(folder)
        except Exception as error:  # would be raised wherever the main thread is
            log.warning("cannot write the flight recorder to %s: %s", folder, error)

    signal.signal(number, handle)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReconfigureOptions:
    """Options of `ProcessGroup.reconfigure`, under torch 2.14's names. torch's own are accepted in the same place.

    uuid: a number that all members give, and that no earlier attempt of theirs had.
    handles: the handles of all members. A list assigns ranks by position. In a set, members keep the order of
        their last ranks, and newcomers come after them.
    timeout: of the attempt; the group's timeout if None.
    hints: must be empty: gradwire's engines have none.
    """

    uuid: int
    handles: Collection[str]
    timeout: timedelta | None = None
    hints: Mapping[str, str] = field(default_factory=dict)


def supports_reconfigure(group: TorchProcessGroup | None = None) -> bool:
    """Returns whether `reconfigure` can form a group anew: on gradwire's engines, except for MPI.

    Args:
        group: the default group if None.
    """
    return bool(getattr(_group(group), "supports_reconfigure", False))


def get_reconfigure_handle(group: TorchProcessGroup | None = None) -> str:
    """Returns the text by which the other members name this process in `reconfigure`.

    It has this process's last rank in the group, so get it again after a group was formed.

    Args:
        group: the default group if None.
    """
    return str(_require(group).get_reconfigure_handle())


def rendezvous_reconfigure(
    group: TorchProcessGroup | None = None,
    timeout: Timeout | None = None,
    *,
    min_size: int | None = None,
    max_size: int | None = None,
    window: Timeout = DEFAULT_WINDOW_S,
) -> tuple[int, list[str]]:
    """Leaves the group's ranks, and agrees through the group's store with all who call this on the new ones.

    The members are settled as soon as there are `min_size`, and all ranks of the last group have called it whose
    processes are not known to have died; or nobody else has called it for `window`. Then who comes later waits for
    the next agreement.

    Args:
        group: the default group if None.
        timeout: a timedelta or seconds; the group's timeout if None.
        min_size: members that the group needs. By default 1; 2 for a process that had no rank in the last group.
        max_size: members that are enough, whoever is missing. No limit by default.
        window: a timedelta or seconds.

    Returns:
        The number and the handles to give to `reconfigure`. Members of the last group keep the order of their
        ranks; newcomers come after them, in the order in which they have called.

    Raises:
        ProcessGroupError: not enough members came in time, or the store failed. It may be called again.
        UnsupportedOperationError: the engine cannot form a group anew.
        ValueError: `min_size` or `max_size` is less than 1, or `max_size` less than `min_size`.
    """
    return _require(group).rendezvous_reconfigure(
        timeout=timeout, min_size=min_size, max_size=max_size, window=window
    )


def reconfigure(
    uuid: int | None = None,
    handles: Collection[str] | None = None,
    group: TorchProcessGroup | None = None,
    timeout: Timeout | None = None,
    hints: Mapping[str, str] | None = None,
    *,
    min_size: int | None = None,
    max_size: int | None = None,
    window: Timeout = DEFAULT_WINDOW_S,
) -> TorchWork:
    """Forms a group anew in the processes that call this together: after a rank died, or to let newcomers in.

    The group object stays the same, with new ranks. Operations of the old ranks that are in flight end first: with
    RankLostError after a death, else with GroupAbortedError here and RankLostError on ranks that still wait for
    this one. Newcomers are processes whose group was made with `enable_reconfigure`.

    With `uuid` and `handles` it means what torch 2.14's function does. Without them the members agree by
    `rendezvous_reconfigure`.

    Args:
        uuid: a number that all members give, and that no earlier attempt of theirs had.
        handles: the handles of all members. A list assigns ranks by position. In a set, members keep the order of
            their last ranks, and newcomers come after them.
        group: the default group if None.
        timeout: a timedelta or seconds for each of the two steps; the group's timeout if None.
        hints: must be empty.
        min_size: see rendezvous_reconfigure.
        max_size: see rendezvous_reconfigure.
        window: see rendezvous_reconfigure.

    Returns:
        A Work that is completed: errors are raised here.

    Raises:
        ProcessGroupError: the group did not form in time, or `uuid` was already used. It may be called again, on
            all members.
        UnsupportedOperationError: the engine cannot form a group anew.
        ValueError: only one of `uuid` and `handles` is given, or an argument is not valid.
    """
    found = _require(group)
    if (uuid is None) != (handles is None):
        raise ValueError("only one of uuid and handles is given: give both, or neither to agree through the store")
    if uuid is None or handles is None:
        require_no_hints(hints or {})
        number, agreed = found.rendezvous_reconfigure(
            timeout=timeout, min_size=min_size, max_size=max_size, window=window
        )
        return found.form_anew(f"round/{number}", agreed, timeout)
    seconds = None if timeout is None else timedelta(seconds=to_seconds(timeout))
    return found.reconfigure(ReconfigureOptions(uuid=uuid, handles=handles, timeout=seconds, hints=hints or {}))


def _group(group: TorchProcessGroup | None) -> Any:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("there is no default group: call init_process_group first")
    return found


def _require(group: TorchProcessGroup | None) -> ProcessGroup:
    found = _group(group)
    if not isinstance(found, ProcessGroup):
        raise ValueError(f"{found!r} is not a gradwire group: only those can be formed anew here")
    return found
