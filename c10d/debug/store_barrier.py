"""A barrier that goes through the store of a group, and so knows who has not come."""

from collections.abc import Sequence
from datetime import timedelta
from typing import final

from ...errors import CollectiveTimeoutError
from ..torch_types import TorchStore

__all__ = ["StoreBarrier"]


@final
class StoreBarrier:
    """The barriers of one group on one of its ranks, which all ranks call in one order.

    Args:
        store: of the group.
        rank: this one, as the group numbers it.
        global_ranks: the number that each rank of the group has in the default group; errors name ranks so.
    """

    def __init__(self, store: TorchStore, rank: int, global_ranks: Sequence[int]) -> None:
        self._store = store
        self._rank = rank
        self._global_ranks = global_ranks
        self._number = 0

    def wait(self, seconds: float, *, all_ranks: bool) -> None:
        """Returns once all ranks have come.

        Args:
            seconds: how long to wait for them.
            all_ranks: the error on rank 0 says of all missing ranks, not of the first, that they failed to pass.

        Raises:
            CollectiveTimeoutError: some have not come in time; it names every one.
        """
        self._number += 1
        keys = [f"monitored_barrier/{self._number}/{rank}" for rank in range(len(self._global_ranks))]
        self._store.set(keys[self._rank], "")
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError as error:
            numbered = zip(self._global_ranks, keys, strict=True)
            missing = [number for number, key in numbered if not self._store.check([key])]
            if missing:  # else the last came just now
                text = self._said_of(missing, f"{seconds * 1000:g} ms", all_ranks=all_ranks)
                raise CollectiveTimeoutError("monitored_barrier", seconds, text) from error

    def _said_of(self, missing: Sequence[int], limit: str, *, all_ranks: bool) -> str:
        """Who is missing, also in the words that programs written for torch look for."""
        me, first = self._global_ranks[self._rank], self._global_ranks[0]
        if self._rank:
            return (
                f"{_names(missing)}. Rank {me} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank {first}"
            )
        failed = _names(missing if all_ranks else missing[:1]).capitalize()
        return (
            f"{_names(missing)}. Rank {me} timed out in monitoredBarrier after {limit}: "
            f"{failed} failed to pass monitoredBarrier in {limit}"
        )


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
