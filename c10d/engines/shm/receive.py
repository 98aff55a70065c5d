"""Receives that are under way, and the messages that arrive for them."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

from torch import Tensor

if TYPE_CHECKING:
    from .p2p_channel import P2PChannels

__all__ = ["IncomingMessage", "PendingReceive"]


@final
class PendingReceive:
    """A receive that has been posted. It is a Pending (see engines.base). What it has belongs to the mailbox.

    wanted: the rank that is to send; None for any.
    sender: the rank that sends, once that is known.
    """

    __slots__ = (
        "callbacks",
        "deadline",
        "error",
        "mailbox",
        "over",
        "seconds",
        "sender",
        "tag",
        "tensor",
        "waiters",
        "wanted",
    )

    def __init__(
        self, mailbox: "P2PChannels", tensor: Tensor, wanted: int | None, tag: int, seconds: float
    ) -> None:
        self.mailbox: Final = mailbox
        self.tensor: Tensor | None = tensor
        self.wanted: Final = wanted
        self.tag: Final = tag
        self.seconds: Final = seconds
        self.deadline: Final = time.monotonic() + seconds
        self.sender = -1
        self.waiters = 0
        self.over = False
        self.error: Exception | None = None
        self.callbacks: list[Callable[[], None]] = []

    def wait(self, timeout: float | None) -> None:
        """Takes in what arrives until it is over."""
        if not self.over:
            self.mailbox.wait(self, timeout)
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        """Is it over, well or badly? Takes in what has arrived."""
        return self.over or self.mailbox.poll(self)

    def source(self) -> int:
        """The rank that sent."""
        return self.sender

    def on_done(self, callback: Callable[[], None]) -> None:
        """Has `callback` called once when it is over, at once if it is."""
        if not self.mailbox.call_back(self, callback):
            callback()


@final
class IncomingMessage:
    """A message of which at least the first block has been taken off its channel.

    tensor: where the bytes go; None if nobody wants them.
    """

    __slots__ = ("arrived", "receive", "size", "source", "tag", "tensor")

    def __init__(self, source: int, tag: int, size: int) -> None:
        self.source: Final = source
        self.tag: Final = tag
        self.size: Final = size
        self.arrived = 0  # bytes
        self.receive: PendingReceive | None = None
        self.tensor: Tensor | None = None
