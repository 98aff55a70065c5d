"""Who waits for whom: the collectives of a job that some of their members have not entered."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

__all__ = ["Waits"]

Json = Mapping[str, Any]

STUCK_AFTER_S = 10.0
"""Seconds after which a collective that some members have not entered counts as stuck, though all answer."""

WAITS_FOR_THE_END = "shutdown"
"""The collective in which workers serve until the others have finished, for as long as that takes."""

MAX_SILENT = 4
"""Workers without an answer that are named for a rank of which nothing is known."""


@final
class Waits:
    """Finds the collectives in flight. Remembers which worker has which rank, for those that stop to answer."""

    def __init__(self) -> None:
        self._known: dict[Any, dict[int, str]] = {}
        """The names of workers by rank, for the groups of which some worker has told last."""

    def of(self, workers: Sequence[Json], now: float) -> list[dict[str, Any]]:
        """Returns the collectives in flight, as JSON values, oldest first.

        Args:
            workers: the workers of a job, with their states, as in the state of the job.
            now: the time, in seconds since 1970.
        """
        states = {each["name"]: each["state"] for each in workers if each["state"] is not None}
        silent = [each["name"] for each in workers if each["state"] is None]
        lines = {name: state["worker"]["at"] for name, state in states.items()}
        found = [*_of_workers(states), *self._of_groups(states, silent)]
        for each in found:
            each["missing_at"] = {name: lines[name] for name in each["missing"] if lines.get(name)}
            each["stuck"] = _is_stuck(each, silent, now)
        return sorted(found, key=lambda each: each["since"])

    def _of_groups(self, states: Mapping[str, Json], silent: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yields the waits of collectives of process groups."""
        groups: dict[Any, dict[int, tuple[str, Json]]] = defaultdict(dict)
        for name, state in states.items():
            for group in state["process_groups"]:
                key = group["name"], tuple(group["global_ranks"])
                groups[key][group["rank"]] = name, group
        self._known = {
            key: {**self._known.get(key, {}), **{rank: name for rank, (name, _) in ranks.items()}}
            for key, ranks in groups.items()
        }
        for key, ranks in groups.items():
            calls = {
                rank: (worker, group["collective"])
                for rank, (worker, group) in ranks.items()
                if group["collective"]
            }
            running = {
                rank: (worker, call) for rank, (worker, call) in calls.items() if call["state"] == "in flight"
            }
            if not running:
                continue
            number = max(call["number"] for _, call in running.values())
            entered = {rank for rank, (_, call) in calls.items() if call["number"] >= number}
            oldest = min((call for _, call in running.values()), key=lambda call: call["since"])
            size = max(group["size"] for _, group in ranks.values())
            yield {
                "kind": "process_group",
                "group": key[0],
                "operation": oldest["operation"],
                "number": number,
                "since": oldest["since"],
                "entered": [ranks[rank][0] for rank in sorted(entered)],
                "missing": [
                    ranks[rank][0] if rank in ranks else self._name(key, rank, silent)
                    for rank in range(size)
                    if rank not in entered
                ],
                "call_site": oldest["call_site"],
            }

    def _name(self, key: tuple[Any, ...], rank: int, silent: Sequence[str]) -> str:
        """Returns the name of the worker with a rank that nobody tells, or the rank, and who may have it."""
        if (known := self._known[key].get(rank)) in silent:
            return str(known)
        if not silent:
            return f"rank {rank}"
        more = ", …" if len(silent) > MAX_SILENT else ""
        return f"rank {rank} (no answer from {', '.join(silent[:MAX_SILENT])}{more})"


def _is_stuck(wait: Json, silent: Sequence[str], now: float) -> bool:
    """Returns whether something is wrong with a wait: a member does not answer, or it takes too long."""
    if any(name in silent for name in wait["missing"]):
        return True
    is_late = wait["operation"] != WAITS_FOR_THE_END and now - wait["since"] > STUCK_AFTER_S
    return bool(wait["missing"]) and is_late


def _of_workers(states: Mapping[str, Json]) -> Iterator[dict[str, Any]]:
    """Yields the waits of `rpc.barrier` and `rpc.all_gather`."""
    rounds: dict[Any, dict[str, Json]] = defaultdict(dict)
    for name, state in states.items():
        for each in state["collectives"]:
            rounds[each["topic"], each["number"], tuple(each["members"])][name] = each
    for (_, number, members), entered in rounds.items():
        oldest = min(entered.values(), key=lambda each: each["since"])
        yield {
            "kind": "rpc",
            "group": "",
            "operation": oldest["operation"],
            "number": number,
            "since": oldest["since"],
            "entered": sorted(entered),
            "missing": [name for name in members if name not in entered],
            "call_site": oldest["call_site"],
        }
