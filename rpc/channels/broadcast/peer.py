"""What broadcasts need of the other workers that take part in them."""

from typing import Protocol

from ...contracts.worker import WorkerInfo
from ..chunked.channel import ChunkedChannel
from ..shared_memory.channel import SharedMemoryChannel

__all__ = ["BroadcastPeer"]


class BroadcastPeer(Protocol):
    """Another worker that takes part in broadcasts, and its channels."""

    info: WorkerInfo
    chunked: ChunkedChannel
    shared_memory: SharedMemoryChannel

    def on_group_ended(self, number: int, *, was_aborted: bool) -> None:
        """Handles that the worker has ended a group in which it broadcasts. Called on any thread."""
