"""This worker's part of the autograd graph: what connects it to those of others, and what leads where.

`SendRpc` consumes the tensors of a message on the sending worker. Its output is a scalar, the *gate*, which is a
root of the sender's part of a backward pass; its backward waits for the gradients that the receiver sends.
`RecvRpc` produces the tensors of the message on the receiving worker; its backward sends their gradients to the
sender and does not wait.

A *send* is a message whose tensors require grad. Its *closure* is the set of all sends, on any worker, that get a
gradient if it gets one. The graph that leads from a send to leaves never changes afterwards, so its worker
computes the closure once, from those of the messages that it has received, and puts it into the header. The
closure of a loss is the union of the closures of the messages received in its graph. This is the SMART mode of
PyTorch's design note "Distributed Autograd Design"; the closures in the headers are gradwire's way to it.

A closure of more than MAX_HEADER_SENDS sends is omitted from the header. The receiver then records only which send
it belongs to, and the worker that runs a backward pass asks for it. So headers stay small, and a pass asks about
once for every MAX_HEADER_SENDS messages of the longest chain of calls.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, final

import torch

from ..proto.v1 import agent_pb2
from ..rpc.contracts.policy import message_value
from ..torch_internals import apply_function

__all__ = [
    "MAX_HEADER_SENDS",
    "NOTHING",
    "AccumulateGrad",
    "Closure",
    "Graph",
    "RecvRpc",
    "SendId",
    "SendRpc",
    "apply_with_grad",
    "closure_from_proto",
    "closure_to_proto",
    "follower_of",
    "small_closure",
    "start_node",
    "union",
]

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


@final
class SendRpc(torch.autograd.Function):
    """Maps the tensors of a message that require grad to its gate, in a `Context`, whose module imports this one.

    The caller keeps followers of the leaves among them meanwhile: see `follower_of`.
    """

    @staticmethod
    def forward(ctx: Any, context: Any, message_id: int, *tensors: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Returns the gate, on the CPU: CPU nodes run on the thread that started the pass, which may block.

        Its value does not matter.
        """
        ctx.context, ctx.message_id = context, message_id
        gate: torch.Tensor = context.dummy.detach()
        return gate

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Waits for the gradients from the receiver."""
        return (None, None, *ctx.context.running_pass().wait_for_gradients(ctx.message_id))


@final
class RecvRpc(torch.autograd.Function):
    """Produces the tensors of a message; `closure` is that of the message, without the message itself."""

    @staticmethod
    def forward(
        ctx: Any,
        dummy: torch.Tensor,  # noqa: ARG004 - that of the context, without which there would be no node
        context: Any,
        sender: int,
        message_id: int,
        closure: Closure,
        tensors: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Returns the tensors unchanged. They are in a list so that autograd does not treat them as inputs."""
        ctx.context, ctx.sender, ctx.message_id = context, sender, message_id
        ctx.closure = Closure(closure.sends | {(sender, message_id)}, closure.omitted)
        ctx.materialize_grads = False  # as `set_materialize_grads` does
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Sends the gradients to the sender; None for tensors that the loss does not depend on."""
        ctx.context.running_pass().send_gradients((ctx.sender, ctx.message_id), gradients)
        return (None,) * 6


def apply_with_grad(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Applies one of the functions above, also in a thread that computes without gradients."""
    if torch.is_grad_enabled():
        return apply_function(function, *args)
    with torch.enable_grad():
        return apply_function(function, *args)


_RECV_NODE: type[Any] = RecvRpc._backward_cls
"""The class of the node that a `RecvRpc` makes."""


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
            if kind is _RECV_NODE:
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
            if type(node) is _RECV_NODE:
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
