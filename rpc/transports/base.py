"""The contract of transports, which carry the envelopes of messages between two workers.

At the end are those that need no connection: from a worker to itself, and to a worker that is lost.
"""

import concurrent.futures
from collections.abc import Collection, Sequence
from typing import Any, Final, Protocol, final

from ...proto.v1 import agent_pb2
from ..contracts.worker import SHUT_DOWN, Member, WorkerEnd, WorkerInfo
from ..execution.futures import Future
from ..execution.poller import SocketWaiter
from ..wire.parsing import embed
from .socket_frames import SegmentListener

__all__ = ["ENDED", "Connecting", "LoopbackTransport", "Transport", "TransportClosedError", "TransportListener"]


Connecting = concurrent.futures.Future[None]
"""Done when there is a connection, and known how it carries envelopes; or when there can be none."""


class TransportClosedError(Exception):
    """The connection is closed, and nothing more can be sent. The text is the `reason` of a WorkerEnd."""


class Transport(Protocol):
    """Connects this worker to one peer, and carries serialized envelopes in both directions.

    - Delivery: in the order of the calls of `send`, each envelope at most once. Envelopes are lost only with the
      connection; a transport reports that loss to its listener, and does not connect again: another one does.
    - Connecting: at the first `send` or `connect`, or when the peer connects. Before that, a transport has neither
      socket nor thread. If both workers connect at the same moment, one of the two connections remains.
    - Threads: `send`, `withdraw` and `connect` are called from any thread, `read_answer` on the thread that waits
      for the answer, and all else on the agent's event loop. `name` and `queued_bytes` are read on any thread.
      Envelopes are handed to the listener on any thread.
    - Blocking: no method waits for the peer, except `close`, which does not block the loop.
    - Ownership: a Peer makes its transport, and another one when its connection has broken. It calls `close` of
      the last one once, even if the connection is lost already. Sockets and threads belong to the transport, which
      releases them in `close`, or when the connection has broken.
    """

    @property
    def name(self) -> str:
        """The name of this kind of transport in debug info."""

    @property
    def queued_bytes(self) -> int:
        """Bytes of envelopes that have been sent by `send` and that the operating system has not taken yet."""

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> None:
        """Queues one envelope, of at most MAX_ENVELOPE_BYTES, and the bytes that are attached to it.

        These must not change before they are written. The queue has no bound of its own: it holds calls, which are
        bounded while they are in flight, and what answers and accompanies calls.

        Raises TransportClosedError if the connection is closed, and the envelope is not sent.
        """

    def withdraw(self, beginning: bytes) -> bool:
        """Removes the envelope with this beginning, of BEGINNING_BYTES, from the queue, if nothing of it was sent.

        Returns whether it was removed. If not, the peer may receive it.
        """

    def read_answer(self, future: Future[Any], waiter: SocketWaiter) -> None:
        """Has the calling thread, which waits for an answer, read it if it can: see ReadAnswer."""

    def connect(self) -> Connecting:
        """Starts to connect if there is no connection, so that the loss of the peer will be noticed.

        Returns always the same future.
        """

    async def close(self, drain: float, end: WorkerEnd, *, dial: bool) -> None:
        """Sends the queue and a goodbye, waits for the peer's goodbye, and releases the connection.

        Args:
            drain: seconds that this may take; after that, the connection is cut.
            end: how this worker ends, for the goodbye.
            dial: whether to connect only to say goodbye, if there is no connection.
        """


class TransportListener(Protocol):
    """The peer of a transport, which gets its envelopes. No method blocks, or raises unless it says so."""

    info: WorkerInfo
    member: Member

    breaks: int
    """How often its connection broke."""

    @property
    def is_on_this_host(self) -> bool:
        """Whether it is on this host, in this network namespace."""

    @property
    def queued_payload_bytes(self) -> int:
        """The bytes of payloads for it that are in this worker's own memory until they are sent."""

    def new_segments(self) -> SegmentListener:
        """Returns what handles the frames about shared memory on a new unix socket. Called on the event loop."""

    def on_frame(self, frame: agent_pb2.Frame) -> None:
        """Handles what a frame has besides envelopes. Called on the event loop.

        Raises ValueError if it is malformed, which costs the connection.
        """

    def on_envelope(
        self,
        envelope: agent_pb2.Envelope,
        nbytes: int,
        attached: memoryview | None = None,
        *,
        breaks: int | None = None,
    ) -> "concurrent.futures.Future[None] | None":
        """Handles an envelope from the peer. Called on any thread, by one thread at a time.

        Also called while `close` waits for the peer's goodbye.

        Args:
            envelope: the envelope.
            nbytes: bytes of memory that it takes.
            attached: the bytes that followed it; None if those that are attached to it are a field of it.
            breaks: those before the connection that it came by; None if that is the connection that there is now.

        Returns:
            A future: the transport reads nothing more from the peer, besides what it has read already, before it
            is done. None if it can go on.
        """

    async def wait_for_payloads(self) -> None:
        """Waits until the payloads of all envelopes that have come are there, or will not come."""

    def on_opened(self) -> None:
        """Handles a new connection, once the peer has answered on it. Called on the event loop.

        Called at most once for each transport, before the first `on_envelope`.
        """

    def on_broken(self, end: WorkerEnd, unsent: Collection[bytes]) -> None:
        """Handles a connection that broke, or cannot be made, while the peer may live. Called on the event loop.

        Called instead of `on_closed`, and as that. Has to replace the transport before it returns.

        Args:
            end: how the connection broke.
            unsent: the beginnings of the envelopes that were queued and will not be sent.
        """

    def on_closed(self, end: WorkerEnd, unsent: Collection[bytes] = ()) -> None:
        """Handles the end of the peer, or of all connections to it. Called on the event loop.

        Called at most once for each transport. Except where the connection was cut by this worker, the last
        `on_envelope` comes before it.

        The transport has dropped its queue, and `send` raises from now on. Need not be called during `close`.

        Args:
            end: what the peer's goodbye says, or why the peer cannot be connected again.
            unsent: see `on_broken`.
        """


_CONNECTED: Final = Connecting()
_CONNECTED.set_result(None)


class _EndedTransport:
    """A transport by which nothing can be sent, or arrives."""

    name = "ended"
    queued_bytes = 0

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> None:  # noqa: ARG002
        raise TransportClosedError("it is lost")

    def withdraw(self, beginning: bytes) -> bool:  # noqa: ARG002
        return False

    def read_answer(self, future: Future[Any], waiter: SocketWaiter) -> None:
        pass

    def connect(self) -> Connecting:
        return _CONNECTED

    async def close(self, drain: float, end: WorkerEnd, *, dial: bool) -> None:
        pass


ENDED: Final = _EndedTransport()
"""The transport to every worker that is lost, for which nothing is kept."""


@final
class LoopbackTransport(_EndedTransport):
    """Delivers parsed copies of envelopes to this worker itself, on the thread that sends, until it is closed."""

    name = "loopback"

    def __init__(self, me: TransportListener) -> None:
        self._me = me
        self._closed = False

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> None:
        """Delivers an envelope."""
        if self._closed:
            raise TransportClosedError(SHUT_DOWN.reason)
        envelope = embed(envelope, attached)
        self._me.on_envelope(agent_pb2.Envelope.FromString(envelope), len(envelope))

    async def close(self, drain: float, end: WorkerEnd, *, dial: bool) -> None:  # noqa: ARG002
        """Makes `send` raise TransportClosedError from now on."""
        self._closed = True
