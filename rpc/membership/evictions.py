"""Evicts workers that have not come back, and follows the log of the group when others say that it has changed."""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, final

from ..contracts.agent import ControlMessages
from ..contracts.worker import Member, WorkerInfo
from ..execution.executor import Executor
from ..peers.peers import Peers
from .roster import RosterError
from .roster_follower import RosterFollower
from .vouching import Verdict

__all__ = ["CONTROL_KINDS", "Evictions", "tell_of_change"]

ROSTER_CHANGED = "roster.changed"
"""Says that the log of the group has another entry. It does not say which: its receiver reads the store."""

CONTROL_KINDS = (ROSTER_CHANGED,)

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
"""Seconds between attempts while the store does not answer: doubled from the first to the longest."""

VERDICT_TIMEOUT_S = 600.0
"""Seconds that the other members may take to say what they know of one, in sum."""

AskOthers = Callable[[WorkerInfo, Sequence[Member]], Coroutine[Any, Any, Verdict]]
"""Asks other members about one; see vouching.py."""

TICK_S = 15.0
"""Seconds between looks at the clock, unless a quarter of the lease is shorter."""

Step = Callable[[bool], None]
"""Reads the store or writes to it, on a thread of the executor; takes whether it has been tried before."""

log = logging.getLogger(__name__)


def tell_of_change(control: ControlMessages, workers: Iterable[WorkerInfo]) -> None:
    """Tells workers that the log of the group has changed, which they then read."""
    for worker in workers:
        control.send(worker, ROSTER_CHANGED, None)


class _UndecidedError(Exception):
    """Too few members could be asked about one that is silent."""


@final
class Evictions:
    """The evictions by one agent, and its copy of the log.

    What cannot be done because the store, or too many members, do not answer is tried again and again, by timers
    of the event loop, until `close`. After a time in which this process was stopped, the log is read: this worker
    may have been evicted, and may know nobody who would tell it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        peers: Peers,
        follower: RosterFollower,
        lease: float,
        ask_others: AskOthers,
    ) -> None:
        """Evicts nobody yet.

        `lease` is the time in seconds after which a suspect worker may be evicted. `ask_others` asks about a
        member to which this worker has never been connected.
        """
        self._loop = loop
        self._executor = executor
        self._peers = peers
        self._follower = follower
        self._roster = follower.roster
        self._tick_s = min(TICK_S, lease / 4)
        self._ask_others = ask_others
        self._control: ControlMessages
        self._retries: set[asyncio.TimerHandle] = set()
        """Used on the event loop."""
        self._questions: set[asyncio.Task[Any]] = set()
        """Those for which threads of the executor wait. Used on the event loop."""
        self._ticking: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self._is_reading = False
        """Whether the log is being read, or will be when the store answers. Guarded by the lock."""
        self._is_stale = False
        """Whether it has to be read again then. Guarded by the lock."""

    def open(self, control: ControlMessages) -> None:
        """Listens to what other workers tell from now on, and tells them."""
        self._control = control
        control.on(ROSTER_CHANGED, lambda _sender, _payload: self.read())
        self._call_soon(self._tick, self._loop.time())

    def close(self) -> None:
        """Tries nothing again. Called on the event loop."""
        self._is_closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        for retry in self._retries:
            retry.cancel()
        self._retries.clear()
        for question in self._questions:
            question.cancel()

    def evict(self, peer: WorkerInfo, reason: str) -> None:
        """Evicts a worker as soon as the store answers, unless it or this one is a member no more. Never waits.

        A worker to which this one has never been connected stays if others vouch for it.
        """
        self._executor.submit_urgent(self._run, partial(self._evict, peer, reason), 0.0)

    def read(self) -> None:
        """Has the log read to its end, as soon as the store answers. Called on any thread, and never waits."""
        with self._lock:
            self._is_stale = True
            if self._is_reading:
                return
            self._is_reading = True
        self._executor.submit_urgent(self._run, self._read, 0.0)

    # On threads of the executor.

    def _run(self, step: Step, pause: float) -> None:
        """Takes a step, again after a pause if the store does not answer; `pause` is the last one, in seconds."""
        try:
            step(pause > 0)
        except RosterError as error:  # which no attempt would change
            log.warning("the log of the group cannot be followed: %s", error)
        except concurrent.futures.CancelledError:
            pass  # of a question, by `close`
        except Exception as error:  # of the store, for the most part
            if not pause:
                log.warning("the membership of the group cannot be changed or read yet: %s", error)
            self._call_soon(self._retry, step, min(MAX_PAUSE_S, 2 * pause) or FIRST_PAUSE_S)
        else:
            self._call_soon(self._follower.follow)

    def _evict(self, peer: WorkerInfo, reason: str, again: bool) -> None:
        self._roster.catch_up()
        is_stranger = not self._peers.of(peer).has_connected and self._roster.has(peer.wire_id)
        if is_stranger and not self._is_agreed(peer):
            return
        has_evicted = self._roster.evict(peer.wire_id, reason, self._peers.me.wire_id)
        if has_evicted or again:  # the store may have done it before, and not have answered
            tell_of_change(self._control, self._peers.connected())

    def _is_agreed(self, peer: WorkerInfo) -> bool:
        """Returns whether no other member vouches for one. Raises _UndecidedError if too few can be asked."""
        others = [member for member in self._roster.members() if member.info not in (peer, self._peers.me)]
        verdict = asyncio.run_coroutine_threadsafe(self._ask(peer, others), self._loop).result()
        if verdict is Verdict.UNDECIDED:
            raise _UndecidedError(f"too few members could be asked whether {peer.name!r} lives")
        if verdict is Verdict.STAYS:
            log.warning(
                "worker %s stays in the group: it is out of reach from here, but not for others", peer.name
            )
        return verdict is Verdict.SILENT

    def _read(self, _again: bool) -> None:
        while True:
            self._is_stale = False
            try:
                self._roster.catch_up()
            except RosterError:
                self._is_reading = False  # it is not tried again by itself
                raise
            with self._lock:
                if not self._is_stale:
                    self._is_reading = False
                    return

    def _call_soon(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)

    # On the event loop.

    async def _ask(self, peer: WorkerInfo, others: Sequence[Member]) -> Verdict:
        """Asks others about one until `close`: the executor has to end then, one of whose threads waits for it."""
        question = asyncio.current_task()
        assert question is not None
        self._questions.add(question)
        try:
            if self._is_closed:
                raise asyncio.CancelledError
            async with asyncio.timeout(VERDICT_TIMEOUT_S):
                return await self._ask_others(peer, others)
        finally:
            self._questions.discard(question)

    def _tick(self, before: float) -> None:
        """Reads the log if this process was stopped since the last tick; `before` is the time of that."""
        if self._is_closed:
            return
        now = self._loop.time()
        if now - before > 2 * self._tick_s:
            self.read()
        self._ticking = self._loop.call_later(self._tick_s, self._tick, now)

    def _retry(self, step: Step, pause: float) -> None:
        if self._is_closed:
            return

        def submit() -> None:
            self._retries.discard(retry)
            self._executor.submit_urgent(self._run, step, pause)

        retry = self._loop.call_later(pause, submit)
        self._retries.add(retry)
