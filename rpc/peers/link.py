"""The link to a worker: whether it is connected, suspect or lost, how it heals, and who is told of that.

A link whose connection breaks without a goodbye is being checked first. If nobody listens any more where the
worker did, its process is gone, and it is lost. Else it is dialled again, at once and then with growing pauses. If
that has not succeeded soon, the worker is suspect, until either worker has connected to the other, or its lease is
over.

All watchers are told of each change, in one order: see WorkerWatcher.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, final

from ...errors import EvictedError, LossCause, Outcome, WorkerLostError, WorkerSuspectError
from ..contracts.agent import RpcAgent
from ..contracts.options import Liveness
from ..contracts.worker import PROCESS_ENDED, WorkerEnd, WorkerInfo, WorkerWatcher
from ..execution.executor import Executor
from ..transports.base import Transport
from ..transports.liveness import Reach, probe, probe_now

__all__ = ["Absence", "Addresses", "Evictor", "FailureLog", "Link", "LinkOwner", "LinkState", "Links"]

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

MAX_NAMED = 8
"""The number of missing workers that a log line names at most."""

_Change = Callable[[WorkerWatcher], object]
"""Tells a watcher of a change."""

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
        error = EvictedError(self.evicted, self.end.reason) if self.evicted else self.cause(worker)
        error.outcome = Outcome.NOT_SENT
        return error

    def cause(self, worker: str) -> WorkerLostError | WorkerSuspectError:
        """Returns the error of what needs the worker with this name."""
        return self.end.as_error(worker) if self.is_lost else WorkerSuspectError(worker, self.end.reason)


class LinkOwner(Protocol):
    """Has the connection that a link stands for. Its methods are called on the event loop."""

    info: WorkerInfo
    transport: Transport

    def renew_transport(self) -> None:
        """Replaces the transport, which has ended, by one that does not connect by itself."""

    def break_off(self, reason: str) -> None:
        """Ends an attempt to connect."""

    def disconnect(self, end: WorkerEnd) -> None:
        """Sends nothing before the worker is back, and drops the payloads that were on their way."""

    def reconnect(self) -> None:
        """Sends again, by the transport that has connected."""

    def suspect(self, end: WorkerEnd, unsent: Collection[bytes], *, waits: bool) -> None:
        """Handles a worker that does not answer; `reconnect` or `lose` follows.

        Args:
            end: how its connection broke.
            unsent: the beginnings of the envelopes that have not left this process, and will not.
            waits: whether calls that have not been sent, and those that follow, wait for the worker.
        """

    def lose(self, end: WorkerEnd, unsent: Collection[bytes]) -> None:
        """Handles the loss of a worker; see `suspect`. Called once."""


class Addresses(Protocol):
    """Knows the addresses of workers, as this worker reaches them."""

    def reach(self, address: str) -> str:
        """Returns what to dial for the address of a member. Raises OSError if it cannot be reached from here."""

    def clean_up(self, address: str) -> None:
        """Removes what a worker that has ended without a goodbye has left at its address."""


class Evictor(Protocol):
    """Removes workers from the group."""

    def evict(self, peer: WorkerInfo, reason: str) -> None:
        """Handles a worker that has not come back in time; it is lost. Does not wait."""

    def read(self) -> None:
        """Finds out who is a member, when another worker does not let this one in. Does not wait."""


@final
class Links:
    """What the links of one agent share, and what concerns all of them. Its methods run on the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        liveness: Liveness,
        addresses: Addresses,
        evictor: Evictor,
        watchers: Sequence[WorkerWatcher],
        executor: Executor,
    ) -> None:
        """Watchers may be added before there is a connection. The executor runs what may take their time."""
        self.loop = loop
        self.liveness = liveness
        self.addresses = addresses
        self.evictor = evictor
        self.watchers = watchers
        self.executor = executor
        self.lock = threading.Lock()
        """Guards what is being told of each link."""
        self._links: list[Link] = []

    def add(self, link: "Link") -> None:
        """Adds a link."""
        self._links.append(link)

    def renew_leases_if_cut_off(self) -> None:
        """Gives all suspect workers a whole lease again if this worker has no connection.

        It is called when the last connection breaks, and before there is one again. In between, this worker may be
        the one that is cut off; the others have not been silent for as long as it has heard nothing.
        """
        if not any(link.state is LinkState.CONNECTED for link in self._links):
            for link in self._links:
                link.renew_lease()


