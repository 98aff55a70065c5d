"""The channels of one agent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from .base import Channel, SendingChannel
from .broadcast.channel import BroadcastChannel
from .bulk.channel import BulkChannel
from .chunked import ChunkedChannel
from .cuda.channel import CudaIpcChannel
from .shared_memory.channel import SharedMemoryChannel

__all__ = ["Channels"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The channels of one agent.

    small: for payloads inside the envelope.
    bulk: for all others; sends by `chunked` where there are no bulk connections.
    chunked: receives what was sent in chunks.
    local: for large payloads from this worker to itself.
    shared_memory: for large payloads to workers that it is connected to.
    cuda_ipc: for payloads on CUDA devices, to the same workers.
    broadcast: receives large payloads that were sent to several workers at once.
    """

    small: SendingChannel
    bulk: BulkChannel
    chunked: ChunkedChannel
    local: SendingChannel
    shared_memory: SharedMemoryChannel
    cuda_ipc: CudaIpcChannel
    broadcast: BroadcastChannel

    @property
    def all(self) -> Sequence[Channel]:
        """All of them."""
        return (
            *(self.small, self.bulk, self.chunked, self.local),
            *(self.shared_memory, self.cuda_ipc, self.broadcast),
        )
