"""The state of a job in a terminal."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..net.peer_text import printable
from .client import PageClient
from .waits import WAITS_FOR_THE_END

__all__ = ["render", "show"]

Json = Mapping[str, Any]

MAX_CALLS = 20
"""Series of calls that are shown: those that were called most."""

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def show(client: PageClient, *, interval: float, once: bool) -> None:
    """Shows the state of a job until Ctrl-C.

    Args:
        client: asks for it.
        interval: seconds between two questions.
        once: print it once instead.

    Raises:
        ConnectionError: the page cannot be reached.
    """
    console = Console()
    overview = client.overview()
    if once:
        console.print(render(overview))
        return
    with Live(render(overview), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                live.update(render(client.overview()), refresh=True)
            except ConnectionError as error:
                live.update(Text(printable(error, 500), style="red"), refresh=True)


def render(overview: Json) -> RenderableType:
    """Returns what is shown of the state of a job."""
    return Group(*_parts(overview))


def _parts(overview: Json) -> Iterator[RenderableType]:
    count = _count(len(overview["workers"]))
    yield Text(f"{count}, asked by {printable(overview['asked_by'])} in {overview['seconds']:.2f} s")
    yield _rates(overview["timeline"])
    for wait in overview["waits"]:
        yield from _wait(wait, overview)
    yield _workers(overview)
    if (calls := _calls(overview)) is not None:
        yield calls


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


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _workers(overview: Json) -> Table:
    table = _table(
        "worker", "state", numbers=("running", "queued", "unanswered", "sent MiB", "received MiB", "values")
    )
    for worker in overview["workers"]:
        name, state = Text(printable(worker["name"])), worker["state"]
        if state is None:
            table.add_row(name, Text(printable(worker["error"]), style="red"))
            continue
        executor, traffic = state["queues"]["executor"], state["traffic"]
        bad = [f"{printable(peer)} {link['state']}" for peer, link in state["links"].items() if _is_bad(link)]
        table.add_row(
            name,
            Text(", ".join(bad) or "answers", style="yellow" if bad else ""),
            str(executor["running"]),
            str(executor["queued"]),
            str(sum(state["calls"]["unanswered"].values())),
            f"{traffic['bytes_sent'] / (1 << 20):.1f}",
            f"{traffic['bytes_received'] / (1 << 20):.1f}",
            str(state["references"]["values"]),
        )
    return table


def _is_bad(link: Json) -> bool:
    return link["state"] not in ("connected", "unconnected")


def _calls(overview: Json) -> Table | None:
    found = [
        (worker["name"], call)
        for worker in overview["workers"]
        if worker["state"] is not None
        for call in worker["state"]["calls"]["sent"]
    ]
    if not found:
        return None
    found.sort(key=lambda pair: -pair[1]["count"])
    table = _table("caller", "callee", "function", numbers=("ended", "in flight", "failed", "p50", "p99"))
    for caller, call in found[:MAX_CALLS]:
        table.add_row(
            Text(printable(caller)),
            Text(printable(call["worker"])),
            Text(printable(call["function"])),
            str(call["count"]),
            str(call["in_flight"]),
            str(sum(call["failures"].values())),
            _duration(call["duration"]["p50_s"]),
            _duration(call["duration"]["p99_s"]),
        )
    return table


def _table(*texts: str, numbers: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in texts:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{seconds / size:.3g} {unit}"