@final
class Link:
    """The link to one worker. Used on the event loop, but for what says otherwise; other threads only read."""

    def __init__(self, owner: LinkOwner, address: str, links: Links) -> None:
        """Makes the link to a worker at an address, which is not connected."""
        self.state = LinkState.UNCONNECTED
        self.has_connected = False
        """Whether there has ever been a connection."""
        self._is_closed = False
        self._owner = owner
        self._worker = owner.info
        self._address = address
        self._links = links
        self._loop = links.loop
        self._since = time.time()
        self._end: WorkerEnd | None = None
        """How the connection broke, while there is none."""
        self._broke_at = 0.0
        """When it did, by the clock of the event loop."""
        self._unsent: frozenset[bytes] = frozenset()
        """The beginnings of the envelopes that were queued then."""
        self._check: asyncio.TimerHandle | None = None
        """Has the worker suspected."""
        self._lease: asyncio.TimerHandle | None = None
        self._healing: asyncio.Task[None] | None = None
        self._attempt: asyncio.Future[None] | None = None
        """Done when an attempt to connect has failed."""
        self._handling: list[_Change] = []
        """The changes that the watchers handle, in their order. Guarded by the lock of the links."""
        links.add(self)

    def describe(self) -> Mapping[str, Any]:
        """Returns its state, since when it has it, as time.time(), and why."""
        end = self._end
        return {"state": self.state.value, "since": self._since, "reason": end.reason if end is not None else ""}

    def close(self) -> None:
        """Reports nothing any more, and does not connect again."""
        self._is_closed = True
        self._stop_healing()

    def on_evicted(self, end: WorkerEnd) -> None:
        """Handles that this worker is no member any more: the worker is lost to it."""
        if not self._is_closed and self.state is not LinkState.LOST:
            self._lose(end)

    def mark_lost(self, end: WorkerEnd) -> None:
        """Makes a worker lost that has never been present here, without a report. Called on any thread."""
        self._set_state(LinkState.LOST)
        self._end = end

    # What the transport reports.

    def on_opened(self) -> None:
        """Handles a new connection."""
        if self._is_closed or self.state is LinkState.LOST:
            return
        self._links.renew_leases_if_cut_off()
        if self.state is LinkState.UNCONNECTED:
            self._set_state(LinkState.CONNECTED)
            return
        if self.state is LinkState.CHECKING:
            self._suspect(in_passing=True)
        self._stop_healing()
        self._owner.reconnect()  # first: who sees that it is connected may call it
        self._set_state(LinkState.CONNECTED)
        self._end = None
        log.warning("worker %s is back after %.1f s", self._worker.name, self._loop.time() - self._broke_at)
        self.tell_back()

    def on_broken(self, end: WorkerEnd, unsent: Collection[bytes]) -> None:
        """Handles a connection that broke, or could not be made."""
        if self._is_closed or self.state is LinkState.LOST:
            return
        self._owner.renew_transport()
        if self._attempt is not None and not self._attempt.done():
            self._attempt.set_result(None)
        if self.state in (LinkState.CHECKING, LinkState.SUSPECT):
            return
        self._end = end
        self._broke_at = self._loop.time()
        self._unsent = frozenset(unsent)
        if self._is_gone():
            self._lose_ended()
            return
        self._set_state(LinkState.CHECKING)
        self._links.renew_leases_if_cut_off()
        self._owner.disconnect(end)
        self._check = self._loop.call_later(CHECK_S, self._check_again)
        self._healing = self._loop.create_task(self._heal())

    def on_closed(self, end: WorkerEnd, unsent: Collection[bytes] = ()) -> None:
        """Handles the end of the worker, or of all connections to it."""
        self._unsent |= frozenset(unsent)
        if not self._is_closed and self.state is not LinkState.LOST:
            self._lose(end)
            if end.cause is LossCause.REFUSED:
                self._links.evictor.read()

    # Changes of state.

    def _set_state(self, state: LinkState) -> None:
        self.has_connected = self.has_connected or state is LinkState.CONNECTED
        self.state = state
        self._since = time.time()

    def _is_gone(self) -> bool:
        """Returns whether nobody listens where the worker did."""
        return probe_now(self._links.addresses.reach, self._address) is Reach.GONE

    def _check_again(self) -> None:
        if self.state is not LinkState.CHECKING:
            return
        # It may have ended since, while this process was kept from connecting to it again, and from noticing.
        if self._is_gone():
            self._lose_ended()
        else:
            self._suspect()

    def _suspect(self, *, in_passing: bool = False) -> None:
        """Suspects the worker; `in_passing` if it is back already, so that calls that were not sent can be."""
        end = self._end
        assert end is not None
        self._set_state(LinkState.SUSPECT)
        self._count_lease(self._links.liveness.lease, self._loop.time())
        log.warning("worker %s is suspect: %s", self._worker.name, end.reason)
        waits = in_passing or self._links.liveness.when_suspect == "wait"
        self._owner.suspect(end, self._unsent, waits=waits)
        self.tell_suspect(end.reason)

    def _lose(self, end: WorkerEnd) -> None:
        self._stop_healing()
        self._set_state(LinkState.LOST)
        self._end = end
        self._owner.lose(end, self._unsent)
        self.tell_lost(end)
        self._unsent = frozenset()
        if not end.orderly:
            self._links.addresses.clean_up(self._address)

    def _lose_ended(self) -> None:
        """Handles a worker whose process is gone. One that was never connected may have left in good order."""
        assert self._end is not None
        self._lose(PROCESS_ENDED if self.has_connected else self._end)

    def _stop_healing(self) -> None:
        """Connects to the worker no more, and waits for it no longer."""
        for handle in (self._check, self._lease):
            if handle is not None:
                handle.cancel()
        if self._healing is not None:
            self._healing.cancel()
        self._healing = self._check = self._lease = None

    def renew_lease(self) -> None:
        """Gives a suspect worker its whole lease again."""
        if self._lease is not None:
            self._lease.cancel()
            self._count_lease(self._links.liveness.lease, self._loop.time())

    def _count_lease(self, left: float, before: float) -> None:
        """Counts the lease of a suspect worker, but not the time in which this process was stopped."""
        now, lease = self._loop.time(), self._links.liveness.lease
        step = lease / LEASE_STEPS
        left -= min(now - before, 2 * step)
        if left > 0:
            self._lease = self._loop.call_later(min(step, left), self._count_lease, left, now)
            return
        end = self._end
        assert end is not None
        reason = f"it did not come back within {lease:g} s: {end.reason}"
        self._lose(WorkerEnd(LossCause.DISCONNECTED, reason))
        self._links.evictor.evict(self._worker, reason)

    # The watchers, which are told of each change.

    def tell_joined(self) -> None:
        """Tells that the worker has joined."""
        worker = self._worker
        self._tell(lambda each: each.note_joined(worker), lambda each: each.on_worker_joined(worker))

    def tell_suspect(self, reason: str) -> None:
        """Tells that the worker does not answer."""
        worker = self._worker
        self._tell(
            lambda each: each.note_suspect(worker, reason), lambda each: each.on_worker_suspect(worker, reason)
        )

    def tell_back(self) -> None:
        """Tells that the worker answers again."""
        worker = self._worker
        self._tell(lambda each: each.note_back(worker), lambda each: each.on_worker_back(worker))

    def tell_lost(self, end: WorkerEnd) -> None:
        """Tells that the worker is lost."""
        worker = self._worker
        self._tell(lambda each: each.note_lost(worker, end), lambda each: each.on_worker_lost(worker, end))

    def _tell(self, note: _Change, handle: _Change) -> None:
        executor = self._links.executor
        tasks = [self._try(note, watcher) for watcher in self._links.watchers]
        for task in tasks:  # when all have noted it: what runs then may make calls
            if callable(task):
                executor.submit(task)
        with self._links.lock:
            self._handling.append(handle)
            is_first = len(self._handling) == 1
        if is_first:
            executor.submit(self._handle_each)

    def _handle_each(self) -> None:
        """Has the watchers handle one change after another. Runs on a thread of the executor."""
        while True:
            for watcher in self._links.watchers:
                self._try(self._handling[0], watcher)
            with self._links.lock:
                del self._handling[0]
                if not self._handling:
                    return

    def _try(self, change: _Change, watcher: WorkerWatcher) -> object:
        """Tells a watcher of a change. What it raises must not keep the others from being told."""
        try:
            return change(watcher)
        except Exception:
            log.exception("a change of worker %s cannot be handled", self._worker.name)
            return None

    # Connecting again.

    async def _heal(self) -> None:
        """Connects to a worker again and again, until it is back or lost, which ends this."""
        pause, round_trip = FIRST_PAUSE_S, self._links.liveness.suspect_after
        probe_s, dial_s = PROBE_TIMEOUT_S, DIAL_TIMEOUT_S
        while True:
            found = await self._probe(probe_s)
            if found is Reach.LISTENING:
                await self._try_to_connect(dial_s)
                dial_s = max(dial_s, min(2 * dial_s, DIAL_ROUND_TRIPS * round_trip))
                # It may have ended just now, and listened a little longer than its connection stood.
                found = await self._probe(probe_s)
            if found is Reach.UNKNOWN:
                probe_s = max(probe_s, min(2 * probe_s, round_trip))
            if found is Reach.GONE:
                self._lose_ended()
                return
            await asyncio.sleep(pause)
            pause = min(MAX_PAUSE_S, 2 * pause)

    async def _probe(self, seconds: float) -> Reach:
        return await probe(self._loop, self._links.addresses.reach, self._address, seconds)

    async def _try_to_connect(self, seconds: float) -> None:
        """Attempts to connect in some time. Success ends the task that waits here."""
        attempt = self._attempt = self._loop.create_future()
        self._owner.transport.connect()
        await asyncio.wait((attempt,), timeout=seconds)
        if not attempt.done():
            self._owner.break_off("it does not answer")


