"""Distributed autograd of one agent: hooks on its messages, handlers of its requests, and functions for programs.

A message with tensors that require grad is a *send* on the sending worker, and a *receive* on the receiving one.
The output of the send's autograd node is its *gate*, at which a backward pass enters the sender's graph. The
*closure* of a send is the set of all sends that receive a gradient if the send does (graph.py).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import final, get_args

import torch

from ..errors import WorkerSuspectError
from ..proto.v1 import agent_pb2
from ..rpc.contracts.agent import RpcAgent, current_agent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.messages import Handler, Incoming, MessageType, Outgoing
from ..rpc.contracts.worker import WorkerEnd, WorkerInfo
from .contexts import Context, Contexts, inside
from .engine import AnomalyScopes, Engine, Mode, check_roots
from .gradient_sender import GRADIENTS
from .graph import NOTHING, Closure, closure_from_proto, closure_to_proto, union

__all__ = ["Autograd", "backward", "context", "get_gradients"]

MODES = get_args(Mode)


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
        self.contexts = Contexts(agent)
        self._anomaly = AnomalyScopes()
        self.engine = Engine(agent, self.contexts, self._anomaly)

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Returns the handlers of backward passes, also of `RRef.backward`, of gradients, and of queries."""
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
                self.engine.serve_rref_backward,
                user_values=True,
                description="RRef.backward() from a value on worker",
            ),
        }

    adds_if = staticmethod(Context.current)
    header = "autograd"

    def on_send(self, message: Outgoing) -> None:
        """Adds the autograd header to a message of a context, and records its differentiable tensors as a send."""
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
            header.anomaly_check_nan = torch.is_anomaly_check_nan_enabled()

    def may_repeat(self) -> bool:
        """Returns False inside a context, because a thread that sends the request again is not inside it."""
        return Context.current() is None

    def on_send_aborted(self, message: Outgoing) -> None:
        """Undoes `on_send`: drops the gate of a message that was not sent."""
        header = message.envelope.autograd
        if header.differentiable and (context := self.contexts.find(header.context_id)) is not None:
            context.drop_send(header.message_id)

    def on_receive(self, message: Incoming) -> None:
        """Joins the context of a message, and makes its differentiable tensors outputs of a `RecvRpc` node."""
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
        return self._inside(context, header.anomaly_check_nan, message)

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
    def _inside(self, context: Context, check_nan: bool, message: Incoming) -> Iterator[None]:
        """Context manager that makes an autograd context current, and an anomaly mode until the call has run.

        The mode is that of all threads, and the next call may begin as soon as this one is answered.
        """
        with inside(context), ExitStack() as mode:
            mode.enter_context(self._anomaly.scope(check_nan))
            message.on_ran = mode.close
            yield


def _closure_of(header: agent_pb2.AutogradHeader, sender: int) -> Closure:
    """Returns the closure that a header carries, which does not contain the received send itself.

    An omitted closure is represented by the id of the send, of which it can be requested.
    """
    closure = closure_from_proto(header.closure) if header.closure else NOTHING
    if not header.closure_omitted:
        return closure
    return union([closure, Closure(omitted=frozenset({(sender, header.message_id)}))])


@final
class context:  # noqa: N801 - a context manager, used like a function
    """Context manager for a forward pass and its backward passes, on all workers that its calls reach.

        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", forward, (x,)).sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    Calls that this thread, or this asyncio task, makes inside belong to the context, and so do those of the called
    functions, and of tasks and callbacks that are made inside. At its end the context is released on all workers
    that it has reached.

    It gives the id of the context. Entering it raises NotInitializedError if RPC is not initialized.
    """

    __slots__ = ("_before", "_contexts", "_opened")

    _contexts: Contexts
    _opened: Context
    _before: Context | None

    def __enter__(self) -> int:
        self._contexts = current_agent().extension(Autograd).contexts
        self._opened = self._contexts.open()
        self._before = Context.current()
        Context.set_current(self._opened)
        return self._opened.id

    def __exit__(self, *_: object) -> None:
        Context.set_current(self._before)
        self._contexts.release(self._opened.id)


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    mode: Mode = "smart",
    timeout: float = 0.0,
) -> None:
    """Computes the gradients of the sum of the roots with respect to all leaves, on all workers.

    The gradients are accumulated in the context, on the worker of each leaf. No `.grad` is changed.

    Args:
        context_id: what `context()` yielded.
        roots: scalar tensors on this worker that require grad.
        retain_graph: keep the graph for further passes over it.
        mode: "smart" runs what the roots depend on. "fast" does as torch: it waits for the gradients of all
            messages of the context, for ever if the roots do not depend on one of them. It asks all workers what
            they have sent.
        timeout: seconds that the pass may take on each worker, 0 for no timeout.

    Raises:
        ValueError: the mode is unknown, or the timeout negative.
        UnknownContextError: there is no such context.
        AutogradError: the roots cannot be differentiated.
        RpcTimeoutError: the pass took longer; the message names the gradients that are missing.
        Exception: the first error on any worker; the pass has ended on all of them.
    """
    autograd = current_agent().extension(Autograd)
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}: give one of {', '.join(map(repr, MODES))}")
    if not 0 <= timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r}: give seconds, or 0 for no timeout")
    found = autograd.contexts.get(context_id)
    check_roots(roots)
    autograd.engine.backward(found, roots, retain_graph=retain_graph, mode=mode, timeout=timeout)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Returns the gradients that a context has accumulated for the leaves of this worker, by leaf.

    Raises:
        UnknownContextError: there is no such context.
    """
    return current_agent().extension(Autograd).contexts.get(context_id).gradients.get()
