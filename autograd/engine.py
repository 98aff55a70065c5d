"""Backward passes across workers, on PyTorch's own engine.

A worker's part of a pass is one call of `torch.autograd.grad` whose roots are the loss, where it is, and the
gates of the messages that take part. Since gates are roots, the engine's own counts make every node wait for
all that it depends on and run once.

A gate blocks the engine, so it must only be run when nothing else is ready, and the latest first: what a
send's gradient depends on happened after it, so this order cannot deadlock. The engine runs ready nodes by
descending sequence number. Gates therefore get their message ids as numbers, and every other node a larger
one.

That takes one thread, which runs the CPU's nodes and waits. In a graph with nodes on other devices, whose threads
make CPU nodes ready for the waiting one, a gate could wait while what it waits for cannot go on. There one root
after another is run: nodes that several roots lead to run several times, and what they give is added up.
"""

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import AutogradError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import Incoming, MessageType, Request
from ..rpc.execution.futures import error_of
from .anomaly import Anomaly, AnomalyScopes
from .closure import Closure, Message, start_node, walk
from .compression import decompress
from .context import Context, PassId, inside
from .contexts import Contexts
from .partial import PartialGradients, total
from .replicas import average, replicated_modules

__all__ = ["Engine", "Mode", "Part", "check_roots"]

Mode = Literal["smart", "fast"]

ABOVE_GATES = 1 << 40
"""Added to the sequence number of an ordinary node that is as small as a gate's; order among nodes stays."""

ANSWER_SECONDS = 10.0
"""How much longer than a pass's timeout its caller waits for a worker to say what it waits for."""


@dataclass(frozen=True, slots=True)
class Part:
    """A worker's part of a pass: the body of BACKWARD."""

    context_id: int
    pass_id: PassId
    message_ids: list[int]
    retain_graph: bool
    timeout: float
    anomaly: Anomaly


