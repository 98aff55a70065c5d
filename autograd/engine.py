"""Backward passes across workers, on PyTorch's own engine.

A worker's part of a pass is one call of `torch.autograd.grad`. Its roots are the losses, on the worker that called
`backward`, and the gates of the sends that take part. Since the gates are roots, torch's dependency counts make
every node wait for all gradients that it receives, and run once.

A gate blocks the thread that runs the graph, so it must run only when no other node is ready, and of several ready
gates the one sent last must run first: the gradient of a send depends only on sends that came after it, so this
order cannot deadlock. torch's engine runs ready nodes by descending sequence number. Gates therefore get their
message ids as sequence numbers, and every other node a larger number.

The order holds on one thread, which runs CPU nodes and blocks. In a graph with nodes on other devices, torch runs
those on threads of their own, and a gate may block the CPU thread before they have made other CPU nodes ready.
Such a graph is run one root at a time: nodes that several roots depend on run several times, and their results are
summed up.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import AutogradError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import Incoming
from .anomaly import AnomalyMode, AnomalyScopes
from .backward_pass import PassPart
from .closure import Closure
from .compression import decompress
from .context import Context, inside
from .contexts import Contexts
from .coordinator import PassCoordinator, PassRequest
from .gradient_sender import AnsweringSender, GradientSender, MessageGradients
from .graph import Graph, start_node
from .partial import PartialGradients, total
from .participants import all_sends, by_worker, complete_closure
from .replicas import Replicas, average

__all__ = ["Engine", "Mode", "check_roots"]

Mode = Literal["smart", "fast"]

ABOVE_GATES = 1 << 40
"""Added to the sequence number of an ordinary node that is as small as a gate's, which keeps their order."""

LeafGradient = torch.Tensor | None


def check_roots(roots: Sequence[torch.Tensor]) -> None:
    """Raises AutogradError, saying which one and why, unless all roots are scalars that require grad."""
    if isinstance(roots, torch.Tensor) or not roots:
        missing = "No tensors provided for gradient computation: " if not isinstance(roots, torch.Tensor) else ""
        raise AutogradError(f"{missing}roots is {roots!r}; give a list of scalar tensors, [loss] for one")
    for index, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise AutogradError(f"roots[{index}] is {root!r}, which is not a tensor")
        if not root.requires_grad:
            raise AutogradError(
                f"requires_grad not set on roots[{index}]: nothing that it was computed from has it, "
                "or it was computed under torch.no_grad()"
            )
        if root.numel() != 1:
            raise AutogradError(
                f"roots[{index}] has shape {tuple(root.shape)} and is not a scalar, all roots need to be scalar"
            )


