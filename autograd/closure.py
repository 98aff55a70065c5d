"""Which sends take part in a backward pass, known without asking anybody.

A message's closure is the set of all sends, on whatever workers, that get a gradient if the message does.
The graph above a send never changes afterwards, so the sender computes the closure once, from the closures
of the messages it has received, and sends it along. That of a loss is then the union over its graph.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from ..proto.v1 import agent_pb2

__all__ = ["AccumulateGrad", "Closure", "Graph", "closure_from_proto", "closure_to_proto", "start_node", "walk"]

AccumulateGrad = type(torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node)
"""The class of the nodes under leaves."""

Closure = frozenset[tuple[int, int]]
"""(worker id, message id) pairs."""


class Graph:
    """What a walk found: the leaves' accumulation nodes, the receiving nodes, and all nodes."""

    __slots__ = ("leaves", "nodes", "receives")

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.receives: list[Any] = []
        self.nodes: set[Any] = set()

    def closure(self) -> Closure:
        """All sends that get a gradient if the start of the walk does."""
        return frozenset[tuple[int, int]]().union(*(node.closure for node in self.receives))


def start_node(tensor: torch.Tensor) -> Any:
    """The node at which a tensor's gradient enters its graph."""
    return tensor.grad_fn if tensor.grad_fn is not None else torch.autograd.graph.get_gradient_edge(tensor).node


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


def closure_to_proto(closure: Closure) -> list[agent_pb2.WorkerSends]:
    """As messages, by worker."""
    by_worker: dict[int, list[int]] = defaultdict(list)
    for worker, message_id in sorted(closure):
        by_worker[worker].append(message_id)
    return [agent_pb2.WorkerSends(worker_id=worker, message_ids=ids) for worker, ids in by_worker.items()]


def closure_from_proto(messages: Iterable[agent_pb2.WorkerSends]) -> Closure:
    """From messages."""
    return frozenset((sends.worker_id, number) for sends in messages for number in sends.message_ids)
