"""How this worker learns that peers live, are silent, or are gone.

- Heartbeats go by connections that carry nothing else. A timer of the event loop looks at all connections, twice
  in the time between two heartbeats. It counts only the time in which this process runs: neither while it is
  stopped, nor while the loop has to wait for the interpreter.
- Workers of one host count up in shared memory instead: 32 idle workers would wake each other up a thousand times
  in a second. The first heartbeat on a unix socket brings the descriptor of the counter, the pulse. When the peer
  has sent its own, its next heartbeat says that it reads this one. From then on, neither sends heartbeats.
- A program that holds the interpreter, to pickle a large object for example, keeps all of its Python threads from
  sending heartbeats. So a peer whose process runs, as the kernel shows, has a lease more to say something. On one
  host, the kernel says whether the process is stopped. To other hosts, gRPC sends pings by threads that need no
  interpreter, and the kernel says when bytes have come by a connection last.
- A probe finds out whether anybody listens where a worker did: if not, its process is gone.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol, final

from ...net.socket_peers import process_of_peer, since_received_s
from ...net.user_sockets import UNIX_SCHEME, is_listening
from ..contracts.options import Liveness
from .sockets import tcp_socket

__all__ = [
    "PULSE_BYTES",
    "Heartbeats",
    "Pulse",
    "Reach",
    "ReceivedTimes",
    "Watched",
    "probe",
    "probe_now",
    "process_at",
    "process_runs",
]

TICKS = 2
"""Looks at a connection in the time between two heartbeats."""

MAX_LATE_TICKS = 2
"""Ticks that the timer may be late; after that, peers get all of their time anew."""

PULSE_BYTES = 8
"""Bytes of the counter of a pulse."""

_NOT_RUNNING: Final = frozenset("TtZXx")
"""States of processes that are stopped, traced or dead."""

log = logging.getLogger(__name__)


@final
class Pulse:
    """The counter of one agent, in an anonymous file (memfd). Used on the event loop only."""

    def __init__(self) -> None:
        """Makes the file when it is first shared."""
        self._descriptor = -1
        self._count = 0

    def beat(self) -> None:
        """Counts up, if others read it."""
        if self._descriptor >= 0:
            self._count += 1
            with contextlib.suppress(OSError):  # the memory is there; heartbeats to others must go on
                os.pwrite(self._descriptor, self._count.to_bytes(PULSE_BYTES, "little"), 0)

    def share(self) -> int:
        """Returns a descriptor to read the counter by. Raises OSError. The caller has to close it."""
        if self._descriptor < 0:
            descriptor = os.memfd_create("pulse-of-gradwire", os.MFD_CLOEXEC)
            try:
                os.pwrite(descriptor, self._count.to_bytes(PULSE_BYTES, "little"), 0)
            except OSError:  # there is no memory for it
                os.close(descriptor)
                raise
            self._descriptor = descriptor
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


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


def process_at(path: str) -> int:
    """Returns the process that listens on a unix socket; 0 if unknown. Raises OSError if nobody listens."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(0)
        connection.connect(path)
        return process_of_peer(connection)


def process_runs(process: int) -> bool:
    """Returns whether a process of this host is neither stopped nor dead; False if that cannot be found out."""
    if process <= 0:  # it is in another PID namespace
        return False
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            _, _, fields = file.read().rpartition(b") ")
    except OSError:
        return False
    return fields[:1].decode() not in _NOT_RUNNING


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _address(host: str) -> _Address:
    """Returns an address, that of IPv4 for one that is written as IPv6, as gRPC's listeners see it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


@final
class ReceivedTimes:
    """When data has come last by the TCP connections of this process. Used on the event loop only.

    The connections are gRPC's, which tells neither of them nor of the pings that come by them. All descriptors are
    looked at once for all that is asked before the loop goes on: many peers may be silent at the same time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._since: dict[tuple[_Address, int], float] | None = None
        """Seconds, by the address at the other end; None if that has to be found out."""

    def has_received(self, address: str, seconds: float) -> bool:
        """Returns whether data has come in the last seconds from an address, host:port."""
        if self._since is None:
            self._since = _since_received()
            self._loop.call_soon(self._discard)
        host, _, port = address.rpartition(":")
        return self._since.get((_address(host.strip("[]")), int(port)), seconds) < seconds

    def _discard(self) -> None:
        self._since = None


def _since_received() -> dict[tuple[_Address, int], float]:
    """Returns for how many seconds no data has come, by the address at the other end of each TCP connection."""
    found: dict[tuple[_Address, int], float] = {}
    for each in os.listdir("/proc/self/fd"):
        descriptor = int(each)
        with contextlib.suppress(OSError, ValueError):  # it is no TCP socket, or has been closed in between
            if os.get_blocking(descriptor):  # it is none of gRPC's, and a default timeout would change that
                continue
            duplicate = os.dup(descriptor)  # which nobody else closes
            try:
                connection = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                continue
            with connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    host, port = connection.getpeername()[:2]
                    where, since = (_address(host), port), since_received_s(connection)
                    found[where] = min(since, found.get(where, since))
    return found


class Reach(Enum):
    """What a probe has found."""

    LISTENING = auto()
    """Somebody accepts connections."""
    GONE = auto()
    """Nobody listens, as the host says: the process has ended."""
    UNKNOWN = auto()
    """The host does not answer."""


def probe_now(reach: Callable[[str], str], address: str) -> Reach:
    """Returns what can be found out without waiting of a worker's address: host:port, or unix: and a path.

    What to dial for it is what `reach` returns; it may raise OSError.
    """
    try:
        target = reach(address)
        if target.startswith(UNIX_SCHEME):
            return Reach.LISTENING if is_listening(target.removeprefix(UNIX_SCHEME)) else Reach.GONE
        connection, where = tcp_socket(target)
        with connection:
            connection.connect(where)
    except (ConnectionRefusedError, FileNotFoundError):
        return Reach.GONE
    except OSError:
        return Reach.UNKNOWN
    return Reach.LISTENING


async def probe(
    loop: asyncio.AbstractEventLoop, reach: Callable[[str], str], address: str, seconds: float
) -> Reach:
    """Returns what can be found out in some time: see `probe_now`."""
    if address.startswith(UNIX_SCHEME):
        return probe_now(reach, address)
    try:
        connection, where = tcp_socket(reach(address))
        with connection:
            async with asyncio.timeout(seconds):
                await loop.sock_connect(connection, where)
    except ConnectionRefusedError:
        return Reach.GONE
    except OSError:  # a TimeoutError, too
        return Reach.UNKNOWN
    return Reach.LISTENING