@final
class Engine:
    """Runs this worker's backward passes, and its parts of other workers' passes."""

    def __init__(self, agent: RpcAgent, contexts: Contexts, anomaly: AnomalyScopes) -> None:
        """Makes an engine.

        Args:
            agent: this worker's.
            contexts: those that this worker has a part in.
            anomaly: the anomaly mode of this process.
        """
        self._agent = agent
        self._contexts = contexts
        self._anomaly = anomaly
        self._replicas = Replicas()
        self._pass_numbers = itertools.count(1)
        self.one_root_at_a_time = False
        """Run all graphs as those with nodes on several devices are; for tests on the CPU."""

    def backward(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        *,
        retain_graph: bool,
        mode: Mode = "smart",
        timeout: float = 0.0,
    ) -> None:
        """Runs a pass from roots on this worker. Returns when it has ended on all workers.

        Raises:
            Exception: the first error on any worker.
        """
        graph = Graph(map(start_node, roots))
        if mode == "fast":
            sends = all_sends(self._agent, context)
        else:
            sends = complete_closure(self._agent, context, graph.closure())
        message_ids = by_worker(sends)
        mine = message_ids.pop(self._agent.info.id, [])
        pass_id = (self._agent.info.id, next(self._pass_numbers))

        def request(message_ids: list[int]) -> PassRequest:
            return PassRequest(context.id, pass_id, message_ids, retain_graph, timeout, AnomalyMode.current())

        requests = {worker: request(of_worker) for worker, of_worker in message_ids.items()}
        coordinator = PassCoordinator(self._agent, context, pass_id, requests)
        coordinator.start(soon={node.sender for node in graph.receives})
        try:
            self._run_part(context, roots, graph, request(mine), coordinator)
        except Exception as error:
            coordinator.fail(error)
        coordinator.wait()

    # Handlers of messages.

    def serve_part(self, message: Incoming) -> MessageGradients | None:
        """Runs this worker's part of another worker's pass: the handler of BACKWARD.

        Returns:
            Gradients for that worker, if the last ones are.
        """
        request: PassRequest
        request, first = message.value
        context = self._contexts.get(request.context_id)
        if first is not None:
            message_id, compressed = first
            context.passes.set_gradients(request.pass_id, message_id, decompress(compressed))
        sender = AnsweringSender(self._agent, context.id, request.pass_id)
        with self._anomaly.scope(request.anomaly):
            self._run_part(context, [], Graph(), request, sender)
        return sender.take()

    def serve_gradients(self, message: Incoming) -> None:
        """Passes received gradients to the gate of their message: the handler of GRADIENTS."""
        context_id, pass_id, message_id, compressed = message.value
        if (context := self._contexts.find(context_id)) is not None:
            context.passes.set_gradients(pass_id, message_id, decompress(compressed))

    def serve_closure(self, message: Incoming) -> Closure:
        """Returns the closure of sends of this worker: the handler of CLOSURE."""
        context_id, message_ids = message.value
        return self._contexts.get(context_id).closure_of_sends(message_ids)

    def serve_sends(self, message: Incoming) -> tuple[list[int], list[int]]:
        """Returns the sends of this worker, and the workers it has reached: the handler of SENDS."""
        context = self._contexts.find(message.value)
        return context.sends() if context is not None else ([], [])

    # This worker's part.

    def _run_part(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        graph: Graph,
        request: PassRequest,
        sender: GradientSender,
    ) -> None:
        """Runs this worker's part of a pass and adds the gradients of leaves to the context.

        Args:
            context: the context of the pass.
            roots: the losses that are on this worker.
            graph: what gets a gradient if `roots` do; is extended by what the gates add.
            request: the pass, and the gates that take part.
            sender: sends gradients to other workers.
        """
        message_ids = sorted(request.message_ids, reverse=True)  # the order in which torch's engine runs gates
        gates = [context.gate(message_id) for message_id in message_ids]
        graph.extend(gate.grad_fn for gate in gates)
        replicated = self._replicas.modules_of(graph.leaves)
        _number_nodes(graph, gates, message_ids, context.message_count)

        outputs = [*roots, *gates]
        graphs = None
        if self.one_root_at_a_time or _has_several_devices(graph):
            graphs = [Graph([start_node(output)]) for output in outputs]
        partial = None if graphs is None else _partial_gradients(graphs)
        awaited = context.destinations(message_ids)
        part = PassPart(awaited, len(graph.receives), request.timeout, sender, partial)
        running = context.passes.begin(request.pass_id, part)
        with inside(context):
            try:
                if graphs is None:
                    gradients = _grad(outputs, graph.leaves, context.dummy, retain_graph=request.retain_graph)
                else:
                    sums = _grad_one_by_one(outputs, graphs, context.dummy, retain_graph=request.retain_graph)
                    gradients = tuple(sums.pop(node) for node in graph.leaves)
            finally:
                context.passes.end(running)
            nodes = graph.leaves
            if replicated:
                sender.flush()  # averaging waits for other replicas
            for module in replicated:
                nodes, gradients = self._average(context, module, nodes, gradients)
            context.gradients.accumulate(nodes, gradients, before_hook=sender.flush)

    def _average(
        self,
        context: Context,
        module: DistributedDataParallel,
        nodes: Sequence[Any],
        gradients: tuple[LeafGradient, ...],
    ) -> tuple[list[Any], tuple[LeafGradient, ...]]:
        """Averages the gradients of a replicated module among its replicas, into the context.

        Args:
            context: the context of the pass.
            module: the module.
            nodes: accumulation nodes of leaves.
            gradients: one for each.

        Returns:
            The nodes of the other leaves, and their gradients.
        """
        parameters = list(module.parameters())
        replicated = set(parameters)
        found = list(zip(nodes, gradients, strict=True))
        captured = {node.variable: gradient for node, gradient in found if node.variable in replicated}
        try:
            with self._agent.blocking():
                context.gradients.change(parameters, lambda so_far: average(module, captured, so_far))
        except Exception as error:
            error.add_note(
                f"while DistributedDataParallel averaged the gradients of {type(module.module).__name__} among "
                "replicas: a replica whose own pass has failed does not take part"
            )
            raise
        others = [(node, gradient) for node, gradient in found if node.variable not in captured]
        return [node for node, _ in others], tuple(gradient for _, gradient in others)


def _number_nodes(graph: Graph, gates: Sequence[torch.Tensor], message_ids: Sequence[int], limit: int) -> None:
    """Gives the gates their message ids, all below `limit`, as sequence numbers, and other nodes larger ones."""
    for node in graph.nodes:
        if (number := node._sequence_nr()) < limit:
            node._set_sequence_nr(number + ABOVE_GATES)
    for gate, message_id in zip(gates, message_ids, strict=True):
        gate.grad_fn._set_sequence_nr(message_id)  # type: ignore[union-attr]


def _has_several_devices(graph: Graph) -> bool:
    """Returns whether a graph has nodes on other devices than the CPU, on which gates always are."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return any(meta.device.type != "cpu" for node in graph.nodes for meta in node._input_metadata if meta.device)


def _partial_gradients(graphs: Sequence[Graph]) -> PartialGradients:
    """Returns what sums up the gradients of the messages that several of the graphs lead to."""
    return PartialGradients(Counter((node.sender, node.message_id) for graph in graphs for node in graph.receives))


def _grad(
    outputs: Sequence[torch.Tensor], leaves: Sequence[Any], dummy: torch.Tensor, *, retain_graph: bool
) -> tuple[LeafGradient, ...]:
    """Runs a graph from `outputs`, all scalars; returns a gradient for each accumulation node in `leaves`."""
    edges: list[Any] = [torch.autograd.graph.GradientEdge(node, 0) for node in leaves]
    # Gates are scalars too, and ignore the gradient that they get. All RecvRpc nodes lead to the dummy, without
    # which the engine would not run them.
    return torch.autograd.grad(outputs, [*edges, dummy], retain_graph=retain_graph, allow_unused=True)[:-1]


def _grad_one_by_one(
    outputs: Sequence[torch.Tensor], graphs: Sequence[Graph], dummy: torch.Tensor, *, retain_graph: bool
) -> dict[Any, LeafGradient]:
    """Runs a graph from one output after another; returns the sum of the gradients of each accumulation node."""
    sums: dict[Any, LeafGradient] = {}
    for index, (output, graph) in enumerate(zip(outputs, graphs, strict=True)):
        is_last = index == len(outputs) - 1
        found = _grad([output], graph.leaves, dummy, retain_graph=retain_graph or not is_last)
        for node, gradient in zip(graph.leaves, found, strict=True):
            sums[node] = total(sums.get(node), gradient)
    return sums
