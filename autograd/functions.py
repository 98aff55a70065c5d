"""The two autograd functions that connect the graphs of two workers.

`SendRpc` consumes the tensors of a message on the sending worker. Its output is a scalar, the *gate*, which is a
root of the sender's part of a backward pass; its backward waits for the gradients that the receiver sends.
`RecvRpc` produces the tensors of the message on the receiving worker; its backward sends their gradients to the
sender and does not wait.
"""

from typing import Any, final

import torch

from ..torch_internals import apply_function
from .closure import Closure

__all__ = ["RECV_NODE", "RecvRpc", "SendRpc", "apply_with_grad"]


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


RECV_NODE: type[Any] = RecvRpc._backward_cls
"""The class of the node that a `RecvRpc` makes."""
