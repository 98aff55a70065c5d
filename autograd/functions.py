"""The two autograd functions that connect the graphs of two workers.

`SendRpc` consumes the tensors of a message on the sending worker. Its output is a scalar, the *gate*, which is a
root of the sender's part of a backward pass; its backward waits for the gradients that the receiver sends.
`RecvRpc` produces the tensors of the message on the receiving worker; its backward sends their gradients to the
sender and does not wait.
"""

from typing import Any, Protocol, final

import torch

from ..torch_internals import apply_function
from .closure import Closure, SendId
from .compression import TensorGradients

__all__ = ["RECV_NODE", "GradientExchange", "RecvRpc", "RunsPasses", "SendRpc", "receive", "send"]


class GradientExchange(Protocol):
    """Moves the gradients of messages between workers, for the nodes of a graph in a running backward pass."""

    def wait_for_gradients(self, message_id: int) -> TensorGradients:
        """Waits for the gradients of the tensors of a message that this worker sent, and returns them.

        Raises:
            RpcTimeoutError: they did not arrive within the timeout of the pass.
            Exception: the pass has failed.
        """

    def send_gradients(self, send: SendId, gradients: TensorGradients) -> None:
        """Sends the gradients of the tensors of a received message to its sender."""


class RunsPasses(Protocol):
    """The context that nodes belong to."""

    dummy: torch.Tensor
    """A scalar leaf on the CPU that requires grad."""

    def running_pass(self) -> GradientExchange:
        """Returns the backward pass that runs on this worker. Raises AutogradError if none does."""


@final
class SendRpc(torch.autograd.Function):
    """Maps the tensors of a message to its gate."""

    @staticmethod
    def forward(ctx: Any, context: RunsPasses, message_id: int, *tensors: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Returns the gate, on the CPU: CPU nodes run on the thread that started the pass, which may block.

        Its value does not matter.
        """
        ctx.context, ctx.message_id = context, message_id
        return context.dummy.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Waits for the gradients from the receiver."""
        return (None, None, *ctx.context.running_pass().wait_for_gradients(ctx.message_id))


@final
class RecvRpc(torch.autograd.Function):
    """Produces the tensors of a message."""

    @staticmethod
    def forward(
        ctx: Any,
        dummy: torch.Tensor,  # noqa: ARG004 - that of the context, without which there would be no node
        context: RunsPasses,
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


def send(context: RunsPasses, message_id: int, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the gate of a message.

    Args:
        context: that of the message.
        message_id: its number.
        tensors: its tensors that require grad. The caller keeps followers of those that are leaves meanwhile: see
            `follower_of`.
    """
    gate: torch.Tensor
    if torch.is_grad_enabled():
        gate = apply_function(SendRpc, context, message_id, *tensors)
    else:
        with torch.enable_grad():
            gate = apply_function(SendRpc, context, message_id, *tensors)
    return gate


def receive(
    context: RunsPasses, sender: int, message_id: int, closure: Closure, tensors: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of a received message as outputs of a `RecvRpc`.

    Args:
        context: the context of the message.
        sender: the id of the sending worker.
        message_id: the number of the message there.
        closure: that of the message, without the message itself.
        tensors: its tensors that require grad.
    """
    args = context.dummy, context, sender, message_id, closure, tensors
    outputs: tuple[torch.Tensor, ...]
    if torch.is_grad_enabled():
        outputs = apply_function(RecvRpc, *args)
    else:
        with torch.enable_grad():
            outputs = apply_function(RecvRpc, *args)
    return outputs


RECV_NODE: type[Any] = RecvRpc._backward_cls
"""The class of the node that a `RecvRpc` makes."""
