"""What a connection between two workers of one host and the channel of shared memory have to tell each other."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

__all__ = ["SegmentListener", "SegmentSender"]


class SegmentSender(Protocol):
    """Tells the peer of segments of shared memory."""

    released: deque[int]
    """The segments of the peer that this worker does not use any more, and has not told the peer of."""

    def flush_released(self) -> None:
        """Tells the peer of the segments that this worker does not use any more."""

    def send_segment(self, number: int, size: int, descriptor: int, *, is_shared: bool = False) -> None:
        """Tells the peer of a new segment, before the envelope that uses it. Closes the descriptor."""

    def send_dropped(self, numbers: Sequence[int]) -> None:
        """Tells the peer of segments that this worker will not use again."""

    def send_spent(self, numbers: Sequence[int]) -> None:
        """Tells the peer of segments to drop: this worker could not map them, or children of it still use them."""


class SegmentListener(Protocol):
    """Handles the frames about segments of shared memory, for one peer. Its methods must not block.

    They raise ValueError if the peer contradicts itself, which costs the connection.
    """

    def connect(self, connection: SegmentSender) -> None:
        """Uses a socket to tell the peer of segments. Called before anything is sent by it."""

    def on_segment(self, number: int, size: int, descriptor: int, *, is_shared: bool) -> None:
        """Handles a segment that the peer has made, of so many bytes; the descriptor is closed after that.

        It is -1 if it was lost, because this process had none left. Other workers receive a shared one, too.
        """

    def on_released(self, numbers: Sequence[int]) -> None:
        """Handles segments of this worker that the peer does not use any more."""

    def on_spent(self, numbers: Sequence[int]) -> None:
        """Handles segments to drop: the peer could not map them, or children of it still use them."""

    def on_dropped(self, numbers: Sequence[int]) -> None:
        """Handles segments that the peer will not use again."""
