"""The links of an agent to the other workers: which of them are connected, suspect or lost, and how they heal.

A link whose connection breaks without a goodbye is being checked first. If nobody listens any more where the
worker did, its process is gone, and it is lost. Else it is dialled again, at once and then with growing pauses. If
that has not succeeded soon, the worker is suspect, until either worker has connected to the other, or its lease is
over.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, final

from ...errors import EvictedError, LossCause, Outcome, WorkerLostError, WorkerSuspectError
from ..contracts.liveness import Liveness
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import PROCESS_ENDED, WorkerEnd
from ..transports.grpc_endpoint import GrpcEndpoint
from ..transports.probe import Reach, probe, probe_now
from .network_listener import NetworkListener

__all__ = ["Absence", "LinkOwner", "LinkState", "Links"]

CHECK_S = 0.1
"""Seconds after which a worker whose connection broke is suspect, if it is not connected again or lost by then."""

PROBE_TIMEOUT_S = 2.0
"""Seconds in which the host of a suspect worker has to answer the first probe. Each later one has twice as long,
up to `suspect_after`, which a round trip may take."""

DIAL_TIMEOUT_S = 10.0
"""Seconds that a suspect worker that listens may take to let this one in, at the first attempt. Each later one has
twice as long, up to DIAL_ROUND_TRIPS times `suspect_after`."""

DIAL_ROUND_TRIPS = 5

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
"""Seconds between attempts to connect again: doubled from the first to the longest."""

LEASE_STEPS = 16
"""Parts in which a lease is counted. One in which this process was stopped counts as two at most."""

log = logging.getLogger(__name__)


class LinkState(Enum):
    """What is known of another worker."""

    UNCONNECTED = "unconnected"
    """Nothing has been sent to it."""
    CONNECTED = "connected"
    CHECKING = "checking"
    """Its connection broke just now."""
    SUSPECT = "suspect"
    LOST = "lost"


@final
@dataclass(frozen=True, slots=True)
class Absence:
    """Why nothing can be sent to a worker now.

    end: how it ended, or its connection did.
    is_lost: whether it will not come back.
    waits: whether calls wait for it.
    evicted: the name of this worker, if it was evicted itself.
    """

    end: WorkerEnd
    is_lost: bool = False
    waits: bool = False
    evicted: str = ""

    def as_error(self, worker: str) -> WorkerLostError | WorkerSuspectError | EvictedError:
        """Returns the error of a call to the worker with this name, which is not sent."""
        error: WorkerLostError | WorkerSuspectError | EvictedError
        if self.evicted:
            error = EvictedError(self.evicted, self.end.reason)
        else:
            error = self.end.as_error(worker) if self.is_lost else WorkerSuspectError(worker, self.end.reason)
        error.outcome = Outcome.NOT_SENT
        return error


class LinkOwner(Protocol):
    """Has the connections that links stand for. Its methods are called on the event loop."""

    def renew_transport(self, peer: WorkerInfo) -> None:
        """Replaces the transport to a worker, which has ended, by one that does not connect by itself."""

    def connect_again(self, peer: WorkerInfo) -> None:
        """Has the transport to a worker connect; `Links.on_opened` or `Links.on_broken` follows, if anything."""

    def break_off(self, peer: WorkerInfo, reason: str) -> None:
        """Ends an attempt to connect."""

    def refuse(self, peer: WorkerInfo, reason: str) -> None:
        """Lets a worker in no more, which is told this reason."""

    def on_lease_over(self, peer: WorkerInfo, reason: str) -> None:
        """Handles a worker that has not come back in time; it is lost."""

    def on_refused(self, peer: WorkerInfo) -> None:
        """Handles a worker that does not let this one in; it is lost."""

    def drop_payloads(self, peer: WorkerInfo, reason: str, *, is_lost: bool) -> None:
        """Drops the payloads that were on their way."""

    def clean_up(self, address: str) -> None:
        """Removes what a worker that has ended without a goodbye has left at its address."""


@final
class _Link:
    """The link to one worker."""

    def __init__(self, peer: WorkerInfo, address: str) -> None:
        self.peer = peer
        self.address = address
        self.state = LinkState.UNCONNECTED
        self.since = time.time()
        self.has_connected = False
        self.end: WorkerEnd | None = None
        """How the connection broke, while there is none."""
        self.broke_at = 0.0
        """When it did, by the clock of the event loop."""
        self.unsent: frozenset[bytes] = frozenset()
        """The beginnings of the envelopes that were queued then."""
        self.check: asyncio.TimerHandle | None = None
        """Has the worker suspected."""
        self.lease: asyncio.TimerHandle | None = None
        self.healing: asyncio.Task[None] | None = None
        self.attempt: asyncio.Future[bool] | None = None
        """Done with whether an attempt to connect has succeeded."""

    def set_state(self, state: LinkState) -> None:
        self.has_connected = self.has_connected or state is LinkState.CONNECTED
        self.state = state
        self.since = time.time()


@final
class Links:
    """All links of one agent. Used on the event loop, except where other threads only read."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        liveness: Liveness,
        endpoint: GrpcEndpoint,
    ) -> None:
        """Has no links yet.

        Args:
            loop: the event loop.
            liveness: how long workers are suspect, and what calls to them do.
            endpoint: knows how to reach the addresses of workers.
        """
        self.absent: Mapping[int, Absence] = {}
        """The workers to which nothing can be sent, by id. Empty most of the time. Read by any thread."""
        self.lost: Mapping[int, WorkerEnd] = {}
        """The ends of the lost workers, by id. Read by any thread."""
        self.breaks: Counter[int] = Counter()
        """How often the connection to a worker broke, by its id. Read by any thread."""
        self._loop = loop
        self._liveness = liveness
        self._owner: LinkOwner
        self._endpoint = endpoint
        self._listener: NetworkListener
        self._links: dict[int, _Link] = {}
        self._is_closed = False

    def listen(self, listener: NetworkListener, owner: LinkOwner) -> None:
        """Reports to a listener from now on; `owner` has the connections."""
        self._listener = listener
        self._owner = owner

    def add(self, peer: WorkerInfo, address: str) -> None:
        """Adds the link to a worker that has not been connected."""
        self._links[peer.wire_id] = _Link(peer, address)

    def close(self) -> None:
        """Reports nothing any more, and connects to nobody again."""
        self._is_closed = True
        for link in self._links.values():
            self._stop_healing(link)

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns the state of each link, since when it has it, as time.time(), and why, by the worker's name."""
        return {link.peer.name: self._describe(link) for link in list(self._links.values())}

    def _describe(self, link: _Link) -> Mapping[str, Any]:
        end = link.end
        return {"state": link.state.value, "since": link.since, "reason": end.reason if end is not None else ""}

    def present(self) -> list[WorkerInfo]:
        """Returns the workers that have been connected and are not lost. Called on any thread."""
        return [
            link.peer
            for link in list(self._links.values())
            if link.state not in (LinkState.UNCONNECTED, LinkState.LOST)
        ]

    def has_connected(self, peer: WorkerInfo) -> bool:
        """Returns whether there has ever been a connection to a worker. Called on any thread."""
        return self._links[peer.wire_id].has_connected

    def state(self, peer: WorkerInfo) -> LinkState:
        """Returns what is known of a worker."""
        return self._links[peer.wire_id].state

    def mark_lost(self, peer: WorkerInfo, end: WorkerEnd) -> None:
        """Makes a worker lost that has never been present here, without a report."""
        link = self._links[peer.wire_id]
        link.set_state(LinkState.LOST)
        link.end = end
        self.lost = {**self.lost, peer.wire_id: end}
        self._set_absence(link, Absence(end, is_lost=True))
        self._loop.call_soon_threadsafe(self._owner.refuse, peer, end.reason)

    # What transports report.

    def on_opened(self, peer: WorkerInfo) -> None:
        """Handles a new connection to a worker."""
        link = self._links[peer.wire_id]
        if self._is_closed or link.state is LinkState.LOST:
            return
        self._renew_leases_if_cut_off()
        if link.state is LinkState.UNCONNECTED:
            link.set_state(LinkState.CONNECTED)
            return
        if link.state is LinkState.CHECKING:
            self._suspect(link, in_passing=True)
        self._stop_healing(link)
        link.set_state(LinkState.CONNECTED)
        link.end = None
        self._set_absence(link, None)
        log.warning("worker %s is back after %.1f s", peer.name, self._loop.time() - link.broke_at)
        self._listener.on_peer_back(peer)

    def on_broken(self, peer: WorkerInfo, end: WorkerEnd, unsent: Collection[bytes]) -> None:
        """Handles a connection to a worker that broke, or could not be made."""
        link = self._links[peer.wire_id]
        if self._is_closed or link.state is LinkState.LOST:
            return
        self._owner.renew_transport(peer)
        if link.attempt is not None and not link.attempt.done():
            link.attempt.set_result(False)
        if link.state in (LinkState.CHECKING, LinkState.SUSPECT):
            return
        link.end = end
        link.broke_at = self._loop.time()
        link.unsent = frozenset(unsent)
        if probe_now(self._endpoint.reach, link.address) is Reach.GONE:
            self._lose_ended(link)
            return
        link.set_state(LinkState.CHECKING)
        self._renew_leases_if_cut_off()
        self._set_absence(link, Absence(end, waits=True))
        self.breaks[peer.wire_id] += 1
        self._owner.drop_payloads(peer, end.reason, is_lost=False)
        link.check = self._loop.call_later(CHECK_S, self._check, link)
        link.healing = self._loop.create_task(self._heal(link))

    def on_closed(self, peer: WorkerInfo, end: WorkerEnd, unsent: Collection[bytes] = ()) -> None:
        """Handles the end of a worker, or of all connections to it."""
        link = self._links[peer.wire_id]
        link.unsent |= frozenset(unsent)
        if not self._is_closed and link.state is not LinkState.LOST:
            self._lose(link, end)
            if end.cause is LossCause.REFUSED:
                self._owner.on_refused(peer)

    def on_evicted(self, me: WorkerInfo, reason: str) -> None:
        """Handles the eviction of this worker: it can call nobody any more."""
        for link in self._links.values():
            if not self._is_closed and link.state is not LinkState.LOST:
                self._lose(link, WorkerEnd(LossCause.REFUSED, f"this worker was evicted: {reason}"))
            self._set_absence(link, Absence(WorkerEnd(LossCause.REFUSED, reason), is_lost=True, evicted=me.name))

    # Changes of state.

    def _check(self, link: _Link) -> None:
        if link.state is not LinkState.CHECKING:
            return
        # It may have ended since, while this process was kept from connecting to it again, and from noticing.
        if probe_now(self._endpoint.reach, link.address) is Reach.GONE:
            self._lose_ended(link)
        else:
            self._suspect(link)

    def _suspect(self, link: _Link, *, in_passing: bool = False) -> None:
        """Suspects a worker; `in_passing` if it is back already, so that calls that have not been sent can be."""
        end = link.end
        assert end is not None
        waits = in_passing or self._liveness.when_suspect == "wait"
        link.set_state(LinkState.SUSPECT)
        self._set_absence(link, Absence(end, waits=waits))
        self._count_lease(link, self._liveness.lease, self._loop.time())
        log.warning("worker %s is suspect: %s", link.peer.name, end.reason)
        self._listener.on_peer_suspect(link.peer, end.reason, link.unsent, waits=waits)

    def _lose(self, link: _Link, end: WorkerEnd) -> None:
        self._stop_healing(link)
        link.set_state(LinkState.LOST)
        link.end = end
        self.lost = {**self.lost, link.peer.wire_id: end}  # other threads may be walking through the old one
        self._set_absence(link, Absence(end, is_lost=True))
        self._owner.refuse(link.peer, end.reason)
        self._owner.drop_payloads(link.peer, end.reason, is_lost=True)
        if not end.orderly:
            self._owner.clean_up(link.address)
        self._listener.on_peer_lost(link.peer, end, link.unsent)
        link.unsent = frozenset()

    def _lose_ended(self, link: _Link) -> None:
        """Handles a worker whose process is gone. One that was never connected may have left in good order."""
        assert link.end is not None
        self._lose(link, PROCESS_ENDED if link.has_connected else link.end)

    def _set_absence(self, link: _Link, absence: Absence | None) -> None:
        absent = {**self.absent}
        if absence is None:
            absent.pop(link.peer.wire_id, None)
        else:
            absent[link.peer.wire_id] = absence
        self.absent = absent

    def _stop_healing(self, link: _Link) -> None:
        for handle in (link.check, link.lease):
            if handle is not None:
                handle.cancel()
        if link.attempt is not None and not link.attempt.done():
            link.attempt.set_result(True)
        if link.healing is not None:
            link.healing.cancel()
        link.healing = link.check = link.lease = None

    def _renew_leases_if_cut_off(self) -> None:
        """Gives all suspect workers a whole lease again if this worker has no connection.

        It is called when the last connection breaks, and before there is one again. In between, this worker may be
        the one that is cut off; the others have not been silent for as long as it has heard nothing.
        """
        if any(link.state is LinkState.CONNECTED for link in self._links.values()):
            return
        for link in self._links.values():
            if link.lease is not None:
                link.lease.cancel()
                self._count_lease(link, self._liveness.lease, self._loop.time())

    def _count_lease(self, link: _Link, left: float, before: float) -> None:
        """Counts the lease of a suspect worker, but not the time in which this process was stopped."""
        now, step = self._loop.time(), self._liveness.lease / LEASE_STEPS
        left -= min(now - before, 2 * step)
        if left > 0:
            link.lease = self._loop.call_later(min(step, left), self._count_lease, link, left, now)
            return
        end = link.end
        assert end is not None
        reason = f"it did not come back within {self._liveness.lease:g} s: {end.reason}"
        self._lose(link, WorkerEnd(LossCause.DISCONNECTED, reason))
        self._owner.on_lease_over(link.peer, reason)

    async def _heal(self, link: _Link) -> None:
        """Connects to a worker again and again, until it is back or lost, which ends this."""
        pause, round_trip = FIRST_PAUSE_S, self._liveness.suspect_after
        probe_s, dial_s = PROBE_TIMEOUT_S, DIAL_TIMEOUT_S
        while True:
            found = await probe(self._loop, self._endpoint.reach, link.address, probe_s)
            if found is Reach.LISTENING:
                if await self._attempt(link, dial_s):
                    return
                dial_s = max(dial_s, min(2 * dial_s, DIAL_ROUND_TRIPS * round_trip))
                # It may have ended just now, and listened a little longer than its connection stood.
                found = await probe(self._loop, self._endpoint.reach, link.address, probe_s)
            if found is Reach.UNKNOWN:
                probe_s = max(probe_s, min(2 * probe_s, round_trip))
            if found is Reach.GONE:
                self._lose_ended(link)
                return
            await asyncio.sleep(pause)
            pause = min(MAX_PAUSE_S, 2 * pause)

    async def _attempt(self, link: _Link, seconds: float) -> bool:
        """Returns whether an attempt to connect to a worker has succeeded in some time."""
        attempt: asyncio.Future[bool] = self._loop.create_future()
        link.attempt = attempt
        self._owner.connect_again(link.peer)
        await asyncio.wait((attempt,), timeout=seconds)
        if attempt.done():
            return attempt.result()
        self._owner.break_off(link.peer, "it does not answer")
        return False
