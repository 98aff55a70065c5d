"""What one worker differentiates in a backward pass, and how it has torch's engine do that.

A worker's part of a pass is at most one call of torch's engine. Its roots are the losses, on the worker that
called `backward`, and the sends that take part. Since they are roots, torch's dependency counts make every node
wait for all gradients that it receives, and run once.

A send enters the engine in one of three ways:

- It is the only one, and its gradients have arrived: they enter where the tensors of the message have come from.
- Else its gate enters, and waits for them. A gate blocks the thread that runs the graph, so it must run
  only when no other node is ready, and of several ready gates the one sent last must run first: the gradient of a
  send depends only on sends that came after it, so this order cannot deadlock. torch's engine runs ready nodes by
  descending sequence number. Gates therefore get their message ids as sequence numbers, and every other node a
  larger number.
- The tensors of the message are leaves, so their gradients are those that arrive: it does not enter at all. The
  gradients are waited for when the engine has run.

The order holds on one thread, which runs CPU nodes and blocks. In a graph with nodes on other devices, torch runs
those on threads of their own, and a gate may block the CPU thread before they have made other CPU nodes ready.
Such a graph is run one root at a time: nodes that several roots depend on run several times, and their results are
summed up.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch.autograd.graph import GradientEdge

from ..torch_internals import profiler_enabled, run_backward
from . import replicas
from .backward_pass import BackwardPass, PartialGradients
from .contexts import Context
from .gradient_sender import TensorGradients
from .gradients import total
from .graph import AccumulateGrad, Graph, start_node

__all__ = ["Part"]

ABOVE_GATES = 1 << 40
"""Added to the sequence number of an ordinary node that is as small as a gate's, which keeps their order."""


@final
class Part:
    """One worker's part of a pass. Used by one thread."""

    def __init__(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        graph: Graph,
        message_ids: Sequence[int],
        *,
        one_root_at_a_time: bool,
    ) -> None:
        """Finds out what takes part besides the roots of this worker and their graph, which is extended.

        `one_root_at_a_time` runs the graph as one with nodes on several devices. Raises AutogradError if a send is
        unknown.
        """
        self.graph = graph
        self.message_ids = sorted(message_ids, reverse=True)  # the order in which torch's engine runs gates
        self._context = context
        self._roots = roots
        self.awaited: dict[int, int] = {}
        """The receivers of the sends, which send gradients, by message id."""
        self._gates: dict[int, torch.Tensor] = {}
        """Those of the sends that enter the engine."""
        self._leaf_sends: dict[int, list[Any]] = {}
        """The accumulation nodes of the tensors of the other sends."""
        # A profile shows the gates.
        # A graph can have nodes on other devices than the CPU only then.
        has_devices = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        is_plain = not one_root_at_a_time and not profiler_enabled() and not has_devices
        for message_id in self.message_ids:
            gate, self.awaited[message_id] = context.find_send(message_id)
            # The graph must have the leaves that may be replicated.
            leaves = _leaves_behind(gate) if is_plain and not replicas.may_exist else None
            if leaves is None:
                self._gates[message_id] = gate
            else:
                self._leaf_sends[message_id] = leaves
        if self._gates:
            graph.extend([gate.grad_fn for gate in self._gates.values()])
        self._graphs: list[Graph] | None = None
        """Those of the roots and of the gates, if they are run one at a time."""
        self.partial: PartialGradients | None = None
        """What sums up the gradients of received messages that several of these lead to."""
        if one_root_at_a_time or (has_devices and _has_several_devices(graph)):
            self._graphs = [Graph([start_node(output)]) for output in (*roots, *self._gates.values())]
            counts = Counter((node.sender, node.message_id) for each in self._graphs for node in each.receives)
            self.partial = PartialGradients(counts)
        self._is_plain = is_plain
        self.enters_gates = bool(self._gates)
        """Whether gates may wait for gradients while torch's engine runs."""

    def run(
        self, running: BackwardPass, *, retain_graph: bool, collect: Callable[[], None]
    ) -> tuple[Sequence[Any], list[torch.Tensor | None]]:
        """Computes the gradients of the leaves, and sends those of received messages.

        Calls `collect` when the engine has run, which waits for gradients that come with answers. Returns
        accumulation nodes of leaves, and a gradient for each.
        """
        if self._graphs is not None:
            gradients = self._run_one_by_one(self._graphs, retain_graph=retain_graph)
        elif self._roots or self._gates:
            gradients = self._run_engine(running, retain_graph=retain_graph)
        else:
            gradients = []
        nodes: Sequence[Any] = self.graph.leaves
        if self._leaf_sends:
            collect()
            nodes, gradients = self._with_leaf_sends(running, nodes, gradients)
        return nodes, gradients

    def _run_engine(self, running: BackwardPass, *, retain_graph: bool) -> list[torch.Tensor | None]:
        outputs: list[Any] = list(self._roots)
        gradients: list[torch.Tensor | None] = [None] * len(outputs)
        waiting: dict[int, torch.Tensor] = {}
        # Several sends enter by their gates, in whose order gradients are summed up, whenever they arrive.
        is_alone = self._is_plain and len(self._gates) == 1
        for message_id, gate in self._gates.items():
            arrived = running.take_complete(message_id) if is_alone else None
            if arrived is None:
                outputs.append(gate)
                gradients.append(None)
                waiting[message_id] = gate
            else:
                edges: Any = gate.grad_fn.next_functions  # type: ignore[union-attr]
                for edge in edges:
                    outputs.append(GradientEdge(*edge))
                gradients += arrived
        if waiting:
            _number_nodes(self.graph, waiting, self._context.message_count)
        return self._grad(outputs, gradients, self.graph.leaves, retain_graph=retain_graph)

    def _run_one_by_one(self, graphs: Sequence[Graph], *, retain_graph: bool) -> list[torch.Tensor | None]:
        """Runs the graph from one root after another, and sums up the gradients of each leaf."""
        _number_nodes(self.graph, self._gates, self._context.message_count)
        sums: dict[Any, torch.Tensor | None] = {}
        outputs = [*self._roots, *self._gates.values()]
        for index, (output, graph) in enumerate(zip(outputs, graphs, strict=True)):
            is_last = index == len(outputs) - 1
            found = self._grad([output], [None], graph.leaves, retain_graph=retain_graph or not is_last)
            for node, gradient in zip(graph.leaves, found, strict=True):
                sums[node] = total(sums.get(node), gradient)
        return [sums.pop(node) for node in self.graph.leaves]

    def _grad(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[torch.Tensor | None],
        leaves: Sequence[Any],
        *,
        retain_graph: bool,
    ) -> list[torch.Tensor | None]:
        """Runs the graph from losses, gates and edges; returns a gradient for each accumulation node of leaves.

        There is a gradient for each edge, and None for the scalars, whose gradient is 1. Gates ignore theirs.
        """
        # All RecvRpc nodes lead to the dummy, without which the engine would not run them.
        inputs: list[Any] = []
        for node in leaves:
            inputs.append(GradientEdge(node, 0))
        inputs.append(self._context.dummy)
        return list(run_backward(outputs, gradients, tuple(inputs), retain_graph=retain_graph))[:-1]

    def _with_leaf_sends(
        self, running: BackwardPass, nodes: Sequence[Any], gradients: Sequence[torch.Tensor | None]
    ) -> tuple[Sequence[Any], list[torch.Tensor | None]]:
        """Adds the gradients of the sends of leaves, for which it waits, to those that the engine has computed."""
        sums = dict(zip(nodes, gradients, strict=True))
        for message_id, leaf_nodes in self._leaf_sends.items():
            arrived = _fitting(leaf_nodes, running.wait_for_gradients(message_id))
            for node, gradient in zip(leaf_nodes, arrived, strict=True):
                sums[node] = total(sums[node], gradient) if node in sums else gradient
        return list(sums), list(sums.values())


