"""Making process groups: torch's functions, with gradwire's rendezvous and shorter names of its engines."""

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ProcessGroupError
from ..torch_internals import default_timeout
from .backends import OWN
from .engines.mpi.world import under_mpiexec
from .mpiexec import meet_under_mpiexec
from .process_group import ProcessGroup
from .rendezvous import Rendezvous, rendezvous
from .start_barrier import Purpose
from .stores.base import Timeout, to_seconds
from .stores.prefix import PrefixStore
from .torch_types import TorchProcessGroup, TorchStore

__all__ = ["full_names", "init_process_group", "new_group", "split_group"]

_PROCESS_GROUP = Purpose("group", "pass insecure=True to gradwire.c10d.init_process_group")

OUTLAST_SECONDS = 2.0
"""How long the host of the store waits for others when no group can be made."""


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
) -> None:
    """Makes the default group, which all of torch.distributed then uses.

    As torch.distributed.init_process_group, but the ranks meet through gradwire's stores and rendezvous.

    Args:
        backend: `"shm"`, `"gloo"`, `"mpi"` or `"nccl"`, for all tensors or by device as in `"cpu:shm,cuda:nccl"`;
            any name that torch knows; or None for the best for each device.
        init_method: a URL, `"env://"` if neither it nor a store is given; see gradwire.c10d.rendezvous. Under
            mpiexec nothing need be said, if the environment has no MASTER_ADDR either.
        timeout: of operations, a timedelta or seconds; 30 minutes if None.
        world_size: how many ranks there are, unless the URL or the environment says it.
        rank: this one's, likewise.
        store: to meet through, instead of a URL. It stays open.
        group_name: not used, as in torch.
        pg_options: a GroupOptions.
        device_id: of this rank, if it uses only one.
        insecure: allow addresses that are not loopback ones, though there are no credentials. Ranks on several
            hosts need it: see docs/hosts.md.

    Raises:
        RendezvousError: the ranks cannot find each other, or contradict each other; then all ranks raise the same.
        ValueError: an unknown backend.
    """
    limit = default_timeout if timeout is None else _timedelta(timeout)
    if store is None and init_method is None and under_mpiexec() and "MASTER_ADDR" not in os.environ:
        met = meet_under_mpiexec(limit, insecure=insecure)
    else:
        met = rendezvous(
            init_method,
            rank=rank,
            world_size=world_size,
            store=store,
            timeout=limit,
            insecure=insecure,
            purpose=_PROCESS_GROUP,
        )
    assert met.world_size is not None
    root = PrefixStore("process_groups", met.store)
    try:
        met.wait_for_all(limit)
        dist.init_process_group(
            full_names(backend),
            timeout=limit,
            world_size=met.world_size,
            rank=met.rank,
            store=root,
            group_name=group_name,
            pg_options=pg_options,
            device_id=device_id,
        )
    except BaseException as error:
        if isinstance(error, ProcessGroupError):
            _outlast_others(met)
        met.close()
        raise
    # C++ holds the stores, but not what makes them Python objects; they end with the group.
    world: Any = dist.group.WORLD
    if isinstance(world, ProcessGroup):
        world.at_end(partial(_close, met, root))
    else:  # of a backend that is not gradwire's
        weakref.finalize(world, _close, met, root)


def _outlast_others(met: Rendezvous) -> None:
    """Keeps a store that this process may host until the others have read there why there is no group."""
    with suppress(RuntimeError):  # they are not coming
        met.store.set(f"no_group/{met.rank}", "")
        if met.rank == 0:
            keys = [f"no_group/{rank}" for rank in range(met.world_size or 0)]
            met.store.wait(keys, timedelta(seconds=OUTLAST_SECONDS))


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

    As torch.distributed.new_group, but `timeout` may be seconds and `backend` one of the names that
    init_process_group takes; None for that of the default group.

    Returns:
        The group, or torch.distributed.GroupMember.NON_GROUP_MEMBER on ranks that are not in it.
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
    """Divides a group into groups that do not overlap. All ranks of the parent must call it alike.

    As torch.distributed.split_group, which refuses machines without an accelerator.

    Args:
        parent_pg: the group to divide; the default group if None.
        split_ranks: for each new group, its ranks as the parent numbers them.
        timeout: of operations, a timedelta or seconds; that of torch if None.
        pg_options: a GroupOptions.
        group_desc: what the groups are for.

    Returns:
        The group that this rank is in; None if it is in none.
    """
    parent = dist.group.WORLD if parent_pg is None else parent_pg
    if parent is None:
        raise ValueError("there is no default group to split: call init_process_group first")
    if not split_ranks:
        raise ValueError("split_ranks is empty: give the ranks of each new group")
    named = [rank for ranks in split_ranks for rank in ranks]
    if len(named) != len(set(named)) or not all(0 <= rank < parent.size() for rank in named):
        raise ValueError(
            f"split_ranks is {split_ranks}: give each rank of the parent, 0 to {parent.size() - 1}, once at most"
        )
    mine = next((ranks for ranks in split_ranks if parent.rank() in ranks), None)
    if mine is None:
        return None
    group = new_group(
        [dist.get_global_rank(parent, rank) for rank in sorted(mine)],
        timeout,
        dist.get_backend_config(parent),
        pg_options,
        use_local_synchronization=True,
        group_desc=group_desc,
    )
    assert isinstance(group, TorchProcessGroup)
    return group


def full_names(backend: str | None) -> str:
    """What torch calls a backend that users may name shortly: `"cpu:shm"` is `"cpu:gradwire_shm"`."""
    if backend is None:
        return "gradwire"
    parts = []
    for part in backend.lower().split(","):
        device, colon, name = part.rpartition(":")
        parts.append(f"{device}{colon}{f'gradwire_{name}' if name in OWN else name}")
    return ",".join(parts)


def _timedelta(timeout: Timeout) -> timedelta:
    return timedelta(seconds=to_seconds(timeout))


def _close(met: Rendezvous, root: PrefixStore) -> None:
    root.close()
    met.close()