def check_roots(roots: Sequence[torch.Tensor]) -> None:
    """Raises AutogradError, saying which and why, unless all roots are scalars that require grad."""
    if isinstance(roots, torch.Tensor) or not roots:
        missing = "No tensors provided for gradient computation: " if not isinstance(roots, torch.Tensor) else ""
        raise AutogradError(f"{missing}roots is {roots!r}; give a list of scalar tensors, [loss] for one")
    for index, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise AutogradError(f"roots[{index}] is {root!r}, which is no tensor")
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
    """Runs this worker's backward passes, and its part of others'."""

    def __init__(self, agent: RpcAgent, contexts: Contexts, anomaly: AnomalyScopes) -> None:
        self._agent = agent
        self._contexts = contexts
        self._anomaly = anomaly
        self._numbers = itertools.count(1)
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
        """Runs a pass from roots on this worker; returns when it is over on all workers.

        Raises:
            Exception: the first error on any worker. All workers have ended the pass then.
        """
        taking_part = (
            self._all_sends(context) if mode == "fast" else self._resolve(context, context.closure(roots))
        )
        by_worker = _by_worker(taking_part)
        mine = by_worker.pop(self._agent.info.id, [])
        running = _Pass(self._agent, context, (self._agent.info.id, next(self._numbers)), list(by_worker))

        def part(message_ids: list[int]) -> Part:
            return Part(context.id, running.id, message_ids, retain_graph, timeout, Anomaly.current())

        for worker, message_ids in by_worker.items():
            running.start(worker, part(message_ids))
        try:
            self._run(context, roots, part(mine))
        except Exception as error:
            running.fail(error)
        running.finish()

    def serve(self, message: Incoming) -> None:
        """This worker's part of another's pass: the handler of BACKWARD."""
        part: Part = message.value
        with self._anomaly.scope(part.anomaly):
            self._run(self._contexts.get(part.context_id), [], part)

    def gradients_arrived(self, message: Incoming) -> None:
        """The handler of GRADIENTS."""
        context_id, pass_id, message_id, gradients = message.value
        if (context := self._contexts.find(context_id)) is not None:
            context.gradients_arrived(pass_id, message_id, decompress(gradients))

    def tell_closure(self, message: Incoming) -> Closure:
        """The closure of sends of this worker: the handler of CLOSURE."""
        context_id, message_ids = message.value
        return self._contexts.get(context_id).closure_of_sends(message_ids)

    def tell_sends(self, message: Incoming) -> tuple[list[int], list[int]]:
        """The sends of this worker, and where they went: the handler of SENDS."""
        context = self._contexts.find(message.value)
        return context.sends() if context is not None else ([], [])

    def _resolve(self, context: Context, closure: Closure) -> set[Message]:
        """All sends of a closure. Asks for what it refers to."""
        sends, wanted, asked = set(closure.sends), set(closure.above), set[Message]()
        while wanted:
            asked |= wanted
            by_worker = _by_worker(wanted)
            answers = [context.closure_of_sends(by_worker.pop(self._agent.info.id, []))]
            requests = {worker: (context.id, message_ids) for worker, message_ids in by_worker.items()}
            answers += self._ask(MessageType.CLOSURE, requests).values()
            sends.update(*(answer.sends for answer in answers))
            wanted = set[Message]().union(*(answer.above for answer in answers)) - asked
        return sends

    def _all_sends(self, context: Context) -> set[Message]:
        """All sends of a context, on all workers that it has reached."""
        me = self._agent.info.id
        mine, reached = context.sends()
        sends = {(me, number) for number in mine}
        wanted, asked = set(reached), {me}
        while wanted := wanted - asked:
            asked |= wanted
            answers = self._ask(MessageType.SENDS, dict.fromkeys(wanted, context.id))
            for worker, (numbers, reached) in answers.items():
                sends.update((worker, number) for number in numbers)
                wanted.update(reached)
        return sends

    def _ask(self, kind: MessageType.ValueType, requests: Mapping[int, object]) -> dict[int, Any]:
        """Asks several workers at once; their answers."""
        futures = {
            worker: self._agent.request(self._agent.worker(worker), Request(kind, value))
            for worker, value in requests.items()
        }
        with self._agent.blocking():
            return {worker: future.wait() for worker, future in futures.items()}

    def _run(self, context: Context, roots: Sequence[torch.Tensor], part: Part) -> None:
        # The latest first, as the engine runs gates.
        message_ids = sorted(part.message_ids, reverse=True)
        gates = [context.gate(message_id) for message_id in message_ids]
        outputs = [*roots, *gates]
        graph = walk([start_node(output) for output in outputs])
        replicated = replicated_modules(graph.leaves)
        count = context.message_count
        for node in graph.nodes:
            if (number := node._sequence_nr()) < count:
                node._set_sequence_nr(number + ABOVE_GATES)
        for gate, message_id in zip(gates, message_ids, strict=True):
            gate.grad_fn._set_sequence_nr(message_id)  # type: ignore[union-attr]
        partial = None
        if self.one_root_at_a_time or _has_several_devices(graph.nodes):
            graphs = [walk([start_node(output)]) for output in outputs]
            partial = PartialGradients(
                Counter((node.sender, node.message_id) for each in graphs for node in each.receives)
            )
        context.begin_pass(part.pass_id, message_ids, part.timeout, partial)
        with inside(context):
            try:
                if partial is None:
                    gradients = _grad(outputs, graph.leaves, context.dummy, retain_graph=part.retain_graph)
                else:
                    sums: dict[Any, torch.Tensor | None] = {}
                    for index, (output, each) in enumerate(zip(outputs, graphs, strict=True)):
                        retain = part.retain_graph or index < len(outputs) - 1
                        found = _grad([output], each.leaves, context.dummy, retain_graph=retain)
                        for node, gradient in zip(each.leaves, found, strict=False):
                            sums[node] = total(sums.get(node), gradient)
                    gradients = tuple(sums.pop(node) for node in graph.leaves)
            finally:
                context.end_pass(part.pass_id)
            nodes = graph.leaves
            for module in replicated:
                nodes, gradients = self._average(context, module, nodes, gradients)
            context.gradients.accumulate(nodes, gradients)

    def _average(
        self,
        context: Context,
        module: DistributedDataParallel,
        nodes: Sequence[Any],
        gradients: tuple[torch.Tensor | None, ...],
    ) -> tuple[list[Any], tuple[torch.Tensor | None, ...]]:
        """Averages what a pass has found for a replicated module. Returns nodes and gradients of other leaves."""
        parameters = list(module.parameters())
        replicated = set(parameters)
        found = list(zip(nodes, gradients, strict=False))
        captured = {node.variable: gradient for node, gradient in found if node.variable in replicated}
        try:
            with self._agent.blocking():
                context.gradients.change(parameters, lambda so_far: average(module, captured, so_far))
        except Exception as error:
            error.add_note(
                f"while DistributedDataParallel averaged the gradients of {type(module.module).__name__} among "
                "replicas: one whose own pass has failed does not take part"
            )
            raise
        others = [(node, gradient) for node, gradient in found if node.variable not in captured]
        return [node for node, _ in others], tuple(gradient for _, gradient in others)


