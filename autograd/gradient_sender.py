"""How the gradients of a running backward pass leave a worker."""

from collections.abc import Callable
from typing import Protocol, final

from ..proto.v1 import agent_pb2
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import MessageType
from .closure import SendId
from .compression import Compressed, is_on_cpu

__all__ = ["GRADIENTS", "AnsweringSender", "GradientSender", "MessageGradients", "PassId", "post_gradients"]

GRADIENTS = MessageType.GRADIENTS

PassId = tuple[int, int]
"""The id of the worker whose program called `backward`, and the number of the pass there."""

MessageGradients = tuple[int, Compressed]
"""The number of a message in the part of its sender, and the gradients of its tensors."""


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
        if is_last and sender == caller and is_on_cpu(gradients):
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