def _leaves_behind(gate: torch.Tensor) -> list[Any] | None:
    """Returns the accumulation nodes of the tensors of a send; None if one is no leaf, or has hooks."""
    nodes: list[Any] = []
    edges: Any = gate.grad_fn.next_functions  # type: ignore[union-attr]
    for node, _ in edges:
        if type(node) is not AccumulateGrad or node.variable._backward_hooks:
            return None
        nodes.append(node)
    return nodes


def _fitting(leaf_nodes: Sequence[Any], gradients: TensorGradients) -> TensorGradients:
    """Returns gradients as torch's engine passes them to leaves: of the leaf's dtype, shape and device."""
    for node, gradient in zip(leaf_nodes, gradients, strict=True):
        leaf = node.variable
        if gradient is not None and (
            gradient.dtype is not leaf.dtype or gradient.shape != leaf.shape or gradient.device != leaf.device
        ):
            break
    else:
        return gradients
    fitting: list[torch.Tensor | None] = []
    for node, gradient in zip(leaf_nodes, gradients, strict=True):
        edge = GradientEdge(node, 0)
        fitting += [None] if gradient is None else run_backward([edge], [gradient], (edge,), retain_graph=True)
    return fitting


def _number_nodes(graph: Graph, gates: Mapping[int, torch.Tensor], limit: int) -> None:
    """Gives the gates their message ids, all below `limit`, as sequence numbers, and other nodes larger ones."""
    for node in graph.nodes:
        if (number := node._sequence_nr()) < limit:
            node._set_sequence_nr(number + ABOVE_GATES)
    for message_id, gate in gates.items():
        gate.grad_fn._set_sequence_nr(message_id)  # type: ignore[union-attr]


def _has_several_devices(graph: Graph) -> bool:
    """Returns whether a graph has nodes on other devices than the CPU, on which gates always are."""
    return any(meta.device.type != "cpu" for node in graph.nodes for meta in node._input_metadata if meta.device)
