"""Names for references and their forks that no two workers make twice."""

import itertools
from typing import NamedTuple, final

from ..proto.v1 import agent_pb2

__all__ = ["GlobalId", "IdSource"]


class GlobalId(NamedTuple):
    """The worker that made it, and that worker's count."""

    worker: int
    number: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.worker}, local_id={self.number})"

    def to_proto(self) -> agent_pb2.GlobalId:
        """As a message."""
        return agent_pb2.GlobalId(worker_id=self.worker, number=self.number)

    @classmethod
    def from_proto(cls, message: agent_pb2.GlobalId) -> "GlobalId":
        """From a message."""
        return cls(message.worker_id, message.number)


@final
class IdSource:
    """Makes the ids of one worker."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._numbers = itertools.count()

    def next(self) -> GlobalId:
        """A new id."""
        return GlobalId(self._worker, next(self._numbers))
