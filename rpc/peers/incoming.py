"""What transports report: envelopes, whose payloads are collected, and the states of connections."""

import asyncio
import concurrent.futures
from collections.abc import Collection
from functools import partial
from typing import final

from ...proto.v1 import agent_pb2
from ..channels.payloads import read_inline
from ..channels.router import ChannelRouter, Collecting
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd
from .links import Links
from .network_listener import NetworkListener, Pause

__all__ = ["Incoming"]


@final
class Incoming:
    """Reports the messages of one agent when all of their payloads have arrived: a TransportListener."""

    def __init__(self, loop: asyncio.AbstractEventLoop, links: Links) -> None:
        """Reports nothing before `listen`.

        Args:
            loop: the event loop.
            links: know which workers are lost.
        """
        self._loop = loop
        self._links = links
        self._router: ChannelRouter
        self._listener: NetworkListener

    def listen(self, router: ChannelRouter, listener: NetworkListener) -> None:
        """Collects payloads by a router, and reports to a listener, from now on."""
        self._router = router
        self._listener = listener

    def on_envelope(
        self, source: WorkerInfo, envelope: agent_pb2.Envelope, nbytes: int, attached: memoryview | None = None
    ) -> Pause:
        """Collects the payloads of an envelope that has arrived. Called by transports on any thread."""
        if self._links.lost and source.wire_id in self._links.lost:
            return None  # read after its loss has been handled, with which all that it had asked for has ended
        if not envelope.tensors and envelope.body.HasField("inline"):
            return self._listener.on_message(source, envelope, read_inline, announced=False, nbytes=nbytes)
        breaks = self._links.breaks[source.wire_id]
        try:
            payloads, external_bytes = self._router.collect_now(source.wire_id, envelope, attached)
        except (ValueError, RuntimeError) as error:  # a refusal, or no memory
            return self._listener.on_rejected(source, envelope, error)
        nbytes += external_bytes
        if payloads is not None and not isinstance(payloads, concurrent.futures.Future):
            return self._listener.on_message(source, envelope, payloads, announced=False, nbytes=nbytes)
        pause = self._listener.on_announced(source, envelope)
        if payloads is None:
            self._loop.call_soon_threadsafe(self._collect, source, envelope, attached, nbytes, breaks)
        else:
            payloads.add_done_callback(partial(self._on_collected, source, envelope, nbytes))
        return pause

    def _collect(
        self,
        source: WorkerInfo,
        envelope: agent_pb2.Envelope,
        attached: memoryview | None,
        nbytes: int,
        breaks: int,
    ) -> None:
        """Collects the payloads outside an envelope, which was read after so many breaks. Called on the loop."""
        # Those of a connection that broke since then do not come any more.
        if source.wire_id in self._links.lost or self._links.breaks[source.wire_id] != breaks:
            self._listener.on_dropped(source, envelope)
            return
        try:
            arrived = self._router.collect(source.wire_id, envelope, attached)
        except Exception as error:  # a refusal, or no memory
            self._listener.on_rejected(source, envelope, error)
            return
        if isinstance(arrived, asyncio.Future):
            arrived.add_done_callback(partial(self._on_collected, source, envelope, nbytes))
        else:
            self._listener.on_message(source, envelope, arrived, announced=True, nbytes=nbytes)

    def _on_collected(
        self, source: WorkerInfo, envelope: agent_pb2.Envelope, nbytes: int, done: Collecting
    ) -> None:
        error = None if done.cancelled() else done.exception()
        if isinstance(error, ValueError):
            self._listener.on_rejected(source, envelope, error)
        elif done.cancelled() or error is not None:
            # The worker is lost, which fails what waits for this message.
            self._listener.on_dropped(source, envelope)
        else:
            self._listener.on_message(source, envelope, done.result(), announced=True, nbytes=nbytes)

    def on_opened(self, peer: WorkerInfo) -> None:
        """Handles a new connection to a worker. Called on the loop."""
        self._links.on_opened(peer)

    def on_broken(self, peer: WorkerInfo, end: WorkerEnd, unsent: Collection[bytes]) -> None:
        """Handles a connection to a worker that broke, or cannot be made. Called on the loop."""
        self._links.on_broken(peer, end, unsent)

    def on_closed(self, peer: WorkerInfo, end: WorkerEnd, unsent: Collection[bytes] = ()) -> None:
        """Handles the end of a worker, or of all connections to it. Called on the loop."""
        self._links.on_closed(peer, end, unsent)