def _grad(
    outputs: Sequence[torch.Tensor], leaves: Sequence[Any], dummy: torch.Tensor, *, retain_graph: bool
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of accumulation nodes, and one more to leave out: of the dummy, so that receives are run."""
    edges: list[Any] = [torch.autograd.graph.GradientEdge(node, 0) for node in leaves]
    # All outputs are scalars, and a gate does not look at its gradient.
    return torch.autograd.grad(outputs, [*edges, dummy], retain_graph=retain_graph, allow_unused=True)


def _by_worker(messages: Iterable[Message]) -> dict[int, list[int]]:
    by_worker: dict[int, list[int]] = defaultdict(list)
    for worker, message_id in messages:
        by_worker[worker].append(message_id)
    return by_worker


@final
class _Pass:
    """A pass that this worker runs, seen from here: who takes part, and what has gone wrong first."""

    def __init__(self, agent: RpcAgent, context: Context, identifier: PassId, workers: list[int]) -> None:
        self.id = identifier
        self._agent = agent
        self._context = context
        self._workers = workers
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._parts: list[torch.futures.Future[Any]] = []

    def start(self, worker: int, part: Part) -> None:
        """Has a worker run its part."""
        timeout = part.timeout and part.timeout + ANSWER_SECONDS
        done = self._agent.request(
            self._agent.worker(worker), Request(MessageType.BACKWARD, part, timeout=timeout)
        )
        self._parts.append(done)
        done.add_done_callback(self._part_done)

    def fail(self, error: Exception) -> None:
        """Ends the pass on all workers, unless it has failed before."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        aborted = AutogradError(f"the backward pass was ended by an error elsewhere: {error}")
        self._context.abort_pass(self.id, aborted)
        for worker in self._workers:
            self._agent.control.send(
                self._agent.worker(worker), "autograd.abort", (self._context.id, self.id, aborted)
            )

    def finish(self) -> None:
        """Waits until all workers are through; raises the first error."""
        with self._agent.blocking():
            for part in self._parts:
                try:
                    part.wait()
                except Exception as error:
                    self.fail(error)
        if self._error is not None:
            raise self._error

    def _part_done(self, part: torch.futures.Future[Any]) -> None:
        if (error := error_of(part)) is not None:
            self.fail(error)


def _has_several_devices(nodes: set[Any]) -> bool:
    """Has a graph nodes on other devices than the CPU? Gates are always on the CPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return any(meta.device.type != "cpu" for node in nodes for meta in node._input_metadata if meta.device)
