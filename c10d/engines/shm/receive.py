"""Receives that have been posted, and the messages that arrive for them."""

import time
from collections.abc import Callable
from typing import Final, Protocol, final

from torch import Tensor

__all__ = ["IncomingMessage", "PendingReceive", "ReceivingChannels"]


class ReceivingChannels(Protocol):
    """The channels that a receive is posted on, P2PChannels."""

    def wait(self, receive: "PendingReceive", timeout: float | None) -> None:
        """Blocks until a receive is done. Raises TimeoutError if it is not after `timeout` seconds."""

    def poll(self, receive: "PendingReceive") -> bool:
        """Reads what has arrived, and returns whether the receive is done."""

    def add_callback(self, receive: "PendingReceive", callback: Callable[[], None]) -> bool:
        """Has `callback` called when a receive is done; returns False if it is done already."""


@final
class PendingReceive:
    """A receive in flight, a PendingOperation (c10d/engines/pending.py).

    The channels' lock guards its attributes.

    Args:
        channels: that the message arrives on.
        tensor: to receive into; dropped when the receive is done.
        from_rank: the rank that must send; None for any.
        tag: of the message.
        timeout: seconds that the receive may take.
    """

    __slots__ = (
        "callbacks",
        "channels",
        "deadline",
        "error",
        "from_rank",
        "is_done",
        "sender",
        "tag",
        "tensor",
        "timeout",
        "waiters",
    )

    def __init__(
        self, channels: ReceivingChannels, tensor: Tensor, from_rank: int | None, tag: int, timeout: float
    ) -> None:
        self.channels: Final = channels
        self.tensor: Tensor | None = tensor
        self.from_rank: Final = from_rank
        self.tag: Final = tag
        self.timeout: Final = timeout
        self.deadline: Final = time.monotonic() + timeout
        self.sender = -1  # until a message is matched
        self.waiters = 0  # threads in `wait`
        self.is_done = False
        self.error: Exception | None = None
        self.callbacks: list[Callable[[], None]] = []

    def wait(self, timeout: float | None) -> None:
        """Receives blocks until the message is complete, see PendingOperation.wait."""
        if not self.is_done:
            self.channels.wait(self, timeout)
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        """Returns whether the receive has finished, after receiving the blocks that are there."""
        return self.is_done or self.channels.poll(self)

    def source(self) -> int:
        """Returns the rank that sent the message."""
        return self.sender

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the receive is done, or immediately if it is done already."""
        if not self.channels.add_callback(self, callback):
            callback()


@final
class IncomingMessage:
    """A message of which at least the first block has been read from its channel.

    tensor: where its bytes go, the tensor of its receive or a buffer; None if they are discarded.
    receive: that it was matched with, if any.
    received: bytes that have been read from the channel.
    """

    __slots__ = ("receive", "received", "size", "source", "tag", "tensor")

    def __init__(self, source: int, tag: int, size: int) -> None:
        self.source: Final = source
        self.tag: Final = tag
        self.size: Final = size
        self.received = 0
        self.receive: PendingReceive | None = None
        self.tensor: Tensor | None = None
