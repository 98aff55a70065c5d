"""A barrier that names the ranks that do not reach it, on any group and engine."""

from datetime import timedelta

import torch.distributed as dist

from ..stores.base import Timeout, to_seconds
from ..torch_types import TorchProcessGroup
from .process_group import ProcessGroup

__all__ = ["monitored_barrier"]


def monitored_barrier(
    group: TorchProcessGroup | None = None,
    timeout: Timeout | None = None,
    wait_all_ranks: bool = False,
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
    if not isinstance(found, ProcessGroup):
        limit = None if timeout is None else timedelta(seconds=to_seconds(timeout))
        dist.monitored_barrier(found, limit, wait_all_ranks)
        return
    found.monitored_barrier(timeout, wait_all_ranks)
