"""Backward passes across workers, on PyTorch's own engine.

A pass over several workers has a part on each of them (part.py). The worker that calls `backward` finds out which
workers take part, has them run their parts, and runs its own.
"""

import itertools
import reprlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, final

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import AutogradError, LimitReachedError, PolicyError, UnknownContextError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import Incoming, UnwantedMessageError
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.execution.futures import text_of, without_frames
from . import replicas
from .anomaly import AnomalyMode, AnomalyScopes
from .backward_pass import PassPart
from .closure import Closure
from .compression import decompress
from .context import Context, Exchanged
from .contexts import Contexts
from .coordinator import PassCoordinator, PassRequest, all_sends, by_worker, complete_closure
from .gradient_sender import AnsweringSender, GradientSender, MessageGradients, PassId
from .graph import Graph, start_node
from .part import LeafGradient, Part

__all__ = ["Engine", "Mode", "check_roots"]

Mode = Literal["smart", "fast"]

MAX_RUNNING = 256
"""Passes that one worker has another one run at a time: the gates of each wait on a thread, for which there is no
other way in torch's engine."""


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
        self._agent = agent
        self._contexts = contexts
        self._anomaly = anomaly
        self._pass_numbers = itertools.count(1)
        self._coordinators: dict[PassId, PassCoordinator] = {}
        """Those of the passes that this worker has begun and that have not ended."""
        self._lock = threading.Lock()
        self._running: Counter[int] = Counter()
        """By worker, the passes that it has this worker run. Guarded by the lock."""
        self.one_root_at_a_time = False
        """Run all graphs as those with nodes on several devices are; for tests on the CPU."""
        agent.control.on("autograd.abort", self._on_abort)
        agent.control.on("autograd.fail", self._on_fail)

    def backward(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        *,
        retain_graph: bool,
        mode: Mode = "smart",
        timeout: float = 0.0,
    ) -> None:
        """Runs a pass from roots on this worker until it has ended on all. Raises the first error on any."""
        graph = Graph([start_node(root) for root in roots])
        if mode == "fast":
            sends = all_sends(self._agent, context)
        else:
            closure = graph.closure()
            sends = complete_closure(self._agent, context, closure) if closure.omitted else closure.sends
        message_ids = by_worker(sends)
        part = Part(
            context,
            roots,
            graph,
            message_ids.pop(self._agent.info.wire_id, []),
            one_root_at_a_time=self.one_root_at_a_time,
        )
        pass_id = (self._agent.info.wire_id, next(self._pass_numbers))
        anomaly = AnomalyMode.current() if torch.is_anomaly_enabled() else None
        requests = {}
        for worker, of_worker in message_ids.items():
            requests[worker] = PassRequest(context.id, pass_id, of_worker, retain_graph, timeout, anomaly)
        coordinator = PassCoordinator(
            self._agent,
            context,
            pass_id,
            requests,
            one_answer=len(message_ids) == 1 and not part.enters_gates and not timeout,
        )
        self._coordinators[pass_id] = coordinator
        try:
            coordinator.start(graph.receives)
            try:
                self._run(context, part, pass_id, coordinator, retain_graph, timeout, coordinator.collect)
            except Exception as error:
                coordinator.fail(error)
            coordinator.wait()
        except BaseException as error:  # such as Ctrl-C: the other workers must not wait for this one's gradients
            reason = f"{type(error).__name__} on worker {self._agent.info.name!r}"
            coordinator.fail(error if isinstance(error, Exception) else AutogradError(reason))
            raise
        finally:
            del self._coordinators[pass_id]

    def _begin_for(self, caller: WorkerInfo) -> None:
        """Counts what a worker has this one run, which holds a thread until others answer; `_end_for` follows."""
        with self._lock:
            if self._running[caller.wire_id] >= MAX_RUNNING:
                raise LimitReachedError(
                    f"worker {caller.name!r} has {MAX_RUNNING} backward passes running here",
                    f"MAX_RUNNING={MAX_RUNNING}",
                )
            self._running[caller.wire_id] += 1

    def _end_for(self, caller: WorkerInfo) -> None:
        """Counts the end of what a worker has had this one run."""
        with self._lock:
            self._running[caller.wire_id] -= 1

    # Handlers of messages.

    def serve_part(self, message: Incoming) -> MessageGradients | None:
        """Runs this worker's part of another worker's pass: the handler of BACKWARD.

        Returns gradients for that worker, if the last ones are.
        """
        request, first = message.value
        context_id, pass_id, message_ids, retain_graph, timeout, anomaly = request
        caller, _ = pass_id
        if caller != message.source.wire_id:
            raise AutogradError(f"{message.source.name!r} asks for a part of a pass of worker {caller}")
        message.tensors.clear()  # whose memory a gradient may take over
        context = self._contexts.get(context_id)
        if first is not None:
            message_id, compressed = first
            context.set_gradients(caller, pass_id, message_id, decompress(compressed))
        sender = AnsweringSender(self._agent, context.id, pass_id, partial(context.passes.note_receiver, pass_id))
        part = Part(
            context,
            [],
            Graph(),
            message_ids,
            one_root_at_a_time=self.one_root_at_a_time,
        )
        self._begin_for(message.source)
        try:
            if anomaly is None:
                self._run(context, part, pass_id, sender, retain_graph, timeout)
            else:
                with self._anomaly.scope(anomaly):
                    self._run(context, part, pass_id, sender, retain_graph, timeout)
        finally:
            self._end_for(message.source)
        return sender.take()

    def serve_gradients(self, message: Incoming) -> None:
        """Passes received gradients to the gate of their message: the handler of GRADIENTS."""
        header, compressed = message.envelope.gradients, message.value
        message.tensors.clear()  # as in `serve_part`
        if (context := self._contexts.find(header.context_id)) is not None:
            pass_id = (header.caller, header.pass_number)
            context.set_gradients(message.source.wire_id, pass_id, header.message_id, decompress(compressed))

    def check_gradients(self, message: Incoming) -> None:
        """Raises an error unless gradients come from the receiver of their message."""
        header = message.envelope.gradients
        if (context := self._contexts.find(header.context_id)) is None:
            raise UnwantedMessageError(f"autograd context {header.context_id} has ended")
        context.check_receiver(message.source.wire_id, header.message_id)
        if not self._agent.is_member(header.caller):
            raise AutogradError(f"there is no worker {header.caller} to begin a backward pass")

    def fail_gradients(self, message: Incoming, error: Exception) -> None:
        """Fails the pass of gradients that cannot be decoded: here, and by its caller on all workers.

        Its gate would wait for them until the timeout.
        """
        header = message.envelope.gradients
        if (context := self._contexts.find(header.context_id)) is not None:
            context.check_receiver(message.source.wire_id, header.message_id)
            if not isinstance(error, PolicyError):  # whose text says all this
                reader, sender = self._agent.info.name, message.source.name
                problem = f"worker {reader!r} cannot read the gradients that worker {sender!r} has sent"
                error = AutogradError(f"{problem}: {type(error).__name__}: {text_of(error)}")
            context.passes.abort((header.caller, header.pass_number), without_frames(error))

    def serve_closure(self, message: Incoming) -> Closure:
        """Returns the closure of sends of this worker: the handler of CLOSURE."""
        context_id, message_ids = message.value
        return self._contexts.get(context_id).closure_of_sends(message_ids)

    def serve_sends(self, message: Incoming) -> Exchanged:
        """Returns what this worker has sent and received in a context: the handler of SENDS."""
        context = self._contexts.find(message.value)
        if context is not None:
            return context.exchanged()
        if self._contexts.has_ended(message.value):  # else no message of it has arrived
            raise UnknownContextError(message.value, self._agent.info.name)
        return {}, [], []

    def serve_rref_backward(self, message: Incoming) -> None:
        """Runs a backward pass from the value of an RRef that this worker owns: the handler of RREF_BACKWARD."""
        rref, context_id, retain_graph = message.value
        root = rref._value_here()
        if not isinstance(root, torch.Tensor):
            raise AutogradError(
                f"RRef should contain a tensor for .backward(), but {rref} has a {type(root).__name__}"
            )
        context = self._contexts.get(context_id)
        check_roots([root])
        self._begin_for(message.source)
        try:
            with self._agent.blocking():
                self.backward(context, [root], retain_graph=retain_graph)
        finally:
            self._end_for(message.source)

    def _on_abort(self, sender: WorkerInfo, payload: Any) -> None:
        """Ends a pass that has failed on another worker."""
        context_id, pass_id, error = payload
        caller, number = pass_id
        if caller != sender.wire_id or type(number) is not int or not isinstance(error, Exception):
            raise AutogradError(f"{sender.name!r} cannot abort a pass of worker {reprlib.repr(caller)}")
        if (context := self._contexts.find(context_id)) is not None:
            context.passes.abort(pass_id, error)

    def _on_fail(self, sender: WorkerInfo, payload: Any) -> None:
        """Fails a pass that this worker has begun, as one that takes part asks for."""
        _, (caller, number), error = payload
        if caller != self._agent.info.wire_id or type(number) is not int or not isinstance(error, Exception):
            raise AutogradError(f"{sender.name!r} cannot fail a pass of worker {reprlib.repr(caller)}")
        if (coordinator := self._coordinators.get((caller, number))) is not None:
            coordinator.fail_for(sender.wire_id, error)

    # This worker's part.

    def _run(
        self,
        context: Context,
        part: Part,
        pass_id: PassId,
        sender: GradientSender,
        retain_graph: bool,
        timeout: float,
        collect: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs this worker's part of a pass and adds the gradients of leaves to the context; see `Part.run`."""
        graph = part.graph
        replicated = replicas.replicated_modules(graph.leaves) if replicas.may_exist else ()
        running = context.passes.begin(
            pass_id, PassPart(part.awaited, len(graph.receives), timeout, sender, part.partial)
        )
        before = Context.current()
        Context.set_current(context)  # of the hooks
        try:
            nodes, gradients = part.run(running, retain_graph=retain_graph, collect=collect)
            if replicated:
                sender.flush()  # averaging waits for other replicas
            for module in replicated:
                nodes, gradients = self._average(context, module, nodes, gradients)
            context.gradients.accumulate(nodes, gradients, before_hook=sender.flush)
        finally:
            # Not before: hooks would overwrite what another pass of the context has added meanwhile.
            context.passes.end(running)
            Context.set_current(before)

    def _average(
        self,
        context: Context,
        module: DistributedDataParallel,
        nodes: Sequence[Any],
        gradients: Sequence[LeafGradient],
    ) -> tuple[list[Any], list[LeafGradient]]:
        """Averages the gradients of a replicated module among its replicas, into the context.

        Returns the accumulation nodes of the other leaves, and their gradients.
        """
        parameters = list(module.parameters())
        replicated = set(parameters)
        found = list(zip(nodes, gradients, strict=True))
        captured = {node.variable: gradient for node, gradient in found if node.variable in replicated}
        try:
            with self._agent.blocking():
                context.gradients.change(parameters, lambda so_far: replicas.average(module, captured, so_far))
        except Exception as error:
            error.add_note(
                f"while DistributedDataParallel averaged the gradients of {type(module.module).__name__} among "
                "replicas: a replica whose own pass has failed does not take part"
            )
            raise
        others = [(node, gradient) for node, gradient in found if node.variable not in captured]
        return [node for node, _ in others], [gradient for _, gradient in others]
