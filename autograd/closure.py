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

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import repeat

from ..proto.v1 import agent_pb2
from ..rpc.contracts.policy import message_value

__all__ = ["MAX_HEADER_SENDS", "NOTHING", "Closure", "SendId", "closure_from_proto", "closure_to_proto", "union"]

MAX_HEADER_SENDS = 256
"""The number of sends that a closure in a header names at most: about 1 KiB."""

SendId = tuple[int, int]
"""The id of the sending worker, and the number of the message there, within the context."""


@message_value
@dataclass(slots=True)
class Closure:
    """A set of sends. Never changes.

    sends: members of the set.
    omitted: sends whose closures are part of this one but were omitted from their headers. Whether these sends are
        members themselves is up to `sends`.
    """

    sends: frozenset[SendId] = frozenset()
    omitted: frozenset[SendId] = frozenset()


NOTHING = Closure()


def union(closures: Iterable[Closure]) -> Closure:
    """Returns the union of closures."""
    found = [closure for closure in closures if closure is not NOTHING]
    if len(found) <= 1:
        return found[0] if found else NOTHING
    return Closure(
        frozenset[SendId]().union(*[closure.sends for closure in found]),
        frozenset[SendId]().union(*[closure.omitted for closure in found]),
    )


def closure_to_proto(closure: Closure) -> list[agent_pb2.WorkerSends]:
    """Returns a closure as protobuf messages, one for each sending worker."""
    sends: dict[int, list[int]] = {}
    for worker, message_id in closure.sends:
        sends.setdefault(worker, []).append(message_id)
    by_worker = {
        worker: agent_pb2.WorkerSends(worker_id=worker, message_ids=numbers) for worker, numbers in sends.items()
    }
    for worker, message_id in closure.omitted:
        if worker not in by_worker:
            by_worker[worker] = agent_pb2.WorkerSends(worker_id=worker)
        by_worker[worker].omitted.append(message_id)
    return list(by_worker.values())


def closure_from_proto(messages: Collection[agent_pb2.WorkerSends]) -> Closure:
    """Returns the closure that the messages in a header describe. Raises ValueError if it is too large for one."""
    sends: list[SendId] = []
    omitted: list[SendId] = []
    count = 0
    for message in messages:
        count += len(message.message_ids) + len(message.omitted)
        if count > MAX_HEADER_SENDS:
            raise ValueError(f"malformed autograd header: its closure has more than {MAX_HEADER_SENDS} sends")
        worker = repeat(message.worker_id)
        sends += zip(worker, message.message_ids, strict=False)  # as many as there are message ids
        if message.omitted:
            omitted += zip(worker, message.omitted, strict=False)
    return Closure(frozenset(sends), frozenset(omitted)) if sends or omitted else NOTHING
