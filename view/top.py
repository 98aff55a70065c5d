"""The state of a job in a terminal: its tables, what of them fits into the window, and what keys choose."""

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any, final

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..net.peer_text import printable
from .access import PageClient
from .waits import STUCK_AFTER_S, WAITS_FOR_THE_END

__all__ = ["Choice", "render", "show"]

_Json = Mapping[str, Any]
Row = Sequence[str | Text]

MAX_ROWS = 1000
"""Rows of a table of calls, failures or links; a job of many workers may have more."""

MAX_LINKS = 2
"""Bad links of a worker that are named."""

_ORDERS: Mapping[str, Callable[[_Json], float]] = {
    "ended": lambda call: call["count"],
    "oldest": lambda call: call["oldest_s"] or 0.0,
    "p99": lambda call: call["duration"]["p99_s"] or 0.0,
    "failed": lambda call: sum(call["failures"].values()),
}
"""By what calls may be ordered, the largest first. Those in flight for STUCK_AFTER_S come before others."""

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))

MIN_TEXT_WIDTH = 14
"""Characters of a column of texts, at least, if its texts are as long: longer ones are cut in a narrow window."""

MIN_ROWS = 2
"""Rows that each table has at least, in a window that is too small for all of them."""

FRAME_LINES = 3
"""Lines of a table besides its rows: a blank one, the names of the columns, and what is said of more rows."""

MAX_HEAD = 8
"""Lines about the job and about those who wait, in a window."""

KEYS = "q quit  a all tables  w f c l s one of them  ↑↓ scroll  o order of calls"


@final
@dataclass(frozen=True, slots=True)
class _Section:
    """A table: its name, of which the first letter is its key, its columns, and its rows."""

    name: str
    texts: Sequence[str]
    numbers: Sequence[str]
    rows: Sequence[Row]


def _head_of(overview: _Json) -> Iterator[Text]:
    """Yields the lines about the whole job, and about those who wait."""
    workers = overview["workers"]
    count = "1 worker" if len(workers) == 1 else f"{len(workers)} workers"
    yield Text(f"{count}, asked by {printable(overview['asked_by'])} in {overview['seconds']:.2f} s")
    yield _rates(overview["timeline"])
    for wait in overview["waits"]:
        yield from _wait(wait, overview)


def _rates(timeline: _Json) -> Text:
    """Returns what the job has done in the last second that has ended, and in the minute."""
    last, lost, returned = -2, sum(timeline["lost"]), sum(timeline["returned"])
    rates = f"{timeline['calls'][last]:.0f} calls/s, {timeline['bytes'][last] / (1 << 20):.1f} MiB/s"
    changes = f"in the last minute {lost:.0f} lost, {returned:.0f} returned"
    return Text(f"{rates}; {changes}", style="red" if lost else "")


def _wait(wait: _Json, overview: _Json) -> Iterator[Text]:
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


def _sections_of(overview: _Json, order: str) -> Iterator[_Section]:
    """Yields the tables of a job, some of which may have no rows.

    Args:
        overview: the state of the job.
        order: one of _ORDERS, for the calls.
    """
    states = [(each["name"], each["state"]) for each in overview["workers"] if each["state"] is not None]
    usage = ("up", "CPU", "memory", "running", "queued", "unanswered", "sent", "received", "values")
    yield _Section("workers", ("worker", "state"), usage, [*_workers(overview)])
    errors = ("last error", "function", "caller", "callee")
    yield _Section("failures", errors, ("times", "ago"), _failures(overview))
    figures = ("ended", "in flight", "oldest", "failed", "p50", "p99")
    yield _Section("calls", ("caller", "callee", "function"), figures, _calls(states, order))
    yield _Section(
        "links", ("from", "to", "link"), ("messages", "bytes", "in flight"), [*islice(_links(states), MAX_ROWS)]
    )
    counts = ("produced", "consumed", "not acknowledged", "not read")
    yield _Section("streams", ("worker",), counts, [*_streams(states)])


