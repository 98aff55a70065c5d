"""How the gradients of a running backward pass leave a worker: when, and as what.

What is known to repeat itself is not sent element by element: the gradient of `x.sum()` is one number, expanded,
and all of a zero tensor is zero. A gradient that belongs to several tensors, as that of a sum does, is sent once.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch

from ..proto.v1 import agent_pb2
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import MessageType
from .graph import SendId

__all__ = [
    "GRADIENTS",
    "AnsweringSender",
    "Compressed",
    "GradientSender",
    "MessageGradients",
    "PassId",
    "TensorGradients",
    "compress",
    "decompress",
    "post_gradients",
]

GRADIENTS = MessageType.GRADIENTS

PassId = tuple[int, int]
"""The id of the worker whose program called `backward`, and the number of the pass there."""

SMALL_BYTES = 1 << 10
"""Bytes of a gradient that is sent element by element: to leave out repeated ones would take longer."""

TensorGradients = Sequence[torch.Tensor | None]
"""The gradients of the tensors of one message; None for a tensor that the loss does not depend on."""

Repeated = tuple[torch.Tensor, tuple[int, ...]]
"""A part of a tensor, and the sizes of the tensor: it repeats the part along each dimension in which the part has
size 1 and the tensor has not."""

Compressed = list[torch.Tensor | Repeated | None]

MessageGradients = tuple[int, Compressed]
"""The number of a message in the part of its sender, and the gradients of its tensors."""


def compress(gradients: TensorGradients) -> Compressed:
    """Returns gradients without repeated elements. Looks at strides only, at no elements."""
    compressed: Compressed = []
    last: torch.Tensor | None = None
    for gradient in gradients:
        if gradient is None:
            compressed.append(None)
        elif gradient is last:
            compressed.append(compressed[-1])  # the same object, which is pickled once
        else:
            compressed.append(_without_repeats(gradient))
        last = gradient
    return compressed


def decompress(compressed: Compressed) -> TensorGradients:
    """Returns the gradients again, repeated elements as expanded tensors, which take no memory.

    The list is emptied: whoever else has it shall not keep the gradients, which may then be used without a copy.
    """
    received = [*compressed]
    compressed.clear()
    for index, each in enumerate(received):
        if isinstance(each, tuple):
            received[index] = each[0].expand(each[1])
    return received  # type: ignore[return-value] # there are no tuples any more


def _is_on_cpu(compressed: Compressed) -> bool:
    """Returns whether all gradients are on the CPU."""
    for each in compressed:
        if each is not None and not (each[0] if isinstance(each, tuple) else each).is_cpu:
            return False
    return True


def _without_repeats(gradient: torch.Tensor) -> torch.Tensor | Repeated:
    if gradient._is_zerotensor():
        zero = torch.zeros((1,) * gradient.dim(), dtype=gradient.dtype, device=gradient.device)
        return zero, tuple(gradient.shape)
    if gradient.layout is not torch.strided or gradient.is_contiguous() or not gradient.numel():
        return gradient
    repeated = [dim for dim, size in enumerate(gradient.shape) if size > 1 and gradient.stride(dim) == 0]
    if not repeated:
        return gradient
    if gradient.nbytes <= SMALL_BYTES:
        return gradient.contiguous()
    part = gradient
    for dim in repeated:
        part = part.narrow(dim, 0, 1)
    return part, tuple(gradient.shape)


class GradientSender(Protocol):
    """Sends the gradients of one worker's part of a pass, some of them together with other messages."""

    def send(self, send: SendId, gradients: Compressed, *, is_last: bool) -> None:
        """Sends the gradients of a message to its sender, at once or with a message that follows soon.

        The last are those after which no gate waits any more, and no other gradients follow.
        """

    def flush(self) -> None:
        """Sends what has been kept for later. Called before this worker waits for anything."""


def post_gradients(agent: RpcAgent, context_id: int, pass_id: PassId, send: SendId, gradients: Compressed) -> None:
    """Sends the gradients of a message to its sender, in a message of their own."""
    sender, message_id = send
    caller, number = pass_id

    def fill_header(envelope: agent_pb2.Envelope) -> None:
        header = envelope.gradients
        header.context_id, header.message_id = context_id, message_id
        header.caller, header.pass_number = caller, number

    agent.post(agent.incarnation(sender), GRADIENTS, gradients, header=fill_header)


@final
class AnsweringSender:
    """Sends the gradients of a part that another worker has asked for; its last ones travel with the answer."""

    def __init__(
        self, agent: RpcAgent, context_id: int, pass_id: PassId, note_receiver: Callable[[int], None]
    ) -> None:
        """Args: note_receiver: called with the id of each worker before gradients are sent to it."""
        self._agent = agent
        self._context_id = context_id
        self._pass_id = pass_id
        self._note_receiver = note_receiver
        self._kept: MessageGradients | None = None

    def send(self, send: SendId, gradients: Compressed, *, is_last: bool) -> None:
        """Sends the gradients of a message to its sender, or keeps them for the answer."""
        sender, message_id = send
        caller, _ = self._pass_id
        # On devices, the answer would use another device map than a message of its own.
        if is_last and sender == caller and _is_on_cpu(gradients):
            self._kept = message_id, gradients
        else:
            self._note_receiver(sender)
            post_gradients(self._agent, self._context_id, self._pass_id, send, gradients)

    def flush(self) -> None:
        """Sends the gradients that were kept for the answer."""
        if (kept := self.take()) is not None:
            message_id, gradients = kept
            caller, _ = self._pass_id
            self._note_receiver(caller)
            post_gradients(self._agent, self._context_id, self._pass_id, (caller, message_id), gradients)

    def take(self) -> MessageGradients | None:
        """Returns the gradients for the answer, and forgets them."""
        kept, self._kept = self._kept, None
        return kept
