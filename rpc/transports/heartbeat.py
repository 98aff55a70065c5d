"""Heartbeats on connections that carry nothing else, and the silence of peers that send none.

A timer of the event loop looks at all connections, twice in the time between two heartbeats. It counts only the
time in which this process runs: neither while it is stopped, nor while the loop has to wait for the interpreter.
A peer whose process runs, as the kernel shows (life_signs.py), is silent because its program holds the
interpreter; it has a lease more to say something.
Workers of one host see each other's pulse instead of sending heartbeats, once both have shown it (pulse.py).
"""

import asyncio
import fcntl
import logging
import termios
from dataclasses import dataclass
from typing import Protocol, final

from ..contracts.liveness import Liveness
from .life_signs import ReceivedTimes
from .pulse import Pulse

__all__ = ["Heartbeats", "Watched", "has_unread"]

TICKS = 2
"""Looks at a connection in the time between two heartbeats."""

MAX_LATE_TICKS = 2
"""Ticks that the timer may be late; after that, peers get all of their time anew."""

log = logging.getLogger(__name__)


class Watched(Protocol):
    """A connection to a peer. Its methods are called on the event loop."""

    def take_heard(self) -> bool:
        """Returns whether something has come since the last call, or might have if this worker had read it."""

    def take_sent(self) -> bool:
        """Returns whether something has been sent since the last call, or waits for the peer to read."""

    def send_heartbeat(self) -> None:
        """Tells the peer that this worker is alive, unless the peer sees that."""

    def sees_life(self, seconds: float) -> bool:
        """Returns whether the kernel shows that the peer's process runs, or did in the last seconds."""

    def on_silent(self, seconds: float) -> None:
        """Handles that nothing has come for so long. Has to `remove` the connection."""


@final
@dataclass(slots=True)
class _State:
    """When something has come by a connection, and gone, by the clock of Heartbeats."""

    heard: float
    sent: float


@final
class Heartbeats:
    """Watches the connections of one agent. Used on the event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, liveness: Liveness, pulse: Pulse) -> None:
        """Watches nothing yet; the pulse beats while the timer runs."""
        self._loop = loop
        self._liveness = liveness
        self.pulse = pulse
        """Of this worker."""
        self.received = ReceivedTimes(loop)
        """Tells of silent peers whether their pings come."""
        self._interval = liveness.heartbeat / TICKS
        self._watched: dict[Watched, _State] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._now = 0.0
        """Seconds for which the timer has run."""
        self._last_tick = 0.0
        """By the clock of the loop."""

    def add(self, connection: Watched) -> None:
        """Watches a connection from now on."""
        self._watched[connection] = _State(self._now, self._now)
        if self._timer is None:
            self._last_tick = self._loop.time()
            self._timer = self._loop.call_later(self._interval, self._tick)

    def remove(self, connection: Watched) -> None:
        """Watches a connection no longer, if it does."""
        self._watched.pop(connection, None)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        elapsed = self._loop.time() - self._last_tick
        self._last_tick += elapsed
        self._now += min(elapsed, MAX_LATE_TICKS * self._interval)
        is_late = elapsed > (1 + MAX_LATE_TICKS) * self._interval
        self._timer = self._loop.call_later(self._interval, self._tick)
        self.pulse.beat()
        for connection, state in list(self._watched.items()):
            try:
                self._look_at(connection, state, is_late=is_late)
            except Exception:  # of one connection: the peers behind it have to get their heartbeats
                log.exception("a connection cannot be watched")

    def _look_at(self, connection: Watched, state: _State, *, is_late: bool) -> None:
        if connection.take_sent():
            state.sent = self._now
        elif self._now - state.sent > self._liveness.heartbeat - self._interval / 2:
            connection.send_heartbeat()
            state.sent = self._now
            connection.take_sent()  # which counts the heartbeat
        if connection.take_heard() or is_late:
            state.heard = self._now
        elif (seconds := self._now - state.heard) >= (limit := self._liveness.suspect_after):
            may_live = seconds < limit + self._liveness.lease
            if not (may_live and connection.sees_life(limit)):
                connection.on_silent(seconds)


def has_unread(descriptor: int) -> bool:
    """Returns whether bytes have come by a socket that nobody has read, or it is closed."""
    count = bytearray(4)
    try:
        fcntl.ioctl(descriptor, termios.FIONREAD, count)
    except OSError:
        return True
    return any(count)
