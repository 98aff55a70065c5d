"""Reads the new entries of the group's log if a hello says that its sender knows more of them.

A hello is not trusted: the entries are read from the store, and compared with the digest in the hello.
"""

from collections.abc import Callable
from functools import partial
from typing import final

from ..contracts.roster_version import RosterVersion
from ..contracts.worker import WorkerInfo
from ..execution.executor import Executor
from ..transports.handshake import RefusedError
from .roster import RosterError
from .roster_log import RosterLog
from .serial_calls import SerialCalls

__all__ = ["RosterUpdates"]


@final
class RosterUpdates:
    """Compares what hellos say of the group's log with the store. Used on the event loop only."""

    def __init__(
        self, me: WorkerInfo, roster: RosterLog, executor: Executor, on_roster: Callable[[], None]
    ) -> None:
        """Has learned nothing yet.

        Args:
            me: this worker.
            roster: what is known.
            executor: its threads wait for the store, one at a time.
            on_roster: called on the loop when something may have been learned.
        """
        self._me = me
        self._roster = roster
        self._on_roster = on_roster
        self._reads = SerialCalls(executor)

    async def learn(self, version: RosterVersion) -> None:
        """Learns what the sender of a hello knows. Raises RefusedError if the store does not say the same."""
        try:
            await self._reads.run(partial(self._roster.learn, version))
        except RosterError as error:
            raise RefusedError(f"worker {self._me.name!r} refuses a roster: {error}") from None
        self._on_roster()
