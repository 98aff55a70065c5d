"""Counts of what has gone between this worker and one other, or itself."""

import threading
from collections.abc import Iterable, Mapping
from typing import Any, final

__all__ = ["INLINE", "Traffic", "sum_up"]

INLINE = "inline"
"""The name of the channel of what is in an envelope, or attached to it."""


@final
class Traffic:
    """The messages, and the bytes of their bodies and tensors, in both directions. Safe to use from any thread.

    Whoever sends or receives a message with all of its bytes inside counts that up here, with the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.messages_sent = self.messages_received = 0
        """Messages."""
        self.bytes_sent = 0
        """Bytes, those of a broadcast counted for one of its receivers only."""
        self.inline_sent = self.inline_received = 0
        """Bytes inside the messages."""
        self._apart_sent: dict[str, int] = {}
        """Bytes outside them, by channel."""
        self._apart_received: dict[str, int] = {}

    def sent_by_channel(self, nbytes: int, inline: int, apart: Mapping[str, int]) -> None:
        """Counts a message that has been sent with payloads outside it: the bytes inside it, and apart by channel.

        `nbytes` are all of them, without those of a broadcast that another message has counted.
        """
        with self.lock:
            self.messages_sent += 1
            self.bytes_sent += nbytes
            self.inline_sent += inline
            for channel, count in apart.items():
                self._apart_sent[channel] = self._apart_sent.get(channel, 0) + count

    def sent_again(self, nbytes: int) -> None:
        """Counts a payload that is sent once more, because it did not arrive."""
        with self.lock:
            self.bytes_sent += nbytes

    def received_by_channel(self, by_channel: Mapping[str, int]) -> None:
        """Counts a message that has arrived; its bytes by channel, those inside it as INLINE."""
        with self.lock:
            self.messages_received += 1
            for channel, count in by_channel.items():
                if channel == INLINE:
                    self.inline_received += count
                else:
                    self._apart_received[channel] = self._apart_received.get(channel, 0) + count

    @property
    def is_used(self) -> bool:
        """Whether there has been a message."""
        return bool(self.messages_sent or self.messages_received)

    def counts(self) -> tuple[int, int, int, int]:
        """Returns the messages sent and received, and the bytes."""
        with self.lock:
            bytes_received = self.inline_received + sum(self._apart_received.values())
            return self.messages_sent, self.messages_received, self.bytes_sent, bytes_received

    def as_json(self) -> dict[str, Any]:
        """Returns the counts; channels that have carried nothing are left out."""
        with self.lock:
            return {
                "messages_sent": self.messages_sent,
                "messages_received": self.messages_received,
                "bytes_sent": {INLINE: self.inline_sent, **self._apart_sent},
                "bytes_received": {INLINE: self.inline_received, **self._apart_received},
            }


def sum_up(traffic: Iterable[Traffic]) -> dict[str, int]:
    """Returns the sums of counts, by name."""
    names = ("messages_sent", "messages_received", "bytes_sent", "bytes_received")
    sums = map(sum, zip((0, 0, 0, 0), *(each.counts() for each in traffic), strict=True))
    return dict(zip(names, sums, strict=True))
