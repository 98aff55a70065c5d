"""An event loop whose time does not pass by itself, for simulations."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

STEP_S = 1e-6
"""Seconds that pass in each step of the event loop at least, so that no timer is due again at the same time."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop without sockets whose time is that of the next timer."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_NoSockets(self._pass_time))

    def time(self) -> float:
        return self._now

    def _pass_time(self, seconds: float) -> None:
        self._now += seconds

    def _write_to_self(self) -> None:
        """Nobody waits for another thread."""


class _NoSockets(selectors.SelectSelector):
    def __init__(self, pass_time: Callable[[float], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("nothing can happen any more")
        self._pass_time(max(STEP_S, timeout))
        return []
