"""What is left of requests until they are answered, or never will be: also of those that have failed here."""

from collections import OrderedDict
from typing import final

from ..peers.peer import Peer

__all__ = ["Unanswered"]

MAX_ORPHANS = 1 << 16
"""Requests that have failed because their worker was suspect, and whose answers may still come."""


@final
class Unanswered:
    """The requests of one agent that other workers have not answered. Safe to use from any thread."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Peer, object]] = {}
        """The worker and the `keep` of each request, by its id."""
        self._orphans: OrderedDict[int, Peer] = OrderedDict()
        """The worker of each request that has failed because that was suspect, and that it may answer all the
        same: references in the answer must be counted. The first ones are forgotten when there are too many."""

    def drop(self, identifier: int) -> None:
        """Forgets a request that is answered, or was not sent."""
        self.kept.pop(identifier, None)

    def receiver_of(self, identifier: int) -> Peer | None:
        """Returns the worker that was sent a request, if something is kept for it."""
        return self.kept.get(identifier, (None, None))[0]

    def of(self, peer: Peer) -> set[int]:
        """Returns the ids of the requests to a worker for which something is kept."""
        return {identifier for identifier, (receiver, _) in self.kept.copy().items() if receiver is peer}

    def add_orphan(self, peer: Peer, identifier: int) -> None:
        """Notes a request that has failed because its worker is suspect."""
        self._orphans[identifier] = peer
        while len(self._orphans) > MAX_ORPHANS:
            self._orphans.popitem(last=False)

    def take_orphan(self, peer: Peer, identifier: int) -> bool:
        """Returns, once, whether such a request is answered by its worker."""
        return self._orphans.get(identifier) is peer and self._orphans.pop(identifier, None) is not None

    def drop_all(self, peer: Peer) -> None:
        """Forgets the requests to a worker that is lost."""
        for identifier in self.of(peer):
            self.kept.pop(identifier, None)
        for identifier, receiver in self._orphans.copy().items():
            if receiver is peer:
                self._orphans.pop(identifier, None)
