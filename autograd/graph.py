"""This worker's part of the autograd graph: what a backward pass over it runs, and its closures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .closure import MAX_HEADER_SENDS, NOTHING, Closure, union
from .functions import RECV_NODE

__all__ = ["AccumulateGrad", "Graph", "follower_of", "small_closure", "start_node"]

AccumulateGrad: type[Any] = type(torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node)
"""The class of the nodes that accumulate the gradients of leaves."""

_LEADS_NOWHERE = frozenset({AccumulateGrad, type(None)})
"""The classes of what `next_functions` has that no sends follow."""


class Graph:
    """All nodes on this worker that get a gradient if some starting nodes do."""

    __slots__ = ("leaves", "nodes", "receives")

    def __init__(self, starts: Iterable[Any] = ()) -> None:
        self.leaves: list[Any] = []
        """The accumulation nodes of leaves."""
        self.receives: list[Any] = []
        """The `RecvRpc` nodes."""
        self.nodes: set[Any] = set()
        if starts:
            self.extend(starts)

    def extend(self, starts: Iterable[Any]) -> None:
        """Adds more starting nodes, and all nodes that they lead to."""
        stack, nodes = list(starts), self.nodes
        while stack:
            node = stack.pop()
            if node in nodes:
                continue
            nodes.add(node)
            kind = type(node)
            if kind is RECV_NODE:
                self.receives.append(node)
            elif kind is AccumulateGrad:
                self.leaves.append(node)
            else:
                for following, _ in node.next_functions:
                    if following is not None:
                        stack.append(following)

    def closure(self) -> Closure:
        """Returns all sends that get a gradient if the starting nodes do."""
        if len(self.receives) == 1:
            return self.receives[0].closure  # type: ignore[no-any-return]
        return union([node.closure for node in self.receives])


def start_node(tensor: torch.Tensor) -> Any:
    """Returns the node at which the gradient of a tensor enters the graph."""
    node = tensor.grad_fn
    return follower_of(tensor).grad_fn.next_functions[0][0] if node is None else node


def follower_of(leaf: torch.Tensor) -> Any:
    """Returns a tensor whose node keeps that of a leaf: a view, or a copy where torch has no views.

    torch makes the node of a leaf when it is needed, and lets go of it when nothing refers to it. To find or make
    it, torch takes the leaf's lock, and then the interpreter's, unless something in C++ refers to the node (seen
    with torch 2.13). Another thread may wait for the leaf's lock with the interpreter's lock held, as a Python
    function does that is applied to the leaf itself. Then neither goes on, nor any other thread of the process.
    """
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return follower_of(leaf)
    return leaf.view_as(leaf) if leaf.layout is torch.strided else torch.clone(leaf)


def small_closure(tensors: Iterable[torch.Tensor], known: dict[Any, Closure | None]) -> Closure | None:
    """Returns the closure of the nodes of tensors; None if it is too large for a header.

    Adds the closures of nodes to those that are known, so that no node is visited twice.
    """
    # Without leaves, whose nodes lead to no sends. Python must not be all that keeps one: `follower_of`.
    starts = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    stack: list[Any] = list(starts)
    while stack:
        node = stack[-1]
        if node not in known:
            if type(node) is RECV_NODE:
                known[node] = _if_small(node.closure)
            else:
                following = [each for each, _ in node.next_functions if type(each) not in _LEADS_NOWHERE]
                is_known = True
                for each in following:
                    if each not in known:
                        stack.append(each)
                        is_known = False
                if not is_known:
                    continue
                known[node] = known[following[0]] if len(following) == 1 else _small_union(following, known)
        stack.pop()
    return _small_union(starts, known)


def _small_union(nodes: Sequence[Any], known: Mapping[Any, Closure | None]) -> Closure | None:
    if len(nodes) == 1:
        return known[nodes[0]]
    closure = NOTHING
    others: list[Closure] = []
    for node in nodes:
        of_node = known[node]
        if of_node is None:
            return None
        if of_node is closure or of_node is NOTHING:
            continue
        if closure is NOTHING:
            closure = of_node
        else:
            others.append(of_node)
    if others:
        closure = union([closure, *others])
    return _if_small(closure) if others else closure


def _if_small(closure: Closure) -> Closure | None:
    return closure if len(closure.sends) + len(closure.omitted) <= MAX_HEADER_SENDS else None
