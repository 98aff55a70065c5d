"""What the links of an agent have done to its connections, and to the membership of its group."""

from collections.abc import Callable
from typing import final

from ..channels.router import ChannelRouter
from ..contracts.worker import WorkerInfo
from ..membership.addresses import ListenAddress
from ..transports.base import Transport
from ..transports.ended import ENDED
from ..transports.grpc_streams import GrpcStreams
from .evictions import Evictions

__all__ = ["Connections"]


@final
class Connections:
    """The connections of one agent: a LinkOwner."""

    def __init__(
        self,
        streams: GrpcStreams,
        transports: dict[int, Transport],
        wrap: Callable[[Transport, WorkerInfo], Transport],
        router: ChannelRouter,
        evictions: Evictions,
        where: ListenAddress,
    ) -> None:
        """Changes nothing by itself.

        Args:
            streams: by which workers are connected.
            transports: the transport to each worker, by id; some are replaced.
            wrap: wraps every transport to a worker.
            router: has the channels for payloads.
            evictions: those by this agent.
            where: the address of this worker, beside which those of its host have theirs.
        """
        self._streams = streams
        self._transports = transports
        self._wrap = wrap
        self._router = router
        self._evictions = evictions
        self._where = where

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
        self._transports[peer.wire_id] = self._wrap(ENDED, peer)

    def drop_payloads(self, peer: WorkerInfo, reason: str, *, is_lost: bool) -> None:
        """Drops the payloads that were on their way to a worker, and from it."""
        for channel in self._router.channels:
            if is_lost:
                channel.drop_peer(peer.wire_id, reason)
            else:
                channel.drop_connection(peer.wire_id, reason)

    def clean_up(self, address: str) -> None:
        """Removes the unix socket of a worker that has died."""
        self._where.clean_up(address)

    def on_lease_over(self, peer: WorkerInfo, reason: str) -> None:
        """Has a worker evicted that has not come back."""
        self._evictions.evict(peer, reason)

    def on_refused(self, peer: WorkerInfo) -> None:  # noqa: ARG002 - a LinkOwner's
        """Finds out whether this worker has been evicted, when another one does not let it in."""
        self._evictions.read()
