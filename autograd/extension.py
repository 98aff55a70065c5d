"""Connects distributed autograd to an agent: hooks on its messages, and handlers of autograd's requests.

A message with tensors that require grad is a *send* on the sending worker, and a *receive* on the receiving one.
The output of the send's autograd node is its *gate*, at which a backward pass enters the sender's graph. The
*closure* of a send is the set of all sends that receive a gradient if the send does (closure.py).
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, final

import torch

from ..errors import AutogradError, WorkerSuspectError
from ..proto.v1 import agent_pb2
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.messages import Handler, Incoming, MessageType, Outgoing
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.contracts.worker_end import WorkerEnd
from .anomaly import AnomalyMode, AnomalyScopes
from .closure import NOTHING, Closure, closure_from_proto, closure_to_proto, union
from .context import Context, inside
from .contexts import Contexts
from .ended import OpenContexts
from .engine import Engine, check_roots
from .gradient_sender import GRADIENTS

__all__ = ["Autograd"]


@final
class Autograd(Extension):
    """The autograd extension of one agent; owns its contexts and the engine that runs backward passes."""

    control_kinds = (
        "autograd.abort",
        "autograd.ask_open",
        "autograd.fail",
        "autograd.joined",
        "autograd.open",
        "autograd.release",
    )

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        self.contexts = Contexts(agent, self._send_release, self._send_joined, self._ask_for_open)
        self._anomaly = AnomalyScopes()
        self.engine = Engine(agent, self.contexts, self._anomaly)
        agent.control.on("autograd.release", self._on_release)
        agent.control.on("autograd.joined", self._on_joined)
        agent.control.on("autograd.ask_open", self._on_ask_open)
        agent.control.on("autograd.open", self._on_open)
        agent.control.on("autograd.abort", self._on_abort)
        agent.control.on("autograd.fail", self._on_fail)

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Returns the handlers of backward passes, of gradients, and of queries for sends and closures.

        RREF_BACKWARD is sent by `gradwire.rref` (`RRef.backward`); the handler is here because it runs a backward
        pass.
        """
        return {
            MessageType.BACKWARD: Handler(self.engine.serve_part, description="a backward pass on worker"),
            MessageType.GRADIENTS: Handler(
                self.engine.serve_gradients,
                check=self.engine.check_gradients,
                on_error=self.engine.fail_gradients,
            ),
            MessageType.CLOSURE: Handler(
                self.engine.serve_closure, description="the preparation of a backward pass on worker"
            ),
            MessageType.SENDS: Handler(
                self.engine.serve_sends, description="the preparation of a backward pass on worker"
            ),
            MessageType.RREF_BACKWARD: Handler(
                self._backward_from_rref,
                user_values=True,
                description="RRef.backward() from a value on worker",
            ),
        }

    adds_if = staticmethod(Context.current)
    header = "autograd"

    def on_send(self, message: Outgoing) -> None:
        """Adds the autograd header to a message of a context, and records its differentiable tensors as a send.

        Raises:
            AutogradError: the context has ended, because its creator is lost.
        """
        request = message.reply_to
        context: Context | None = Context.current() if request is None else request.state.get(Autograd)
        if context is None or context.agent is not self.agent:
            return
        indices: list[int] = []
        tensors: list[torch.Tensor] = []
        if message.tensors and torch.is_grad_enabled():  # else no gradients flow back
            for index, tensor in enumerate(message.tensors):
                # The gradients of tensors that arrive as leaves stay at the receiver.
                if tensor.requires_grad and index not in message.leaves:
                    indices.append(index)
                    tensors.append(tensor)
        if request is not None and not indices:
            return  # an answer without a send needs no header: its receiver is in the context already
        header = message.envelope.autograd
        if indices:
            new_send = context.add_send(tensors, message.destination.wire_id)
            if new_send is None:
                self.contexts.check_creator(context.id, context.creator)
                return  # the context has ended
            header.message_id, closure = new_send
            header.differentiable.extend(indices)
            if closure is None:
                header.closure_omitted = True
            elif closure is not NOTHING:
                header.closure.extend(closure_to_proto(closure))
        elif not context.reach(message.destination.wire_id):
            self.contexts.check_creator(context.id, context.creator)
            return  # the context has ended
        header.context_id = context.id
        if request is None and torch.is_anomaly_enabled():
            header.anomaly = True
            header.anomaly_check_nan = AnomalyMode.current().check_nan

    def may_repeat(self) -> bool:
        """Returns False inside a context, because a thread that sends the request again is not inside it."""
        return Context.current() is None

    def on_send_aborted(self, message: Outgoing) -> None:
        """Undoes `on_send`: drops the gate of a message that was not sent."""
        header = message.envelope.autograd
        if header.differentiable and (context := self.contexts.find(header.context_id)) is not None:
            context.drop_send(header.message_id)

    def on_receive(self, message: Incoming) -> None:
        """Joins the context of a message, and makes its differentiable tensors outputs of a `RecvRpc` node.

        Raises:
            ValueError: the header names tensors that are missing or do not require grad.
        """
        if not message.envelope.HasField("autograd"):
            return
        header = message.envelope.autograd
        context = self.contexts.join(header.context_id, message.source.wire_id)
        if context is None:
            return
        message.state[Autograd] = context
        indices, tensors = header.differentiable, message.tensors
        if not indices:
            return
        sent = []
        for index in indices:
            if index >= len(tensors) or not tensors[index].requires_grad:
                raise ValueError(
                    "malformed autograd header: it names tensors that are missing or do not require grad"
                )
            sent.append(tensors[index].requires_grad_(False))  # noqa: FBT003
        closure = NOTHING
        if header.closure or header.closure_omitted:
            closure = _closure_of(header, message.source.wire_id)
        received = context.add_receive(message.source.wire_id, header.message_id, closure, sent)
        for index, tensor in zip(indices, received, strict=True):
            tensors[index] = tensor

    def on_decode_error(self, message: Incoming, error: Exception) -> None:
        """Fails the pass whose gradients cannot be decoded."""
        if message.envelope.type == GRADIENTS:
            self.engine.fail_gradients(message, error)

    def scope(self, message: Incoming) -> AbstractContextManager[None] | None:
        """Returns a context manager that sets the caller's autograd context and anomaly mode during a call."""
        context = message.state.get(Autograd)
        if context is None:
            return None
        header = message.envelope.autograd
        if not header.anomaly:
            return inside(context)
        return self._inside(context, AnomalyMode(enabled=True, check_nan=header.anomaly_check_nan), message)

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Aborts the passes that need a lost worker, and ends the contexts that the lost worker created."""
        self.contexts.on_worker_lost(worker.wire_id, end, end.as_error(worker.name))

    def on_worker_suspect(self, worker: WorkerInfo, reason: str) -> None:
        """Aborts the passes that need a suspect worker.

        The callers of other passes are told to fail those in which this worker has sent it gradients: they may be
        lost.
        """
        error = WorkerSuspectError(worker.name, reason)
        for context_id, (caller, number) in self.contexts.on_worker_suspect(worker.wire_id, error):
            if caller != worker.wire_id:
                problem = f"gradients that worker {self.agent.info.name!r} has sent it may be lost: {reason}"
                lost = WorkerSuspectError(worker.name, problem)
                payload = (context_id, (caller, number), lost)
                self.agent.control.send(self.agent.incarnation(caller), "autograd.fail", payload)

    def live_objects(self) -> Mapping[str, int]:
        """Returns the number of contexts that this worker has a part in, and of those with a running pass."""
        return {
            "num_autograd_contexts": len(self.contexts),
            "num_current_backward_passes": self.contexts.running_count(),
        }

    def close(self) -> None:
        """Ends all contexts on this worker."""
        self.contexts.clear()

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:  # noqa: ARG002
        """In a forked child, forgets all contexts."""
        self.contexts.leave_to_parent()

    @contextmanager
    def _inside(self, context: Context, anomaly: AnomalyMode, message: Incoming) -> Iterator[None]:
        """Context manager that makes an autograd context current, and an anomaly mode until the call has run.

        The mode is that of all threads, and the next call may begin as soon as this one is answered.
        """
        with inside(context), ExitStack() as mode:
            mode.enter_context(self._anomaly.scope(anomaly))
            message.on_ran = mode.close
            yield

    def _backward_from_rref(self, message: Incoming) -> None:
        """Runs a backward pass from the value of an RRef that this worker owns: the handler of RREF_BACKWARD.

        Raises:
            AutogradError: the value is not a tensor, or cannot be the root of a backward pass.
        """
        rref, context_id, retain_graph = message.value
        root = rref._value_here()
        if not isinstance(root, torch.Tensor):
            raise AutogradError(
                f"RRef should contain a tensor for .backward(), but {rref} has a {type(root).__name__}"
            )
        context = self.contexts.get(context_id)
        check_roots([root])
        self.engine.begin_for(message.source)
        try:
            with self.agent.blocking():
                self.engine.backward(context, [root], retain_graph=retain_graph)
        finally:
            self.engine.end_for(message.source)

    def _send_release(self, worker: int, context_id: int, told: Set[int], lost: str) -> None:
        """Tells a worker that a context has ended; the arguments are explained at `Contexts`."""
        self.agent.control.send(
            self.agent.incarnation(worker),
            "autograd.release",
            (context_id, told, lost),
            expected=(AutogradError,),  # none of this worker's messages may have arrived
            urgent=False,
        )

    def _on_release(self, sender: WorkerInfo, payload: Any) -> None:
        """Handles the control message that a context has ended."""
        context_id, told, lost = payload
        if type(context_id) is not int or not isinstance(told, frozenset | set) or type(lost) is not str:
            raise ValueError("malformed message: it ends no context")
        self.contexts.release(context_id, sender=sender.wire_id, told=told, lost=lost)

    def _send_joined(self, creator: int, context_id: int) -> None:
        """Tells the creator of a context that this worker has a part in it."""
        self.agent.control.send(self.agent.incarnation(creator), "autograd.joined", context_id, urgent=False)

    def _on_joined(self, sender: WorkerInfo, payload: Any) -> None:
        """Handles the control message that its sender has a part in a context of this worker."""
        if type(payload) is not int:
            raise ValueError("malformed message: it names no context")
        self.contexts.on_joined(payload, sender.wire_id)

    def _ask_for_open(self, creator: int) -> None:
        """Asks a worker which of its contexts are open."""
        self.agent.control.send(self.agent.incarnation(creator), "autograd.ask_open", None, urgent=False)

    def _on_ask_open(self, sender: WorkerInfo, _payload: Any) -> None:
        """Handles the control message that asks which contexts of this worker are open."""
        opened = self.contexts.opened_here()
        self.agent.control.send(sender, "autograd.open", (opened.below, opened.ids), urgent=False)

    def _on_open(self, sender: WorkerInfo, payload: Any) -> None:
        """Handles the control message that tells which contexts of its sender are open."""
        self.contexts.learn_open(sender.wire_id, OpenContexts.from_payload(payload, sender.wire_id))

    def _on_abort(self, sender: WorkerInfo, payload: Any) -> None:
        """Handles the control message that a pass has failed on another worker."""
        context_id, pass_id, error = payload
        caller, number = pass_id
        if caller != sender.wire_id or type(number) is not int or not isinstance(error, Exception):
            raise AutogradError(f"{sender.name!r} cannot abort a pass of worker {reprlib.repr(caller)}")
        if (context := self.contexts.find(context_id)) is not None:
            context.passes.abort(pass_id, error)

    def _on_fail(self, sender: WorkerInfo, payload: Any) -> None:
        """Handles the control message that a pass of this worker cannot succeed."""
        _, (caller, number), error = payload
        if caller != self.agent.info.wire_id or type(number) is not int or not isinstance(error, Exception):
            raise AutogradError(f"{sender.name!r} cannot fail a pass of worker {reprlib.repr(caller)}")
        self.engine.fail_pass((caller, number), sender.wire_id, error)


def _closure_of(header: agent_pb2.AutogradHeader, sender: int) -> Closure:
    """Returns the closure that a header carries, which does not contain the received send itself.

    An omitted closure is represented by the id of the send, of which it can be requested.
    """
    closure = closure_from_proto(header.closure) if header.closure else NOTHING
    if not header.closure_omitted:
        return closure
    return union([closure, Closure(omitted=frozenset({(sender, header.message_id)}))])
