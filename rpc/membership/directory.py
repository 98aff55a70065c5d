"""The workers that an agent knows: all incarnations by wire id, and by name and rank the latest of each worker."""

from collections.abc import Iterable, Mapping
from typing import final

from ...errors import UnknownWorkerError
from ..contracts.worker import WorkerInfo
from .members import Member

__all__ = ["Directory"]


@final
class Directory:
    """Members are added on one thread, and looked up on any."""

    def __init__(self) -> None:
        self.incarnations: dict[int, WorkerInfo] = {}
        """All incarnations of all workers, by wire id. Only looked up."""
        self.members: Mapping[int, Member] = {}
        """All incarnations of all workers, by wire id. Never changed, but replaced: others may walk through it."""
        self.by_name: dict[str, WorkerInfo] = {}
        """The latest incarnation of each worker. Only looked up."""
        self._by_rank: dict[int, WorkerInfo] = {}

    def add(self, member: Member) -> None:
        """Adds a member, which takes the place of those that had its name or its rank."""
        info = member.info
        self.by_name[info.name] = info
        self._by_rank[info.id] = info
        self.incarnations[info.wire_id] = info
        self.members = {**self.members, info.wire_id: member}

    def latest(self) -> list[WorkerInfo]:
        """Returns the latest incarnation of each worker, by rank."""
        by_rank = dict(self._by_rank)
        return [by_rank[rank] for rank in sorted(by_rank)]

    def find(self, destination: object) -> WorkerInfo | None:
        """Returns the latest incarnation of the worker with this name, rank or WorkerInfo; None without one.

        Raises:
            ValueError: the destination is neither a name, a rank nor a WorkerInfo.
        """
        if isinstance(destination, WorkerInfo):
            found = self._by_rank.get(destination.id)
            return found if found is not None and found.name == destination.name else None
        if isinstance(destination, bool) or not isinstance(destination, str | int):
            raise ValueError(f"destination is {destination!r}: give a worker's name, id or WorkerInfo")
        return self._by_rank.get(destination) if isinstance(destination, int) else self.by_name.get(destination)

    def incarnation(self, wire_id: int) -> WorkerInfo:
        """Returns the incarnation with this wire id. Raises UnknownWorkerError if there is none."""
        member = self.members.get(wire_id)
        if member is None:
            raise UnknownWorkerError(wire_id, [worker.name for worker in self.latest()])
        return member.info

    def infos(self) -> dict[int, WorkerInfo]:
        """Returns all incarnations, by wire id."""
        return {wire_id: member.info for wire_id, member in self.members.items()}

    def unknown(self, members: Iterable[Member]) -> list[Member]:
        """Returns those of these members that have not been added."""
        return [member for member in members if member.info.wire_id not in self.members]
