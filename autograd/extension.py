"""How autograd takes part in messages."""

from collections.abc import Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch

from ..errors import AutogradError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.messages import Handler, Incoming, MessageType, Outgoing
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.contracts.worker_end import WorkerEnd
from .anomaly import Anomaly, AnomalyScopes
from .closure import Closure, closure_from_proto, closure_to_proto, union
from .context import Context, current_context, inside
from .contexts import Contexts
from .engine import Engine, check_roots

__all__ = ["Autograd"]


@final
class Autograd(Extension):
    """The contexts and passes of one agent."""

    control_kinds = ("autograd.abort", "autograd.release")

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        self.contexts = Contexts(agent, self._tell_released)
        self._anomaly = AnomalyScopes()
        self.engine = Engine(agent, self.contexts, self._anomaly)
        agent.control.on("autograd.release", self._on_release)
        agent.control.on("autograd.abort", self._on_abort)

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Backward passes and their gradients."""
        return {
            MessageType.BACKWARD: Handler(self.engine.serve, description="the part of a backward pass on worker"),
            MessageType.GRADIENTS: Handler(self.engine.gradients_arrived),
            MessageType.CLOSURE: Handler(
                self.engine.tell_closure, description="the preparation of a backward pass on worker"
            ),
            MessageType.SENDS: Handler(
                self.engine.tell_sends, description="the preparation of a backward pass on worker"
            ),
            MessageType.RREF_BACKWARD: Handler(
                self._backward_from_rref,
                user_values=True,
                description="RRef.backward() from a value on worker",
            ),
        }

    def on_send(self, message: Outgoing) -> None:
        """Puts a gate over the tensors of a message that belongs to a context."""
        context = self._context_of(message)
        if context is None:
            return
        differentiable = [
            index
            for index, tensor in enumerate(message.tensors)
            if torch.is_grad_enabled() and tensor.requires_grad and index not in message.leaves
        ]
        if (message.reply_to is not None and not differentiable) or not context.reach(message.destination.id):
            return
        if differentiable:
            tensors = [message.tensors[index] for index in differentiable]
            sent = context.add_send(tensors, message.destination.id)
            if sent is None:
                return
            message.envelope.autograd.message_id = sent[0]
            message.envelope.autograd.differentiable.extend(differentiable)
            if sent[1] is None:
                message.envelope.autograd.closure_omitted = True
            else:
                message.envelope.autograd.closure.extend(closure_to_proto(sent[1]))
        message.envelope.autograd.context_id = context.id
        if message.reply_to is None and (anomaly := Anomaly.current()).enabled:
            message.envelope.autograd.anomaly = True
            message.envelope.autograd.anomaly_check_nan = anomaly.check_nan

    def on_send_aborted(self, message: Outgoing) -> None:
        """The gate is not needed."""
        header = message.envelope.autograd
        if header.differentiable and (context := self.contexts.find(header.context_id)) is not None:
            context.drop_send(header.message_id)

    def on_receive(self, message: Incoming) -> None:
        """Makes the tensors of a message part of this worker's graph."""
        if not message.envelope.HasField("autograd"):
            return
        header = message.envelope.autograd
        context = self.contexts.join(header.context_id)
        if context is None:
            return
        message.state[Autograd] = context
        if not header.differentiable:
            return
        indices = list(header.differentiable)
        if not all(index < len(message.tensors) and message.tensors[index].requires_grad for index in indices):
            raise ValueError("malformed autograd header: it names tensors that take no gradient")
        closure = closure_from_proto(header.closure)
        if header.closure_omitted:
            closure = union([closure, Closure(above=frozenset({(message.source.id, header.message_id)}))])
        received = context.add_receive(
            message.source.id,
            header.message_id,
            closure,
            [message.tensors[index].detach() for index in indices],
        )
        for index, tensor in zip(indices, received, strict=True):
            message.tensors[index] = tensor

    def on_decode_error(self, message: Incoming, error: Exception) -> None:
        """Gradients that cannot be read never come, so no pass may wait for them."""
        if message.envelope.type == MessageType.GRADIENTS:
            for context in self.contexts.all():
                context.on_worker_lost(message.source.id, error)

    def scope(self, message: Incoming) -> AbstractContextManager[None]:
        """What a remote function calls belongs to its caller's context."""
        context = message.state.get(Autograd)
        if context is None:
            return nullcontext()
        header = message.envelope.autograd
        return self._inside(context, Anomaly(header.anomaly, header.anomaly_check_nan))

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Ends its passes and contexts."""
        self.contexts.on_worker_lost(worker.id, end.as_error(worker.name))

    def live_objects(self) -> Mapping[str, int]:
        """Contexts that this worker has a part in."""
        return {
            "num_autograd_contexts": len(self.contexts),
            "num_current_backward_passes": self.contexts.running_count(),
        }

    def close(self) -> None:
        """Forgets all contexts."""
        self.contexts.clear()

    @contextmanager
    def _inside(self, context: Context, anomaly: Anomaly) -> Iterator[None]:
        with inside(context), self._anomaly.scope(anomaly):
            yield

    def _backward_from_rref(self, message: Incoming) -> None:
        rref, context_id, retain_graph = message.value
        root = rref.local_value()
        if not isinstance(root, torch.Tensor):
            raise AutogradError(
                f"RRef should contain a tensor for .backward(), but {rref} has a {type(root).__name__}"
            )
        context = self.contexts.get(context_id)
        check_roots([root])
        with self.agent.blocking():
            self.engine.backward(context, [root], retain_graph=retain_graph)

    def _context_of(self, message: Outgoing) -> Context | None:
        if message.reply_to is not None:
            return message.reply_to.state.get(Autograd)
        context = current_context()
        return context if context is not None and context.agent is self.agent else None

    def _tell_released(self, worker: int, context_id: int, told: Set[int]) -> None:
        self.agent.control.send(self.agent.worker(worker), "autograd.release", (context_id, told))

    def _on_release(self, sender: WorkerInfo, payload: Any) -> None:
        context_id, told = payload
        self.contexts.release(context_id, sender=sender.id, told=told)

    def _on_abort(self, sender: WorkerInfo, payload: Any) -> None:  # noqa: ARG002
        context_id, pass_id, error = payload
        if (context := self.contexts.find(context_id)) is not None:
            context.abort_pass(pass_id, error)
