"""Checks that all ranks of a group call the same collective, before it begins.

Each rank writes what it calls to the group's store and reads what the others wrote. That takes two rounds trips to
the store for each collective, so it is for finding faults: TORCH_DISTRIBUTED_DEBUG=DETAIL or the group's options
turn it on.
"""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, final

from ...errors import CollectiveMismatchError, CollectiveTimeoutError
from ..call import CollectiveCall
from ..torch_types import TorchStore
from .source import caller

__all__ = ["ConsistencyCheck"]

_SAME_INPUTS = frozenset(
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
"""Collectives whose inputs have the same shapes on all ranks; the others' may differ."""


@final
class ConsistencyCheck:
    """That of one group, on one of its ranks. Collectives of a group are called by one thread after another."""

    def __init__(self, store: TorchStore, rank: int, global_ranks: Sequence[int]) -> None:
        self._store: Final = store
        self._rank: Final = rank
        self._global_ranks: Final = global_ranks
        self._size: Final = len(global_ranks)
        self._number = 0

    def check(self, call: CollectiveCall, seconds: float) -> None:
        """Waits for all ranks' calls.

        Raises:
            CollectiveMismatchError: they differ.
            CollectiveTimeoutError: ranks did not call anything in time.
        """
        self._number += 1
        mine = {"call": _fingerprint(call), "place": "{}:{}".format(*caller())}
        self._store.set(self._key(self._rank), json.dumps(mine))
        try:
            self._store.wait([self._key(rank) for rank in range(self._size)], timedelta(seconds=seconds))
        except RuntimeError as error:
            raise self._missing(call, seconds) from error
        everybody = [json.loads(self._store.get(self._key(rank))) for rank in range(self._size)]
        if self._number > 1:  # everybody has read the last one's, or would not be here
            self._store.delete_key(self._key(self._rank, self._number - 1))
        _compare(self._number, everybody, self._global_ranks)

    def _key(self, rank: int, number: int | None = None) -> str:
        return f"{self._number if number is None else number}/{rank}"

    def _missing(self, call: CollectiveCall, seconds: float) -> CollectiveTimeoutError:
        missing = [rank for rank in range(self._size) if not self._store.check([self._key(rank)])]
        ranks = _ranks([self._global_ranks[rank] for rank in missing])
        what = f"{call.name} (collective {self._number} of the group)"
        return CollectiveTimeoutError(what, seconds, f"{ranks} to call it")


def _fingerprint(call: CollectiveCall) -> dict[str, Any]:
    found: dict[str, Any] = {"operation": call.name}
    if call.inputs or call.outputs:
        found["dtype"] = str((call.inputs or call.outputs)[0].dtype).removeprefix("torch.")
    if call.name in _SAME_INPUTS:
        found["shapes"] = [list(tensor.shape) for tensor in call.inputs]
    if call.name == "scatter":
        found["shapes"] = [list(tensor.shape) for tensor in call.outputs]
    if call.reduction is not None:
        found["reduction"] = call.reduction.name
    if call.root is not None:
        found["root"] = call.root
    return found


def _compare(number: int, everybody: Sequence[dict[str, Any]], global_ranks: Sequence[int]) -> None:
    """Raises if not all called the same."""
    texts = [json.dumps(each["call"], sort_keys=True) for each in everybody]
    common, count = Counter(texts).most_common(1)[0]
    if count == len(texts):
        return
    odd = [rank for rank, text in enumerate(texts) if text != common]
    lines = [f"ranks do not agree on collective {number} of the group:"]
    same = [rank for rank, text in enumerate(texts) if text == common]
    lines.append(f"  {_ranks([global_ranks[rank] for rank in same])}: {_shown(everybody[same[0]])}")
    lines += [f"  rank {global_ranks[rank]}: {_shown(everybody[rank])}" for rank in odd]
    raise CollectiveMismatchError([global_ranks[rank] for rank in odd], "\n".join(lines))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _shown(said: dict[str, Any]) -> str:
    call = dict(said["call"])
    name = call.pop("operation")
    return f"{name}({', '.join(f'{key}={value}' for key, value in call.items())}) at {said['place']}"
