"""Which workers of a group may be connected by process groups, whose data nothing encrypts or authenticates."""

from collections.abc import Iterable, Sequence
from typing import final

from ..contracts.member import Member

__all__ = ["Connectable"]


@final
class Connectable:
    """Knows the hosts of the workers of a static group.

    Credentials do not protect Gloo's connections. So between hosts workers form no process groups, unless
    `insecure` allows it; without them, everything goes by connections that credentials do protect.
    """

    def __init__(self, members: Sequence[Member], *, insecure: bool) -> None:
        """Knows nobody who joins later: they are in no process group.

        Args:
            members: those who have formed the group.
            insecure: whether workers on several hosts may be connected all the same.
        """
        self._networks = {member.info.wire_id: member.network for member in members}
        self._insecure = insecure

    def __call__(self, workers: Iterable[int]) -> bool:
        """Returns whether the workers with these ids may form a process group."""
        networks = {self._networks.get(worker) for worker in workers}
        return None not in networks and (self._insecure or len(networks) == 1)
