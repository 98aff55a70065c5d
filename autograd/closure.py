"""Closures of sends: which messages take part in a backward pass.

A *send* is a message whose tensors require grad. Its *closure* is the set of all sends, on any worker, that get a
gradient if it gets one. The graph that leads from a send to leaves never changes afterwards, so its worker
computes the closure once, from those of the messages that it has received, and puts it into the header. The
closure of a loss is the union of the closures of the messages received in its graph. This is the SMART mode of
PyTorch's design note "Distributed Autograd Design"; the closures in the headers are gradwire's way to it.

A closure of more than MAX_HEADER_SENDS sends is omitted from the header. The receiver then records only which send
it belongs to, and the worker that runs a backward pass asks for it. So headers stay small, and a pass asks about
once for every MAX_HEADER_SENDS messages of the longest chain of calls.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ..proto.v1 import agent_pb2

__all__ = ["MAX_HEADER_SENDS", "NOTHING", "Closure", "SendId", "closure_from_proto", "closure_to_proto", "union"]

MAX_HEADER_SENDS = 256
"""The number of sends that a closure in a header names at most: about 1 KiB."""

SendId = tuple[int, int]
"""The id of the sending worker, and the number of the message there, within the context."""


@dataclass(frozen=True, slots=True)
class Closure:
    """A set of sends.

    sends: members of the set.
    omitted: sends whose closures are part of this one but were omitted from their headers. Whether these sends are
        members themselves is up to `sends`.
    """

    sends: frozenset[SendId] = frozenset()
    omitted: frozenset[SendId] = frozenset()

    def __len__(self) -> int:
        return len(self.sends) + len(self.omitted)


NOTHING = Closure()


def union(closures: Iterable[Closure]) -> Closure:
    """Returns the union of closures."""
    found = [closure for closure in closures if closure is not NOTHING]
    if len(found) <= 1:
        return found[0] if found else NOTHING
    return Closure(
        frozenset[SendId]().union(*(closure.sends for closure in found)),
        frozenset[SendId]().union(*(closure.omitted for closure in found)),
    )


def closure_to_proto(closure: Closure) -> list[agent_pb2.WorkerSends]:
    """Returns a closure as protobuf messages, one for each sending worker."""
    by_worker: dict[int, agent_pb2.WorkerSends] = defaultdict(agent_pb2.WorkerSends)
    for worker, message_id in sorted(closure.sends):
        by_worker[worker].message_ids.append(message_id)
    for worker, message_id in sorted(closure.omitted):
        by_worker[worker].omitted.append(message_id)
    for worker, sends in by_worker.items():
        sends.worker_id = worker
    return list(by_worker.values())


def closure_from_proto(messages: Iterable[agent_pb2.WorkerSends]) -> Closure:
    """Returns the closure that protobuf messages describe."""
    messages = list(messages)
    if not messages:
        return NOTHING
    return Closure(
        frozenset((sends.worker_id, message_id) for sends in messages for message_id in sends.message_ids),
        frozenset((sends.worker_id, message_id) for sends in messages for message_id in sends.omitted),
    )
