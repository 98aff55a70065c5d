"""A barrier that names the ranks that do not come, on any group and engine."""

from datetime import timedelta

import torch.distributed as dist

from ..process_group import ProcessGroup
from ..stores.base import Timeout, to_seconds
from ..torch_types import TorchProcessGroup

__all__ = ["monitored_barrier"]


def monitored_barrier(
    group: TorchProcessGroup | None = None,
    timeout: Timeout | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Returns once all ranks have called it, as barrier does, but goes through the group's store.

    Args:
        group: the default group if None.
        timeout: a timedelta or seconds; that of the group if None.
        wait_all_ranks: the error on rank 0 names all missing ranks in torch's words as well.

    Raises:
        CollectiveTimeoutError: ranks did not come in time; it names every one, on all ranks that came.
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, ProcessGroup):
        limit = None if timeout is None else timedelta(seconds=to_seconds(timeout))
        dist.monitored_barrier(found, limit, wait_all_ranks)
        return
    found.monitored_barrier(timeout, wait_all_ranks)
