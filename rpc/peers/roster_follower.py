"""Takes what the log of a group says into the directory and the links of one agent."""

from collections.abc import Iterable, Sequence
from typing import Protocol, final

from ...errors import LossCause
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import SHUT_DOWN, WorkerEnd
from ..membership.directory import Directory
from ..membership.members import Member
from ..membership.roster import Departed
from ..membership.roster_log import RosterLog
from .links import Links, LinkState

__all__ = ["Membership", "RosterFollower"]


class Membership(Protocol):
    """What changes with the members. Its methods are called on the event loop."""

    def add(self, member: Member) -> None:
        """Adds a member that is unknown here, with its link, to the directory."""

    def let_in(self) -> None:
        """Accepts connections of all members that are in the directory."""

    def on_joined(self, worker: WorkerInfo) -> None:
        """Handles a member that has joined after this worker. Connections of it are accepted."""


@final
class RosterFollower:
    """Compares the log with what is known here. Used on the event loop, but for `begin`."""

    def __init__(
        self, me: WorkerInfo, roster: RosterLog, directory: Directory, links: Links, membership: Membership
    ) -> None:
        """Changes nothing yet.

        Args:
            me: this worker.
            roster: the log.
            directory: the workers that are known here.
            links: to them.
            membership: is told what has changed.
        """
        self._me = me
        self._roster = roster
        self._directory = directory
        self._links = links
        self._membership = membership
        self._is_closed = False

    def begin(self, members: Sequence[Member]) -> None:
        """Adds the first members, and the former ones; nobody is let in yet."""
        self._add_departed(self._roster.departed().values())
        for member in sorted(members, key=lambda member: member.info.wire_id):
            self._membership.add(member)

    def follow(self) -> None:
        """Takes in all changes that are unknown here: other threads may have read some of them."""
        if self._is_closed:
            return
        departed, joined = self._roster.departed(), self._directory.unknown(self._roster.members())
        self._add_departed(departed.values())
        for member in joined:
            self._membership.add(member)
        self._membership.let_in()
        for wire_id, each in departed.items():
            if wire_id in self._directory.members and wire_id != self._me.wire_id:
                if each.was_removed:
                    self._links.on_closed(each.member.info, WorkerEnd(LossCause.DISCONNECTED, each.why))
                elif self._links.state(each.member.info) is not LinkState.CONNECTED:  # else it says goodbye itself
                    self._links.on_closed(each.member.info, SHUT_DOWN)
        if (me := departed.get(self._me.wire_id)) is not None and me.was_removed:
            self._links.on_evicted(self._me, me.reason or me.why)
        for member in joined:
            self._membership.on_joined(member.info)

    def close(self) -> None:
        """Takes in nothing any more. Called on any thread."""
        self._is_closed = True

    def _add_departed(self, departed: Iterable[Departed]) -> None:
        """Adds former members of a static group that are unknown here, because there may be references to them."""
        for each in () if self._roster.dynamic else departed:
            if each.member.info.wire_id not in self._directory.members:
                self._membership.add(each.member)
                self._links.mark_lost(each.member.info, WorkerEnd(LossCause.DISCONNECTED, each.why))