@final
class FailureLog(WorkerWatcher):
    """Logs each worker that has failed in one line, however often and by whomever this worker learns of it.

    Safe to use from any thread.
    """

    def __init__(self, *, dynamic: bool) -> None:
        self._dynamic = dynamic
        self.failed: dict[int, str] = {}
        """The ids of workers that were lost without leaving, and why they are lost; it grows."""
        self._lock = threading.Lock()
        self._logged: set[int] = set()

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Logs a worker that is lost, and counts it as failed if it did not leave."""
        # Who leaves a dynamic group need not say goodbye to a worker that it has never talked to.
        if end.orderly or (self._dynamic and end.cause is LossCause.UNREACHABLE):
            log.info("worker %s is lost: %s", worker.name, end.reason)
            return
        with self._lock:
            level = logging.INFO if worker.wire_id in self._logged else logging.WARNING
            self._logged.add(worker.wire_id)
        log.log(level, "worker %s is lost: %s", worker.name, end.reason)
        self.failed[worker.wire_id] = end.reason  # not before: a shutdown says that it goes without this worker

    def on_shutdown(self, agent: RpcAgent, failed: Mapping[int, str]) -> None:
        """Logs the workers that take no part in a shutdown, and have not been logged.

        `failed` are the ids of the workers that are known anywhere to have failed, and why.
        """
        with self._lock:
            new = failed.keys() - self._logged
            self._logged |= new
        missing = [f"{each.name} ({failed[each.wire_id]})" for each in agent.workers() if each.wire_id in new]
        if missing:
            more = f", and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
            names = ", ".join(missing[:MAX_NAMED])
            log.warning("worker %s shuts down without %s%s", agent.info.name, names, more)
