"""The state of a job in a terminal: what of it fits into the window, and what keys choose."""

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import final

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..net.peer_text import printable
from .client import PageClient
from .tables import ORDERS, Json, Section, head_of, sections_of

__all__ = ["Choice", "render", "show"]

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
class Choice:
    """What is shown.

    height: lines of the window; None for all rows, however many there are.
    width: characters of a line; None for all columns.
    only: the first letter of the one table that is shown; empty for all.
    first: the row that comes first.
    order: one of ORDERS.
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
                names = list(ORDERS)
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
            choice = choice.within(max(len(each.rows) for each in sections_of(overview, choice.order)))
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


def render(overview: Json, choice: Choice | None = None, problem: str = "") -> RenderableType:
    """Returns what is shown of the state of a job, by default all of it; `problem` says why it is an old one."""
    choice = choice or Choice()
    head = [*([Text(problem, style="red")] if problem else []), *head_of(overview)]
    sections = [
        each for each in sections_of(overview, choice.order) if each.rows and choice.only in ("", each.name[0])
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


def _rows_each(sections: Sequence[Section], lines: int) -> list[int]:
    """Returns how many rows of each table fit into so many lines: as many of each, as far as it has them."""
    wanted = [len(each.rows) for each in sections]
    left = lines - FRAME_LINES * len(sections)
    given = [min(each, MIN_ROWS) for each in wanted]
    while sum(given) < left and given != wanted:
        index = min((i for i in range(len(given)) if given[i] < wanted[i]), key=lambda i: given[i])
        given[index] += 1
    return given


def _table(section: Section, choice: Choice, count: int) -> RenderableType:
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
