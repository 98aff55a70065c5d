"""Ids of references and forks, unique among all workers."""

import itertools
import reprlib
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import final

from ..proto.v1 import agent_pb2

__all__ = ["GlobalId", "id_source", "name_needed"]


@final
class GlobalId(tuple[int, int]):
    """The id of the worker that made it, and a number that this worker counts up, made of a pair of both.

    No NamedTuple: each would be made by a function in Python, some hundred times in a step of a pipeline.
    """

    __slots__ = ()

    worker: int = property(itemgetter(0))  # type: ignore[assignment]
    number: int = property(itemgetter(1))  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.worker}, local_id={self.number})"

    @classmethod
    def from_payload(cls, payload: object) -> "GlobalId":
        """Returns the id that another worker has sent as a tuple. Raises ValueError if it is none."""
        if isinstance(payload, tuple) and len(payload) == 2:
            worker, number = payload
            if type(worker) is int and type(number) is int:
                return cls((worker, number))
        raise ValueError(f"malformed id: {reprlib.repr(payload)}")

    @classmethod
    def pair_from_payload(cls, payload: object) -> "tuple[GlobalId, GlobalId]":
        """Returns the two ids that another worker has sent as one tuple. Raises ValueError if it is none."""
        if isinstance(payload, tuple) and len(payload) == 4:
            first, number, second, other = payload
            if type(first) is type(number) is type(second) is type(other) is int:
                return cls((first, number)), cls((second, other))
        raise ValueError(f"malformed ids: {reprlib.repr(payload)}")

    @classmethod
    def from_proto(cls, message: agent_pb2.GlobalId | agent_pb2.Reference) -> "GlobalId":
        """Returns the id in a protobuf message: of a reference, that of the value."""
        return cls((message.worker_id, message.number))


def id_source(worker: int) -> Callable[[], GlobalId]:
    """Returns a function in C that makes the ids of one worker. Safe to use from any thread."""
    return map(GlobalId, zip(itertools.repeat(worker), itertools.count(), strict=False)).__next__


def name_needed(identifiers: Sequence[GlobalId], envelope: agent_pb2.Envelope) -> None:
    """Has a request wait, where it arrives, for values of that worker: without a thread, until its timeout."""
    needed = envelope.needed_values
    for worker, number in identifiers:
        needed.add(worker_id=worker, number=number)
