"""Learns of the workers that have joined a dynamic group from their hellos, which anybody may send."""

import asyncio
import concurrent.futures
from collections.abc import Sequence
from typing import final

from ..contracts.worker import WorkerInfo
from ..execution.executor import Executor
from ..membership.roster import RosterError
from ..membership.roster_log import RosterLog
from ..transports.handshake import RefusedError

__all__ = ["Newcomers"]


@final
class Newcomers:
    """Compares the rosters in hellos with the store. Used on the event loop only."""

    def __init__(self, me: WorkerInfo, roster: RosterLog, executor: Executor) -> None:
        """Has learned nothing yet.

        Args:
            me: this worker.
            roster: what is known.
            executor: its threads wait for the store, one at a time.
        """
        self._me = me
        self._roster = roster
        self._executor = executor
        self._learning = asyncio.Lock()

    async def learn(self, entries: Sequence[str]) -> None:
        """Learns what a hello says of the roster. Raises RefusedError if the store does not say the same."""
        async with self._learning:
            learned: concurrent.futures.Future[None] = concurrent.futures.Future()
            self._executor.submit_urgent(self._learn, entries, learned)
            try:
                await asyncio.wrap_future(learned)
            except RosterError as error:
                raise RefusedError(f"worker {self._me.name!r} refuses a roster: {error}") from None

    def _learn(self, entries: Sequence[str], learned: "concurrent.futures.Future[None]") -> None:
        try:
            self._roster.learn(entries)
        except Exception as error:
            learned.set_exception(error)
        else:
            learned.set_result(None)
