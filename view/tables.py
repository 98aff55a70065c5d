"""The tables of a job that `gradwire top` shows, as texts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

from rich.text import Text

from ..net.peer_text import printable
from .waits import WAITS_FOR_THE_END

__all__ = ["ORDERS", "Json", "Section", "head_of", "sections_of"]

Json = Mapping[str, Any]
Row = Sequence[str | Text]

MAX_ROWS = 1000
"""Rows of a table of calls, failures or links; a job of many workers may have more."""

MAX_LINKS = 2
"""Bad links of a worker that are named."""

ORDERS: Mapping[str, Callable[[Json], float]] = {
    "ended": lambda call: call["count"],
    "p99": lambda call: call["duration"]["p99_s"] or 0.0,
    "failed": lambda call: sum(call["failures"].values()),
}
"""By what calls may be ordered, the largest first."""

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@final
@dataclass(frozen=True, slots=True)
class Section:
    """A table: its name, of which the first letter is its key, its columns, and its rows."""

    name: str
    texts: Sequence[str]
    numbers: Sequence[str]
    rows: Sequence[Row]


def head_of(overview: Json) -> Iterator[Text]:
    """Yields the lines about the whole job, and about those who wait."""
    workers = overview["workers"]
    count = "1 worker" if len(workers) == 1 else f"{len(workers)} workers"
    yield Text(f"{count}, asked by {printable(overview['asked_by'])} in {overview['seconds']:.2f} s")
    yield _rates(overview["timeline"])
    for wait in overview["waits"]:
        yield from _wait(wait, overview)


def _rates(timeline: Json) -> Text:
    """Returns what the job has done in the last second that has ended, and in the minute."""
    last, lost, returned = -2, sum(timeline["lost"]), sum(timeline["returned"])
    rates = f"{timeline['calls'][last]:.0f} calls/s, {timeline['bytes'][last] / (1 << 20):.1f} MiB/s"
    changes = f"in the last minute {lost:.0f} lost, {returned:.0f} returned"
    return Text(f"{rates}; {changes}", style="red" if lost else "")


def _wait(wait: Json, overview: Json) -> Iterator[Text]:
    """Yields who waits in a collective, for whom, and in which lines both are."""
    missing = ", ".join(printable(name, 500) for name in wait["missing"])
    waits_for = "serves until the end of" if wait["operation"] == WAITS_FOR_THE_END else "waits for"
    group = f" of group {printable(wait['group'])}" if wait["group"] else ""
    text = f"{printable(wait['operation'])}{group} for {overview['time'] - wait['since']:.1f} s"
    text += f": {waits_for} {missing}" if missing else ": all have entered"
    yield Text(text, style="red" if wait["stuck"] else "")
    if wait["call_site"]:
        yield Text(f"  called at {printable(wait['call_site'], 500)}")
    silent = {each["name"] for each in overview["workers"] if each["state"] is None}
    for name in wait["missing"]:
        if name in silent:
            yield Text(f"  {printable(name)} does not answer")
        elif name in wait["missing_at"]:
            yield Text(f"  {printable(name)} is at {printable(wait['missing_at'][name], 500)}")


def sections_of(overview: Json, order: str) -> Iterator[Section]:
    """Yields the tables of a job, some of which may have no rows.

    Args:
        overview: the state of the job.
        order: one of ORDERS, for the calls.
    """
    states = [(each["name"], each["state"]) for each in overview["workers"] if each["state"] is not None]
    usage = ("up", "CPU", "memory", "running", "queued", "unanswered", "sent", "received", "values")
    yield Section("workers", ("worker", "state"), usage, [*_workers(overview)])
    errors = ("last error", "function", "caller", "callee")
    yield Section("failures", errors, ("times", "ago"), _failures(overview))
    durations = ("ended", "in flight", "failed", "p50", "p99")
    yield Section("calls", ("caller", "callee", "function"), durations, _calls(states, order))
    yield Section(
        "links", ("from", "to", "link"), ("messages", "bytes", "in flight"), [*islice(_links(states), MAX_ROWS)]
    )
    counts = ("produced", "consumed", "not acknowledged", "not read")
    yield Section("streams", ("worker",), counts, [*_streams(states)])


def _workers(overview: Json) -> Iterator[Row]:
    """Yields a line for each worker. One that is lost has a line of its own."""
    lost = {}
    for worker in overview["workers"]:
        if worker["state"] is not None:
            lost.update(worker["state"]["lost"])
    for worker in overview["workers"]:
        name, state = Text(printable(worker["name"])), worker["state"]
        if state is None:
            if worker["name"] not in lost:
                yield name, Text(printable(worker["error"]), style="red")
            continue
        lost.pop(worker["name"], None)  # it is there again
        executor, traffic, process = state["queues"]["executor"], state["traffic"], state["process"]
        bad = [(peer, link["state"]) for peer, link in state["links"].items() if _is_bad(link)]
        links = [f"{printable(peer)} {how}" for peer, how in bad[:MAX_LINKS]]
        links += [f"{len(bad) - MAX_LINKS} more"] * (len(bad) > MAX_LINKS)
        yield (
            name,
            Text(", ".join(links) or "answers", style="yellow" if bad else ""),
            _age(overview["time"] - process["started"]),
            f"{process['cpu_percent']:.0f} %",
            _bytes(process["memory_bytes"]),
            str(executor["running"]),
            str(executor["queued"]),
            str(sum(state["calls"]["unanswered"].values())),
            _bytes(traffic["bytes_sent"]),
            _bytes(traffic["bytes_received"]),
            str(state["references"]["values"]),
        )
    for who, reason in lost.items():
        yield Text(printable(who)), Text(f"lost: {printable(reason)}", style="red")


def _is_bad(link: Json) -> bool:
    return link["state"] in ("checking", "suspect")


def _failures(overview: Json) -> list[Row]:
    """Returns the functions that have failed, as their callers tell, and those of others; the latest first."""
    found: dict[tuple[str, str, str], tuple[int, Json]] = {}
    states = [(each["name"], each["state"]) for each in overview["workers"] if each["state"] is not None]
    for name, state in states:
        for call in state["calls"]["sent"]:
            if call["last_error"] is not None:
                key = name, call["worker"], call["function"]
                found[key] = sum(call["failures"].values()), call["last_error"]
    for name, state in states:
        for call in state["calls"]["served"]:
            if call["last_error"] is not None:
                found.setdefault((call["caller"], name, call["function"]), (call["failed"], call["last_error"]))
    latest = sorted(found.items(), key=lambda item: -item[1][1]["time"])
    return [
        (
            Text(printable(error["text"]), style="red"),
            *(Text(printable(each)) for each in (function, caller, callee)),
            str(count),
            _age(overview["time"] - error["time"]),
        )
        for (caller, callee, function), (count, error) in latest[:MAX_ROWS]
    ]


def _calls(states: Sequence[tuple[str, Json]], order: str) -> list[Row]:
    found = [(name, call) for name, state in states for call in state["calls"]["sent"]]
    found.sort(key=lambda pair: -ORDERS[order](pair[1]))
    return [
        (
            *(Text(printable(each)) for each in (caller, call["worker"], call["function"])),
            str(call["count"]),
            str(call["in_flight"]),
            str(sum(call["failures"].values())),
            _duration(call["duration"]["p50_s"]),
            _duration(call["duration"]["p99_s"]),
        )
        for caller, call in found[:MAX_ROWS]
    ]


def _links(states: Sequence[tuple[str, Json]]) -> Iterator[Row]:
    """Yields what has gone from each worker to each other one."""
    for name, state in states:
        for peer, traffic in state["traffic"]["by_worker"].items():
            if peer == name or (link := state["links"].get(peer)) is None:
                continue
            how = link["transport"] if link["state"] == "connected" else link["state"]
            yield (
                *(Text(printable(each)) for each in (name, peer)),
                Text(printable(how), style="yellow" if _is_bad(link) else ""),
                str(traffic["messages_sent"]),
                _bytes(sum(traffic["bytes_sent"].values())),
                str(state["queues"]["flow_control"].get(peer, {}).get("calls_in_flight", 0)),
            )


def _streams(states: Sequence[tuple[str, Json]]) -> Iterator[Row]:
    for name, state in states:
        streams = state["streams"]
        if streams["produced"] or streams["consumed"]:
            yield (
                Text(printable(name)),
                str(streams["produced"]),
                str(streams["consumed"]),
                _bytes(streams["bytes_sent"]),
                _bytes(streams["bytes_received"]),
            )


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{seconds / size:.3g} {unit}"
