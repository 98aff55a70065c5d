"""The two functions that carry a graph across workers.

`SendRpc` stands over the tensors of a message where it left. Its only output is a scalar, the gate; in the
backward pass it waits for the gradients that the receiver sends back. `RecvRpc` stands under the tensors where
they arrived; in the backward pass it posts their gradients to the sender and does not wait.
"""

from typing import TYPE_CHECKING, Any, final

import torch

from .closure import Closure, union

if TYPE_CHECKING:
    from .context import Context

__all__ = ["RecvRpc", "SendRpc", "is_recv", "receive", "send"]


@final
class SendRpc(torch.autograd.Function):
    """From the tensors of a message to its gate."""

    @staticmethod
    def forward(ctx: Any, context: "Context", message_id: int, *tensors: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Remembers which message it is."""
        ctx.context, ctx.message_id = context, message_id
        return torch.zeros(())  # on the CPU, whose nodes run on the thread that started the pass: it may wait

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Waits for the peer's gradients."""
        return (None, None, *ctx.context.wait_for_gradients(ctx.message_id))


@final
class RecvRpc(torch.autograd.Function):
    """From nothing to the tensors of a message."""

    @staticmethod
    def forward(
        ctx: Any,
        dummy: torch.Tensor,  # noqa: ARG004 - a leaf, so that there is a graph
        context: "Context",
        sender: int,
        message_id: int,
        closure: Closure,
        tensors: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Hands the tensors on, which come in a plain list so that they do not count as inputs."""
        ctx.context, ctx.sender, ctx.message_id = context, sender, message_id
        ctx.closure = union([closure, Closure(frozenset({(sender, message_id)}))])
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Posts the gradients; None for those that the loss does not depend on."""
        ctx.context.post_gradients(ctx.sender, ctx.message_id, gradients)
        return (None,) * 6


def send(context: "Context", message_id: int, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The gate of a message with these tensors, which all require grad."""
    with torch.enable_grad():
        gate: torch.Tensor = SendRpc.apply(context, message_id, *tensors)  # type: ignore[no-untyped-call]
    return gate


def receive(
    dummy: torch.Tensor,
    context: "Context",
    sender: int,
    message_id: int,
    closure: Closure,
    tensors: list[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """The tensors of a message as results of a `RecvRpc`."""
    with torch.enable_grad():
        outputs: tuple[torch.Tensor, ...] = RecvRpc.apply(  # type: ignore[no-untyped-call]
            dummy, context, sender, message_id, closure, tensors
        )
    return outputs


def is_recv(node: object) -> bool:
    """Is this node of a graph the backward of a `RecvRpc`?"""
    return isinstance(node, RecvRpc._backward_cls)
