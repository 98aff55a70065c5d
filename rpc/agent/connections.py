"""What the links of an agent have done to its connections, and to the membership of its group."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import final

from ..channels.router import ChannelRouter
from ..contracts.worker import WorkerInfo
from ..execution.executor import Executor
from ..membership.roster_log import RosterLog
from ..transports.base import Transport
from ..transports.grpc_streams import GrpcStreams

__all__ = ["Connections"]

log = logging.getLogger(__name__)


@final
class Connections:
    """The connections of one agent: a LinkOwner."""

    def __init__(
        self,
        me: WorkerInfo,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        streams: GrpcStreams,
        transports: dict[int, Transport],
        wrap: Callable[[Transport, WorkerInfo], Transport],
        router: ChannelRouter,
        roster: RosterLog | None,
        on_roster: Callable[[], None],
    ) -> None:
        """Changes nothing by itself.

        Args:
            me: this worker.
            loop: the event loop.
            executor: its threads wait for the store.
            streams: by which workers are connected.
            transports: the transport to each worker, by id; some are replaced.
            wrap: wraps every transport to a worker.
            router: has the channels for payloads.
            roster: the members of the group; None if it keeps none.
            on_roster: called on the loop when the roster may have changed.
        """
        self._me = me
        self._loop = loop
        self._executor = executor
        self._streams = streams
        self._transports = transports
        self._wrap = wrap
        self._router = router
        self._roster = roster
        self._on_roster = on_roster

    def renew_transport(self, peer: WorkerInfo) -> None:
        """Replaces the transport to a worker by another one."""
        transport = self._streams.renew(peer)
        self._transports[peer.wire_id] = self._wrap(transport, peer)

    def connect_again(self, peer: WorkerInfo) -> None:
        """Has the transport to a worker connect."""
        self._streams.connect(peer.wire_id)

    def break_off(self, peer: WorkerInfo, reason: str) -> None:
        """Ends an attempt to connect."""
        self._streams.break_off(peer.wire_id, reason)

    def refuse(self, peer: WorkerInfo, reason: str) -> None:
        """Lets a worker in no more."""
        self._streams.refuse(peer.wire_id, reason)

    def drop_payloads(self, peer: WorkerInfo, reason: str, *, is_lost: bool) -> None:
        """Drops the payloads that were on their way to a worker, and from it."""
        for channel in self._router.channels:
            if is_lost:
                channel.drop_peer(peer.wire_id, reason)
            else:
                channel.drop_connection(peer.wire_id, reason)

    def on_lease_over(self, peer: WorkerInfo, reason: str) -> None:
        """Has a worker evicted that has not come back."""
        self._executor.submit_urgent(self._read_roster, peer, reason)

    def on_refused(self, peer: WorkerInfo) -> None:
        """Finds out whether this worker has been evicted, when another one does not let it in."""
        self._executor.submit_urgent(self._read_roster, peer, "")

    def _read_roster(self, peer: WorkerInfo, evict_because: str) -> None:
        """Evicts a worker if there is a reason, and takes in what has changed. Waits for the store."""
        if self._roster is None:
            return
        try:
            self._roster.catch_up()
            if evict_because:
                self._roster.evict(peer.wire_id, evict_because, self._me.wire_id)
        except Exception as error:  # of the store: the others may see it differently
            log.warning("the store cannot tell who is in the group, or that %s is not: %s", peer.name, error)
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._on_roster)
