"""The contract of what a network reports to."""

import concurrent.futures
from collections.abc import Collection
from typing import Protocol

from ...proto.v1 import agent_pb2
from ..channels.payloads import PayloadReader
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd

__all__ = ["NetworkListener", "Pause"]

Pause = concurrent.futures.Future[None] | None
"""What to wait for before more is read from a worker: see TransportListener.on_envelope."""


class NetworkListener(Protocol):
    """Handles what a network reports. Its methods are called on any thread and must not block."""

    def on_announced(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> Pause:
        """Handles an envelope whose payloads have not arrived, or have to be collected.

        `on_message`, `on_rejected` or `on_dropped` follows.
        """

    def on_message(
        self,
        source: WorkerInfo,
        envelope: agent_pb2.Envelope,
        payloads: PayloadReader,
        *,
        announced: bool,
        nbytes: int = 0,
    ) -> Pause:
        """Handles a message that has arrived with all payloads.

        Args:
            source: the sender.
            envelope: the message's.
            payloads: reads the payloads that the envelope names.
            announced: whether `on_announced` came before.
            nbytes: of envelope and payloads.
        """

    def on_rejected(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> Pause:
        """Handles a message whose payloads are not accepted."""

    def on_dropped(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """Handles a message whose payloads will not arrive, because its sender is lost."""

    def on_peer_joined(self, worker: WorkerInfo) -> None:
        """Handles a worker that has joined the dynamic group after this one. Called once for each."""

    def on_peer_suspect(self, worker: WorkerInfo, reason: str, unsent: Collection[bytes], *, waits: bool) -> None:
        """Handles a worker that does not answer; `on_peer_back` or `on_peer_lost` follows. Called on the loop.

        Args:
            worker: the worker.
            reason: how that was noticed, in words.
            unsent: the beginnings of the envelopes that have not left this process, and will not.
            waits: whether calls that have not been sent, and those that follow, wait for the worker.
        """

    def on_peer_back(self, worker: WorkerInfo) -> None:
        """Handles a suspect worker that answers again. Called on the event loop."""

    def on_peer_lost(self, worker: WorkerInfo, end: WorkerEnd, unsent: Collection[bytes] = ()) -> None:
        """Handles the loss of a worker. Called once for each.

        Args:
            worker: the worker.
            end: how it ended.
            unsent: see `on_peer_suspect`.
        """
