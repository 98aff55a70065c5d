"""All peers of an agent: by id those there have been, by name and rank the latest incarnation of each worker."""

from collections.abc import Mapping
from typing import Any, final

from ...errors import UnknownWorkerError
from ..contracts.worker import WorkerInfo
from .link import LinkState
from .peer import Peer

__all__ = ["Peers"]


@final
class Peers:
    """The peers of one agent. They are added on one thread, and looked up on any."""

    def __init__(self, me: WorkerInfo, *, dynamic: bool = False) -> None:
        """Knows nobody yet. Workers join and leave a dynamic group at any time."""
        self.me = me
        self.by_id: dict[int, Peer] = {}
        """All peers, by wire id: current and former ones, and this worker itself."""
        self.by_name: dict[str, Peer] = {}
        """The latest incarnation of each worker."""
        self._by_rank: dict[int, Peer] = {}
        self._dynamic = dynamic

    def add(self, peer: Peer) -> None:
        """Adds a peer, which takes the place of those that had its name or its rank."""
        self.by_id[peer.id] = peer  # first: who is found by name is looked up by id then
        self.by_name[peer.info.name] = peer
        self._by_rank[peer.info.id] = peer

    def of(self, worker: WorkerInfo) -> Peer:
        """Returns the peer that a worker is."""
        return self.by_id[worker.wire_id]

    def find(self, destination: object) -> Peer:
        """Returns the latest incarnation of the worker with this name, rank or WorkerInfo.

        Raises:
            UnknownWorkerError: there is no such member.
            ValueError: the destination is neither a name, a rank nor a WorkerInfo.
        """
        found: Peer | None
        if isinstance(destination, WorkerInfo):
            found = self._by_rank.get(destination.id)
            found = found if found is not None and found.info.name == destination.name else None
        elif isinstance(destination, bool) or not isinstance(destination, str | int):
            raise ValueError(f"destination is {destination!r}: give a worker's name, id or WorkerInfo")
        elif isinstance(destination, str):
            found = self.by_name.get(destination)
        else:
            found = self._by_rank.get(destination)
        if found is None:
            raise UnknownWorkerError(
                destination, [peer.info.name for peer in self.current()], dynamic=self._dynamic
            )
        return found

    def all(self) -> list[Peer]:
        """Returns all peers, by id."""
        peers = self.by_id.copy()
        return [peers[identifier] for identifier in sorted(peers)]

    def current(self) -> list[Peer]:
        """Returns the latest incarnation of each worker, by rank; of a dynamic group, those that are not lost."""
        by_rank = self._by_rank.copy()
        latest = [by_rank[rank] for rank in sorted(by_rank)]
        return [peer for peer in latest if peer.end is None] if self._dynamic else latest

    def connected(self) -> list[WorkerInfo]:
        """Returns the workers that have been connected and are not lost."""
        links = ((peer.info, peer.link) for peer in self.all())
        absent = (LinkState.UNCONNECTED, LinkState.LOST)
        return [info for info, link in links if link is not None and link.state not in absent]

    def close(self) -> None:
        """Reports nothing that becomes of them any more. Called on the event loop."""
        for peer in self.all():
            peer.begin_to_close()

    def traffic(self) -> dict[str, int]:
        """Returns the sums of what has gone between this worker and its peers."""
        names = ("messages_sent", "messages_received", "bytes_sent", "bytes_received")
        counts = [peer.traffic.counts() for peer in self.all() if peer.is_used]
        return dict(zip(names, map(sum, zip((0, 0, 0, 0), *counts, strict=True)), strict=True))

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns the state of each link by the worker's name: see `Link.describe`."""
        return {peer.info.name: peer.link.describe() for peer in self.all() if peer.link is not None}
