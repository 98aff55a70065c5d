"""What a worker does with the log of its group: it takes newcomers in, and evicts who does not come back."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import final

from ...errors import LossCause
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd
from ..execution.executor import Executor
from ..membership.directory import Directory
from ..membership.members import Member
from ..membership.roster_log import RosterLog
from .links import Links
from .network_listener import NetworkListener
from .newcomers import Newcomers

__all__ = ["RosterFollower"]

log = logging.getLogger(__name__)


@final
class RosterFollower:
    """Has the network follow the log. Used on the event loop, except where it says otherwise."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        me: WorkerInfo,
        roster: RosterLog,
        executor: Executor,
        directory: Directory,
        links: Links,
        add: Callable[[Member], None],
        let_in: Callable[[], None],
    ) -> None:
        """Makes one that follows nothing yet.

        Args:
            loop: the event loop.
            me: this worker.
            roster: the log.
            executor: its threads wait for the store.
            directory: the members that are known.
            links: are told of workers that are lost.
            add: makes what a new member needs.
            let_in: accepts connections of all members that are known.
        """
        self._loop = loop
        self._me = me
        self._roster = roster
        self._newcomers = Newcomers(me, roster, executor)
        self._executor = executor
        self._directory = directory
        self._links = links
        self._add = add
        self._let_in = let_in
        self._listener: NetworkListener  # given to `listen`, before which nothing is learned
        self._stopped = False

    def listen(self, listener: NetworkListener) -> None:
        """Reports newcomers to a listener from now on."""
        self._listener = listener

    def stop(self) -> None:
        """Follows the log no more. Called on any thread."""
        self._stopped = True

    async def learn(self, entries: Sequence[str]) -> None:
        """Learns the log that a worker knows which says that it has joined the group."""
        await self._newcomers.learn(entries)
        self._follow()

    def add_departed(self) -> None:
        """Adds former members of a static group that are unknown here: there may be references to them."""
        if self._roster.dynamic:
            return
        for each in self._roster.departed().values():
            if each.member.info.wire_id not in self._directory.members:
                self._add(each.member)
                self._links.mark_lost(each.member.info, WorkerEnd(LossCause.DISCONNECTED, each.why))

    def evict(self, peer: WorkerInfo, reason: str) -> None:
        """Has a worker evicted that has not come back."""
        self._executor.submit_urgent(self._read, peer, reason)

    def read_roster(self, peer: WorkerInfo) -> None:
        """Finds out whether this worker has been evicted, when another one does not let it in."""
        self._executor.submit_urgent(self._read, peer, "")

    def _read(self, peer: WorkerInfo, evict_because: str) -> None:
        """Evicts a worker if there is a reason, and takes in what has changed. Waits for the store."""
        if self._stopped:
            return
        try:
            self._roster.catch_up()
            if evict_because and self._me.wire_id not in self._roster.departed():
                self._roster.evict(peer.wire_id, evict_because)
        except Exception as error:  # of the store: the others may see it differently
            log.warning("the store cannot tell who is in the group, or that %s is not: %s", peer.name, error)
            return
        self._loop.call_soon_threadsafe(self._follow)

    def _follow(self) -> None:
        """Takes in all changes of the log that are unknown here: other threads may have read some of them."""
        if self._stopped:
            return
        departed, joined = self._roster.departed(), self._directory.unknown(self._roster.members())
        self.add_departed()
        for member in joined:
            self._add(member)
        self._let_in()
        for wire_id, each in departed.items():
            if each.was_replaced and wire_id in self._directory.members and wire_id != self._me.wire_id:
                self._links.on_closed(each.member.info, WorkerEnd(LossCause.DISCONNECTED, each.why))
        if (me := departed.get(self._me.wire_id)) is not None and me.was_replaced:
            self._links.on_evicted(self._me, me.reason or me.why)
        for member in joined:
            self._listener.on_peer_joined(member.info)
