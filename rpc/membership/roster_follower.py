"""Takes what the log of a group says into the peers of one agent.

A hello may say that its sender knows more of the log. It is not trusted: the entries are read from the store, and
compared with the digest in the hello.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol, final

from ...errors import LossCause
from ..contracts.worker import SHUT_DOWN, Member, RosterVersion, WorkerEnd
from ..execution.executor import Executor
from ..peers.peers import Peers
from ..transports.grpc_endpoint import RefusedError
from .roster import Departed, RosterError
from .roster_log import RosterLog
from .serial_calls import SerialCalls

__all__ = ["Membership", "RosterFollower"]


class Membership(Protocol):
    """What changes with the members. Its methods are called on the event loop."""

    def add(self, member: Member) -> None:
        """Adds a member that is unknown here."""

    def let_in(self) -> None:
        """Has this worker say in its hellos how far it knows the log, and accept the members if it has not."""


@final
class RosterFollower:
    """Compares the log with what is known here. Used on the event loop, but for `begin`."""

    def __init__(self, roster: RosterLog, peers: Peers, membership: Membership, executor: Executor) -> None:
        """Changes nothing yet. The threads of the executor wait for the store, for `learn` one at a time."""
        self.roster = roster
        self._peers = peers
        self._membership = membership
        self._reads = SerialCalls(executor)
        self._is_closed = False

    def begin(self, members: Sequence[Member]) -> None:
        """Adds the first members, and the former ones; nobody is let in yet."""
        self._add_departed(self.roster.departed().values())
        for member in sorted(members, key=lambda member: member.info.wire_id):
            self._membership.add(member)

    async def learn(self, version: RosterVersion) -> None:
        """Learns what the sender of a hello knows. Raises RefusedError if the store does not say the same."""
        try:
            await self._reads.run(partial(self.roster.learn, version))
        except RosterError as error:
            raise RefusedError(f"worker {self._peers.me.name!r} refuses a roster: {error}") from None
        self.follow()

    def follow(self) -> None:
        """Takes in all changes that are unknown here: other threads may have read some of them."""
        if self._is_closed:
            return
        departed, known = self.roster.departed(), self._peers.by_id
        joined = [member for member in self.roster.members() if member.info.wire_id not in known]
        self._add_departed(departed.values())
        for member in joined:
            self._membership.add(member)
        self._membership.let_in()
        for wire_id, each in departed.items():
            if wire_id in known and wire_id != self._peers.me.wire_id:
                peer = known[wire_id]
                if each.was_removed:
                    peer.on_closed(WorkerEnd(LossCause.DISCONNECTED, each.why))
                elif not peer.is_connected:  # else it says goodbye itself
                    peer.on_closed(SHUT_DOWN)
        if (me := departed.get(self._peers.me.wire_id)) is not None and me.was_removed:
            for peer in self._peers.all():
                peer.evicted(self._peers.me.name, me.reason or me.why)
        for member in joined:
            if (link := self._peers.of(member.info).link) is not None:
                link.tell_joined()

    def close(self) -> None:
        """Takes in nothing any more. Called on any thread."""
        self._is_closed = True

    def _add_departed(self, departed: Iterable[Departed]) -> None:
        """Adds former members of a static group that are unknown here, because there may be references to them."""
        for each in () if self.roster.dynamic else departed:
            if each.member.info.wire_id not in self._peers.by_id:
                self._membership.add(each.member)
                self._peers.of(each.member.info).mark_lost(WorkerEnd(LossCause.DISCONNECTED, each.why))
