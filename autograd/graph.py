"""This worker's part of the autograd graph: what a backward pass over it runs, and its closures."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .closure import Closure, union
from .functions import is_recv

__all__ = ["AccumulateGrad", "Graph", "small_closure", "start_node"]

AccumulateGrad = type(torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node)
"""The class of the nodes that accumulate the gradients of leaves."""


class Graph:
    """All nodes on this worker that get a gradient if some starting nodes do."""

    __slots__ = ("leaves", "nodes", "receives")

    def __init__(self, starts: Iterable[Any] = ()) -> None:
        """Args: starts: nodes."""
        self.leaves: list[Any] = []
        """The accumulation nodes of leaves."""
        self.receives: list[Any] = []
        """The `RecvRpc` nodes."""
        self.nodes: set[Any] = set()
        """All nodes."""
        self.extend(starts)

    def extend(self, starts: Iterable[Any]) -> None:
        """Adds more starting nodes, and all nodes that they lead to."""
        stack = list(starts)
        while stack:
            node = stack.pop()
            if node in self.nodes:
                continue
            self.nodes.add(node)
            if is_recv(node):
                self.receives.append(node)
            elif isinstance(node, AccumulateGrad):
                self.leaves.append(node)
            else:
                stack.extend([each for each, _ in node.next_functions if each is not None])

    def closure(self) -> Closure:
        """Returns all sends that get a gradient if the starting nodes do."""
        return union(node.closure for node in self.receives)


class _Wrap(torch.autograd.Function):
    """Wraps a sparse leaf in an autograd node.

    torch reaches the AccumulateGrad node of a leaf through a view, which sparse tensors do not support.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return torch.zeros(())


def start_node(tensor: torch.Tensor) -> Any:
    """Returns the node at which the gradient of a tensor enters the graph."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    if tensor.layout is torch.strided:
        return torch.autograd.graph.get_gradient_edge(tensor).node
    with torch.enable_grad():
        wrapped = _Wrap.apply(tensor)  # type: ignore[no-untyped-call]
    return wrapped.grad_fn.next_functions[0][0]


def small_closure(starts: Iterable[Any], known: dict[Any, Closure | None], limit: int) -> Closure | None:
    """Returns the closure of nodes if it is small enough for a header.

    Args:
        starts: the nodes.
        known: closures of nodes that were computed before, so that no node is visited twice; results are added.
        limit: the number of sends that the closure may name.

    Returns:
        The closure; None if it names more sends than `limit`.
    """
    starts = list(starts)
    stack = list(starts)
    while stack:
        node = stack[-1]
        if node not in known:
            next_nodes = [] if is_recv(node) else [each for each, _ in node.next_functions if each is not None]
            if missing := [each for each in next_nodes if each not in known]:
                stack.extend(missing)
                continue
            known[node] = node.closure if is_recv(node) else _small_union(next_nodes, known, limit)
        stack.pop()
    return _small_union(starts, known, limit)


def _small_union(nodes: Iterable[Any], known: Mapping[Any, Closure | None], limit: int) -> Closure | None:
    found: list[Closure] = []
    for node in nodes:
        if (closure := known[node]) is None:
            return None
        if not any(closure is each for each in found):
            found.append(closure)
    closure = union(found)
    return closure if len(closure) <= limit else None
