"""Backward passes across workers, on PyTorch's own engine.

A worker's part of a pass is one call of `torch.autograd.grad` whose roots are the loss, where it is, and the
gates of the messages that take part. Since gates are roots, the engine's own counts make every node wait for
all that it depends on and run once.

A gate blocks the engine, so it must only be run when nothing else is ready, and the latest first: what a
send's gradient depends on happened after it, so this order cannot deadlock. The engine runs ready nodes by
descending sequence number. Gates therefore get their message ids as numbers, and every other node a larger
one.
"""

import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, final

import torch

from ..errors import AutogradError
from ..rpc.agent import RpcAgent
from ..rpc.futures import error_of
from ..rpc.messages import Incoming, MessageType
from .closure import start_node, walk
from .context import Context, Contexts, PassId

__all__ = ["Engine", "check_roots"]

ABOVE_GATES = 1 << 40
"""Added to the sequence number of an ordinary node that is as small as a gate's; order among nodes stays."""


def check_roots(roots: Sequence[torch.Tensor]) -> None:
    """Raises AutogradError, saying which and why, unless all roots are scalars that require grad."""
    if isinstance(roots, torch.Tensor) or not roots:
        raise AutogradError(f"roots is {roots!r}: give a list of scalar tensors, [loss] for one")
    for index, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise AutogradError(f"roots[{index}] is {root!r}, which is no tensor")
        if not root.requires_grad:
            raise AutogradError(
                f"roots[{index}] does not require grad: nothing that it was computed from does, "
                "or it was computed under torch.no_grad()"
            )
        if root.numel() != 1:
            raise AutogradError(f"roots[{index}] has shape {tuple(root.shape)}: a root is a scalar")


@final
class Engine:
    """Runs this worker's backward passes, and its part of others'."""

    def __init__(self, agent: RpcAgent, contexts: Contexts) -> None:
        self._agent = agent
        self._contexts = contexts
        self._numbers = itertools.count(1)

    def backward(self, context: Context, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Runs a pass from roots on this worker; returns when it is over on all workers.

        Raises:
            Exception: the first error on any worker. All workers have ended the pass then.
        """
        parts: dict[int, list[int]] = defaultdict(list)
        for worker, message_id in context.closure(roots):
            parts[worker].append(message_id)
        mine = parts.pop(self._agent.info.id, [])
        running = _Pass(self._agent, context, (self._agent.info.id, next(self._numbers)), list(parts))
        for worker, message_ids in parts.items():
            running.start(worker, message_ids, retain_graph)
        try:
            self._run(context, running.id, roots, mine, retain_graph)
        except Exception as error:
            running.fail(error)
        running.finish()

    def serve(self, message: Incoming) -> None:
        """This worker's part of another's pass: the handler of BACKWARD."""
        context_id, pass_id, message_ids, retain_graph = message.value
        self._run(self._contexts.get(context_id), pass_id, [], message_ids, retain_graph)

    def gradients_arrived(self, message: Incoming) -> None:
        """The handler of GRADIENTS."""
        context_id, pass_id, message_id, gradients = message.value
        if (context := self._contexts.find(context_id)) is not None:
            context.gradients_arrived(pass_id, message_id, gradients)

    def _run(
        self,
        context: Context,
        pass_id: PassId,
        roots: Sequence[torch.Tensor],
        message_ids: Sequence[int],
        retain_graph: bool,
    ) -> None:
        gates = [context.gate(message_id) for message_id in message_ids]
        outputs = [*roots, *gates]
        graph = walk([start_node(output) for output in outputs])
        _check_devices(graph.nodes)
        count = context.message_count
        for node in graph.nodes:
            if (number := node._sequence_nr()) < count:
                node._set_sequence_nr(number + ABOVE_GATES)
        for gate, message_id in zip(gates, message_ids, strict=True):
            gate.grad_fn._set_sequence_nr(message_id)  # type: ignore[union-attr]
        context.begin_pass(pass_id, message_ids)
        try:
            leaves: list[Any] = [torch.autograd.graph.GradientEdge(node, 0) for node in graph.leaves]
            gradients = torch.autograd.grad(
                outputs,
                [*leaves, context.dummy],  # the dummy, so that receiving nodes are run
                # All outputs are scalars, and a gate does not look at its gradient.
                retain_graph=retain_graph,
                allow_unused=True,
            )
        finally:
            context.end_pass(pass_id)
        context.accumulate([node.variable for node in graph.leaves], gradients[:-1])


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

    def start(self, worker: int, message_ids: list[int], retain_graph: bool) -> None:
        """Has a worker run its part."""
        value = (self._context.id, self.id, message_ids, retain_graph)
        part = self._agent.request(self._agent.worker(worker), MessageType.BACKWARD, value, timeout=0)
        self._parts.append(part)
        part.add_done_callback(self._part_done)

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


def _check_devices(nodes: set[Any]) -> None:
    """A waiting gate could strand CPU nodes that another device's thread makes ready for this one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    devices = {meta.device.type for node in nodes for meta in node._input_metadata if meta.device is not None}
    if not devices <= {"cpu"}:
        raise AutogradError(
            f"this worker's graph has nodes on {', '.join(sorted(devices))}; "
            "distributed backward passes run on CPU graphs only so far"
        )
