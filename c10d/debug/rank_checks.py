"""What the ranks of a group find out through its store: whether all call the same, and which ones are absent.

ConsistencyCheck compares the calls of a collective before it starts. Each rank writes its call to the group's
store and reads the calls of the others. That takes two round trips to the store for each collective, so it is for
debugging: TORCH_DISTRIBUTED_DEBUG=DETAIL or the group's options enable it.

StoreBarrier waits for all ranks, and names those that did not come.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from ...errors import CollectiveMismatchError, CollectiveTimeoutError
from ...net.security import printable
from ..engines.collective_call import CollectiveCall
from ..torch_types import TorchStore
from .call_site import find_call_site

__all__ = ["ConsistencyCheck", "StoreBarrier"]

MAX_CALL_CHARACTERS = 2000
"""Characters of the call of another rank that are shown."""

_EQUAL_INPUT_SHAPES = frozenset(
    {
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_reduce",
        "all_reduce_coalesced",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    }
)
"""Collectives whose inputs have the same shapes on all ranks; with others they may differ."""


@final
class ConsistencyCheck:
    """The check of one group on one of its ranks, which alone uses its store.

    Errors name ranks by their ranks in the default group, `global_ranks`.
    """

    def __init__(self, store: TorchStore, rank: int, global_ranks: Sequence[int]) -> None:
        self._store: Final = store
        self._rank: Final = rank
        self._global_ranks: Final = global_ranks
        self._size: Final = len(global_ranks)
        self._number = 0

    def check(
        self,
        call: CollectiveCall,
        timeout_s: float,
        wait_for_all_ranks: Callable[[TorchStore, Sequence[str], float], bool],
    ) -> None:
        """Waits until all ranks have called a collective, and compares the calls.

        Collectives of a group are called by one thread at a time, so this is not thread-safe. `wait_for_all_ranks`
        is GroupCore's, whose errors are raised.

        Raises:
            CollectiveMismatchError: the calls differ.
            CollectiveTimeoutError: ranks did not call a collective in time.
        """
        self._number += 1
        own_call = {"call": _describe_call(call), "call_site": "{}:{}".format(*find_call_site())}
        self._store.set(self._key(self._rank), json.dumps(own_call))
        if not wait_for_all_ranks(self._store, [self._key(rank) for rank in range(self._size)], timeout_s):
            missing = [rank for rank in range(self._size) if not self._store.check([self._key(rank)])]
            ranks = _format_ranks([self._global_ranks[rank] for rank in missing])
            operation = f"{call.name} (collective {self._number} of the group)"
            raise CollectiveTimeoutError(operation, timeout_s, f"{ranks} to call it")
        calls = [json.loads(self._store.get(self._key(rank))) for rank in range(self._size)]
        if self._number > 1:  # all ranks have read the previous call, since they have made this one
            self._store.delete_key(f"{self._number - 1}/{self._rank}")
        _compare(self._number, calls, self._global_ranks)

    def _key(self, rank: int) -> str:
        return f"{self._number}/{rank}"


def _describe_call(call: CollectiveCall) -> dict[str, Any]:
    """Returns what must be the same on all ranks, as JSON values."""
    found: dict[str, Any] = {"operation": call.name}
    if call.inputs or call.outputs:
        found["dtype"] = str((call.inputs or call.outputs)[0].dtype).removeprefix("torch.")
    if call.name in _EQUAL_INPUT_SHAPES:
        found["shapes"] = [list(tensor.shape) for tensor in call.inputs]
    if call.name == "scatter":
        found["shapes"] = [list(tensor.shape) for tensor in call.outputs]
    if call.reduction is not None:
        found["reduction"] = call.reduction.name
    if call.root is not None:
        found["root"] = call.root
    return found


def _compare(number: int, calls: Sequence[dict[str, Any]], global_ranks: Sequence[int]) -> None:
    texts = [json.dumps(each["call"], sort_keys=True) for each in calls]
    common, count = Counter(texts).most_common(1)[0]
    if count == len(texts):
        return
    same = [rank for rank, text in enumerate(texts) if text == common]
    odd = [rank for rank, text in enumerate(texts) if text != common]
    lines = [f"ranks do not agree on collective {number} of the group:"]
    lines.append(f"  {_format_ranks([global_ranks[rank] for rank in same])}: {_format_call(calls[same[0]])}")
    lines += [f"  rank {global_ranks[rank]}: {_format_call(calls[rank])}" for rank in odd]
    raise CollectiveMismatchError([global_ranks[rank] for rank in odd], "\n".join(lines))


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _format_call(described: dict[str, Any]) -> str:
    call = dict(described["call"])
    name = call.pop("operation")
    arguments = ", ".join(f"{key}={value}" for key, value in call.items())
    return printable(f"{name}({arguments}) at {described['call_site']}", MAX_CALL_CHARACTERS)


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
        """Waits until all ranks have called it. `wait_for_all_ranks` is GroupCore's, whose errors are raised.

        With `wait_all_ranks`, the error on rank 0 names all absent ranks, not only the first, in torch's wording.

        Raises CollectiveTimeoutError if some ranks did not call it in time; it names every one.
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
                f"{_format_ranks(missing)}. Rank {rank} successfully reached monitoredBarrier, but received "
                f"errors while waiting for send/recv from rank {first}"
            )
        failed = _format_ranks(missing if wait_all_ranks else missing[:1]).capitalize()
        return (
            f"{_format_ranks(missing)}. Rank {rank} timed out in monitoredBarrier after {limit}: "
            f"{failed} failed to pass monitoredBarrier in {limit}"
        )


def _key(number: int, rank: int) -> str:
    return f"monitored_barrier/{number}/{rank}"