def _workers(overview: _Json) -> Iterator[Row]:
    """Yields a line for each worker: first those that are lost or do not answer, as not all may be shown."""
    states = {each["name"]: each["state"] for each in overview["workers"] if each["state"] is not None}
    lost = {who: why for state in states.values() for who, why in state["lost"].items() if who not in states}
    for who, reason in lost.items():
        yield Text(printable(who)), Text(f"lost: {printable(reason)}", style="red")
    for worker in overview["workers"]:
        if worker["state"] is None and worker["name"] not in lost:
            yield Text(printable(worker["name"])), Text(printable(worker["error"]), style="red")
    for worker, state in states.items():
        executor, traffic, process = state["queues"]["executor"], state["traffic"], state["process"]
        bad = [(peer, link["state"]) for peer, link in state["links"].items() if _is_bad(link)]
        links = [f"{printable(peer)} {how}" for peer, how in bad[:MAX_LINKS]]
        links += [f"{len(bad) - MAX_LINKS} more"] * (len(bad) > MAX_LINKS)
        yield (
            Text(printable(worker)),
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


def _is_bad(link: _Json) -> bool:
    return link["state"] in ("checking", "suspect")


def _failures(overview: _Json) -> list[Row]:
    """Returns the functions that have failed, as their callers tell, and those of others; the latest first."""
    found: dict[tuple[str, str, str], tuple[int, _Json]] = {}
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


def _calls(states: Sequence[tuple[str, _Json]], order: str) -> list[Row]:
    found = [(name, call) for name, state in states for call in state["calls"]["sent"]]
    found.sort(key=lambda pair: ((pair[1]["oldest_s"] or 0.0) < STUCK_AFTER_S, -_ORDERS[order](pair[1])))
    return [
        (
            *(Text(printable(each)) for each in (caller, call["worker"], call["function"])),
            str(call["count"]),
            str(call["in_flight"]),
            "" if call["oldest_s"] is None else _age(call["oldest_s"]),
            str(sum(call["failures"].values())),
            _duration(call["duration"]["p50_s"]),
            _duration(call["duration"]["p99_s"]),
        )
        for caller, call in found[:MAX_ROWS]
    ]


def _links(states: Sequence[tuple[str, _Json]]) -> Iterator[Row]:
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


def _streams(states: Sequence[tuple[str, _Json]]) -> Iterator[Row]:
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


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """What is shown.

    height: lines of the window; None for all rows, however many there are.
    width: characters of a line; None for all columns.
    only: the first letter of the one table that is shown; empty for all.
    first: the row that comes first.
    order: one of _ORDERS.
    """

    height: int | None = None
    width: int | None = None
    only: str = ""
    first: int = 0
    order: str = "ended"

    def after(self, key: str) -> "Choice":
        """Returns what is shown after a key."""
        match key:
            case "w" | "c" | "f" | "l" | "s":
                return replace(self, only=key, first=0)
            case "a":
                return replace(self, only="", first=0)
            case "\x1b[A" | "\x1bOA" | "k":
                return replace(self, first=max(0, self.first - 1))
            case "\x1b[B" | "\x1bOB" | "j":
                return replace(self, first=self.first + 1)
            case "o":
                names = list(_ORDERS)
                return replace(self, order=names[(names.index(self.order) + 1) % len(names)])
        return self

    def within(self, rows: int) -> "Choice":
        """Returns the same, without scrolling behind the last of so many rows."""
        return replace(self, first=min(self.first, max(0, rows - 1)))


def show(client: PageClient, *, interval: float, once: bool) -> None:
    """Shows the state of a job, asked for every `interval` seconds, until Ctrl-C or the key q; or prints it once.

    Raises:
        ConnectionError: the page cannot be reached.
    """
    console = Console()
    overview = client.overview()
    if once:
        console.print(render(overview))
        return
    choice, problem = Choice(console.height, console.width), ""
    asked = time.monotonic()
    with (
        _keys() as next_key,
        Live(render(overview, choice), console=console, screen=True, auto_refresh=False) as live,
    ):
        while (key := next_key(max(0.0, asked + interval - time.monotonic()))) != "q":
            choice = replace(choice.after(key), height=console.height, width=console.width)
            if not key:
                asked, problem = time.monotonic(), ""
                try:
                    overview = client.overview()
                except ConnectionError as error:
                    problem = f"not as it is now: {printable(error, 500)}"
            choice = choice.within(max(len(each.rows) for each in _sections_of(overview, choice.order)))
            live.update(render(overview, choice, problem), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Context manager in which keys are read one by one: yields a function that waits so many seconds for one."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    pressed: deque[str] = deque()

    def next_key(seconds: float) -> str:
        if not pressed and select.select([terminal], [], [], seconds)[0]:
            # Several, if they were pressed during a question. At the end of the terminal, as if it were quit.
            text = os.read(terminal, 1024).decode(errors="replace") or "q"
            pressed.extend(re.findall(r"\x1b[\[O].|.", text, re.S))
        return pressed.popleft() if pressed else ""

    try:
        tty.setcbreak(terminal)
        yield next_key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def render(overview: _Json, choice: Choice | None = None, problem: str = "") -> RenderableType:
    """Returns what is shown of the state of a job, by default all of it; `problem` says why it is an old one."""
    choice = choice or Choice()
    head = [*([Text(problem, style="red")] if problem else []), *_head_of(overview)]
    sections = [
        each for each in _sections_of(overview, choice.order) if each.rows and choice.only in ("", each.name[0])
    ]
    if choice.height is None:
        return Group(*head, *(_table(each, choice, len(each.rows)) for each in sections))
    if len(head) > MAX_HEAD:
        head = [*head[: MAX_HEAD - 1], Text(f"{len(head) - MAX_HEAD + 1} more lines", style="yellow")]
    for each in head:
        each.no_wrap, each.overflow = True, "ellipsis"
    left = choice.height - len(head) - 1
    fitting = max(1, min(len(sections), left // (FRAME_LINES + MIN_ROWS)))
    keys = KEYS
    if hidden := [each.name for each in sections[fitting:]]:
        keys = f"{', '.join(hidden)}: press the first letter   {KEYS}"
    counts = _rows_each(sections[:fitting], left)
    tables = [_table(each, choice, count) for each, count in zip(sections[:fitting], counts, strict=True)]
    return Group(*head, *tables, Text(keys, style="dim", no_wrap=True, overflow="ellipsis"))


def _rows_each(sections: Sequence[_Section], lines: int) -> list[int]:
    """Returns how many rows of each table fit into so many lines: as many of each, as far as it has them."""
    wanted = [len(each.rows) for each in sections]
    left = lines - FRAME_LINES * len(sections)
    given = [min(each, MIN_ROWS) for each in wanted]
    while sum(given) < left and given != wanted:
        index = min((i for i in range(len(given)) if given[i] < wanted[i]), key=lambda i: given[i])
        given[index] += 1
    return given


def _table(section: _Section, choice: Choice, count: int) -> RenderableType:
    """Returns a table with so many of its rows, and says how many there are above and below."""
    first = max(0, min(choice.first, len(section.rows) - count))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    names, rows = (*section.texts, *section.numbers), section.rows[first : first + count]
    widths = [max(len(cell) for cell in column) for column in zip_longest(names, *rows, fillvalue="")]
    texts = len(section.texts)
    if choice.width is not None:
        widths = _fitting(widths, texts, choice.width)
    shown = len(widths)
    for index, (name, width) in enumerate(zip(names, widths, strict=False)):
        justify: JustifyMethod = "left" if index < texts else "right"
        # Else what leaves the terminal is as long as it is: `--once` shows all.
        least = width if choice.width is not None or index >= texts else None
        table.add_column(
            name,
            justify=justify,
            no_wrap=choice.height is not None or index >= texts,
            overflow="ellipsis",
            min_width=least,
            max_width=least,
        )
    for row in rows:
        table.add_row(*row[:shown])
    after = len(section.rows) - first - len(rows)
    more = [f"{first} above"] * bool(first) + [f"{after} more {section.name}"] * bool(after)
    more += [f"in a wider window: {', '.join(names[shown:])}"] * (shown < len(names))
    return Group(Text(), table, Text("; ".join(more), style="yellow")) if more else Group(Text(), table)


def _fitting(widths: Sequence[int], texts: int, available: int) -> list[int]:
    """Returns the widths of the columns that fit, given those of their longest cells.

    Columns of texts are cut before others are left out, and wider again if there is room, the first one first.
    """
    fitting = [min(each, MIN_TEXT_WIDTH) for each in widths[:texts]]
    for width in widths[texts:]:
        if sum(fitting) + len(fitting) + width > available:
            break
        fitting.append(width)
    left = available - sum(fitting) - len(fitting) + 1
    for index, width in enumerate(widths[:texts]):
        more = max(0, min(width - fitting[index], left))
        fitting[index] += more
        left -= more
    return fitting
