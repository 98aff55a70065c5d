"""A barrier through the store of a group, which can tell which ranks are absent."""

from collections.abc import Callable, Sequence
from typing import final

from ...errors import CollectiveTimeoutError
from ..torch_types import TorchStore
from .consistency import format_ranks

__all__ = ["StoreBarrier"]


@final
class StoreBarrier:
    """The store barriers of one group on one of its ranks. All ranks must call them in the same order.

    Errors name ranks by their ranks in the default group, `global_ranks`.
    """

    def __init__(self, store: TorchStore, rank: int, global_ranks: Sequence[int]) -> None:
        self._store = store
        self._rank = rank
        self._global_ranks = global_ranks
        self._number = 0
        self._oldest_kept = 1  # number of the oldest barrier whose key of this rank is in the store

    def wait(
        self,
        timeout_s: float,
        wait_for_all_ranks: Callable[[TorchStore, Sequence[str], float], bool],
        *,
        wait_all_ranks: bool,
    ) -> None:
        """Waits until all ranks have called it.

        Args:
            timeout_s: seconds to wait for the other ranks.
            wait_for_all_ranks: GroupCore.wait_for_all_ranks, whose errors are raised.
            wait_all_ranks: have the error on rank 0 name all absent ranks, not only the first, in torch's wording.

        Raises:
            CollectiveTimeoutError: some ranks did not call it in time; it names every one.
        """
        self._number += 1
        keys = [_key(self._number, rank) for rank in range(len(self._global_ranks))]
        self._store.set(keys[self._rank], "")
        if not wait_for_all_ranks(self._store, keys, timeout_s):
            by_rank = zip(self._global_ranks, keys, strict=True)
            missing = [global_rank for global_rank, key in by_rank if not self._store.check([key])]
            if missing:  # else the last rank has just arrived
                text = self._message(missing, f"{timeout_s * 1000:g} ms", wait_all_ranks=wait_all_ranks)
                raise CollectiveTimeoutError("monitored_barrier", timeout_s, text)
        # All ranks have called this barrier, so none still reads the keys of earlier ones.
        for number in range(self._oldest_kept, self._number):
            self._store.delete_key(_key(number, self._rank))
        self._oldest_kept = self._number

    def _message(self, missing: Sequence[int], limit: str, *, wait_all_ranks: bool) -> str:
        """Names the absent ranks, also in the wording that programs written for torch look for."""
        rank, first = self._global_ranks[self._rank], self._global_ranks[0]
        if self._rank:
            return (
                f"{format_ranks(missing)}. Rank {rank} successfully reached monitoredBarrier, but received "
                f"errors while waiting for send/recv from rank {first}"
            )
        failed = format_ranks(missing if wait_all_ranks else missing[:1]).capitalize()
        return (
            f"{format_ranks(missing)}. Rank {rank} timed out in monitoredBarrier after {limit}: "
            f"{failed} failed to pass monitoredBarrier in {limit}"
        )


def _key(number: int, rank: int) -> str:
    return f"monitored_barrier/{number}/{rank}"
