"""Which sends take part in a backward pass, known without asking anybody, or hardly anybody.

A message's closure is the set of all sends, on whatever workers, that get a gradient if the message does.
The graph above a send never changes afterwards, so the sender computes the closure once, from the closures
of the messages it has received, and sends it along. That of a loss is then the union over its graph.

A closure of more than LARGEST sends is not sent. In its place stands a reference: "all that is above that send",
which who runs a backward pass asks the send's worker for. So headers stay small, and a pass asks once for every
LARGEST messages of the longest chain.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..proto.v1 import agent_pb2

__all__ = [
    "LARGEST",
    "NOTHING",
    "AccumulateGrad",
    "Closure",
    "Graph",
    "Message",
    "closure_above",
    "closure_from_proto",
    "closure_to_proto",
    "small_closure",
    "start_node",
    "union",
    "walk",
]

AccumulateGrad = type(torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node)
"""The class of the nodes under leaves."""

LARGEST = 256
"""How many sends a closure in a header names at most: about 1 KiB."""

Message = tuple[int, int]
"""The id of the worker that sent it, and the message's id there."""


@dataclass(frozen=True, slots=True)
class Closure:
    """A set of sends.

    sends: these,
    above: and all in the closures of these, which may or may not be in the set themselves.
    """

    sends: frozenset[Message] = frozenset()
    above: frozenset[Message] = frozenset()

    def __len__(self) -> int:
        return len(self.sends) + len(self.above)


NOTHING = Closure()


def union(closures: Iterable[Closure]) -> Closure:
    """All of them in one."""
    found = [closure for closure in closures if closure is not NOTHING]
    if len(found) <= 1:
        return found[0] if found else NOTHING
    return Closure(
        frozenset[Message]().union(*(closure.sends for closure in found)),
        frozenset[Message]().union(*(closure.above for closure in found)),
    )


class Graph:
    """What a walk found: the leaves' accumulation nodes, the receiving nodes, and all nodes."""

    __slots__ = ("leaves", "nodes", "receives")

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.receives: list[Any] = []
        self.nodes: set[Any] = set()


class _Over(torch.autograd.Function):
    """Puts a node over a sparse leaf: torch's own way to its node takes a view, which those do not have."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Computes nothing."""
        return torch.zeros(())


def start_node(tensor: torch.Tensor) -> Any:
    """The node at which a tensor's gradient enters its graph."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    if tensor.layout is torch.strided:
        return torch.autograd.graph.get_gradient_edge(tensor).node
    with torch.enable_grad():
        over = _Over.apply(tensor)  # type: ignore[no-untyped-call]
    return over.grad_fn.next_functions[0][0]


def walk(starts: Iterable[Any]) -> Graph:
    """Finds everything that gets a gradient on this worker if these nodes do."""
    from .functions import is_recv  # here, because the functions carry closures

    graph = Graph()
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node in graph.nodes:
            continue
        graph.nodes.add(node)
        if is_recv(node):
            graph.receives.append(node)
        elif isinstance(node, AccumulateGrad):
            graph.leaves.append(node)
        else:
            stack.extend(above for above, _ in node.next_functions if above is not None)
    return graph


def closure_above(starts: Iterable[Any]) -> Closure:
    """All sends that get a gradient if these nodes do."""
    return union(node.closure for node in walk(starts).receives)


def small_closure(starts: Iterable[Any], known: dict[Any, Closure | None], largest: int) -> Closure | None:
    """That of nodes, if it is small.

    Args:
        starts: the nodes.
        known: what has been found for nodes before, so that each node is looked at once; is added to.
        largest: what is small.

    Returns:
        The closure; None if it has more than `largest` members.
    """
    from .functions import is_recv  # here, because the functions carry closures

    starts = list(starts)
    stack = list(starts)
    while stack:
        node = stack[-1]
        if node not in known:
            above = [] if is_recv(node) else [each for each, _ in node.next_functions if each is not None]
            if missing := [each for each in above if each not in known]:
                stack.extend(missing)
                continue
            known[node] = node.closure if is_recv(node) else _small_union(above, known, largest)
        stack.pop()
    return _small_union(starts, known, largest)


def _small_union(nodes: Iterable[Any], known: Mapping[Any, Closure | None], largest: int) -> Closure | None:
    found: list[Closure] = []
    for node in nodes:
        if (closure := known[node]) is None:
            return None
        if not any(closure is each for each in found):
            found.append(closure)
    closure = union(found)
    return closure if len(closure) <= largest else None


def closure_to_proto(closure: Closure) -> list[agent_pb2.WorkerSends]:
    """As messages, by worker."""
    by_worker: dict[int, agent_pb2.WorkerSends] = defaultdict(agent_pb2.WorkerSends)
    for worker, message_id in sorted(closure.sends):
        by_worker[worker].message_ids.append(message_id)
    for worker, message_id in sorted(closure.above):
        by_worker[worker].above.append(message_id)
    for worker, sends in by_worker.items():
        sends.worker_id = worker
    return list(by_worker.values())


def closure_from_proto(messages: Iterable[agent_pb2.WorkerSends]) -> Closure:
    """From messages."""
    messages = list(messages)
    if not messages:
        return NOTHING
    return Closure(
        frozenset((sends.worker_id, number) for sends in messages for number in sends.message_ids),
        frozenset((sends.worker_id, number) for sends in messages for number in sends.above),
    )
