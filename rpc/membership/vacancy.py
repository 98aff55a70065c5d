"""How the name, or the rank, of a member that does not answer becomes free for a worker that wants to join.

The member may be dead, or stopped, or out of the reach of this worker only. Those that are connected to it evict
it when its lease is over. If nobody is, the worker that wants its place does, when the member has not answered it
for a whole lease, more than half of the other members could be asked, and none of them vouches for it.
"""

import logging
import time
from collections.abc import Callable
from typing import final

from ...errors import RendezvousError
from ...net.waiting import wait_with_warnings
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import Member
from .addresses import ListenAddress
from .presence import Presence, presence_of
from .roster_log import RosterLog
from .vouching import Verdict, ask_before_joining

__all__ = ["Vacancy"]

POLL_S = 0.2
"""Seconds between looks at the log, and at a member that does not answer."""

ASK_AGAIN_S = 5.0
"""Seconds after which the other members are asked again, if the member was not evicted."""

MAX_STEP_S = 5.0
"""Seconds that count as silence between two looks at a member, at most: this process may have been stopped."""

log = logging.getLogger(__name__)


@final
class Vacancy:
    """Waits for the place of one member, on the thread of the worker that wants to join."""

    def __init__(
        self,
        roster: RosterLog,
        where: ListenAddress,
        options: RpcBackendOptions,
        name: str,
        group: Callable[[], str],
    ) -> None:
        """Looks at nothing yet.

        The name is that of this worker and of the member whose place it wants. `group` returns the name of the
        group when the log has been read.
        """
        self._roster = roster
        self._where = where
        self._options = options
        self._name = name
        self._group = group
        self._silent: Member | None = None
        """The member that does not answer."""
        self._left = 0.0
        """Seconds until the others are asked about it."""
        self._looked = 0.0
        """When it did not answer last."""

    def wait(self, seconds: float) -> Member | None:
        """Waits while the member that has the place does not answer, and may live.

        Returns the member, if it is alive or its process has ended; None if it has left or has been evicted.
        Raises RendezvousError if it has not answered and has not been evicted in time.
        """
        found = self._find()
        deadline = time.monotonic() + seconds
        if found is None or presence_of(found, self._where) is not Presence.SILENT:
            return found
        settled = wait_with_warnings(
            self._is_settled,
            max(0.0, deadline - time.monotonic()),
            lambda: f"{self._name!r} waits for {found}, which has its name and does not answer, to be evicted",
        )
        if not settled:
            raise RendezvousError(
                f"{found} does not answer, may live, and has not been evicted within {seconds:g} s, so "
                f"{self._name!r} cannot take its place: end that process first"
            )
        return self._find()

    def _find(self) -> Member | None:
        """Reads the log, and returns the member that has the place; None without one."""
        self._roster.catch_up()
        return self._roster.find(self._name)

    def _is_settled(self, left: float) -> bool:
        """Returns whether the member is silent no more, or no member, within some seconds."""
        end = time.monotonic() + left
        while True:
            current = self._find()
            probe_timeout_s = min(POLL_S, max(0.01, left))
            if current is None or presence_of(current, self._where, probe_timeout_s) is not Presence.SILENT:
                return True
            if self._is_due(current) and presence_of(current, self._where) is Presence.SILENT:
                self._try_to_evict(current)
                self._left = ASK_AGAIN_S
                continue
            if time.monotonic() >= end:
                return False
            time.sleep(min(POLL_S, max(0.0, end - time.monotonic())))

    def _is_due(self, silent: Member) -> bool:
        """Returns whether a member has not answered for a whole lease, in which this process was not stopped."""
        now = time.monotonic()
        if self._silent is None or self._silent.info != silent.info:
            self._silent, self._left = silent, self._options.liveness.lease
        else:
            self._left -= min(now - self._looked, MAX_STEP_S)
        self._looked = now
        return self._left <= 0

    def _try_to_evict(self, silent: Member) -> None:
        """Evicts a member, if most others can be asked and none of them vouches for it."""
        others = [member for member in self._roster.members() if member.info != silent.info]
        verdict = ask_before_joining(self._name, self._options, self._where, self._group(), silent.info, others)
        if verdict is not Verdict.SILENT:
            log.warning("%s cannot be evicted: %s", silent, verdict.value)
            return
        lease = self._options.liveness.lease
        reason = f"it did not answer {self._name!r}, which wants its place, for {lease:g} s, nor any other member"
        self._roster.evict(silent.info.wire_id, reason, by=None)
