"""The workers as this worker sees them: what there is between it and each other one, and what becomes of that.

A peer is made when its worker becomes a member of the group, and stays when that is lost: a worker that is started
again in its place has another one. This worker is a peer of its own, which has no link.

- Sending: whoever has a message for the worker calls `send`, which hands it to the transport.
- Receiving: the transport calls `on_envelope`, and the channels collect the payloads; then it is a message.
- Its life: the transport reports to the link whether it is connected, broken or closed. The link decides what
  that means (link.py), calls `disconnect`, `reconnect`, `suspect` or `lose`, and tells all watchers.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

from google.protobuf.message import DecodeError

from ...errors import LossCause, SerializationError, UnknownWorkerError
from ...proto.v1 import agent_pb2
from ..channels.base import PayloadLostError
from ..channels.channels import Channels, LocalChannel, PeerChannels
from ..channels.chunked import ChunkedChannel
from ..channels.payloads import Collecting, EnvelopePayloads, PayloadReader, read_inline
from ..channels.shared_memory import PeerSegments
from ..contracts.messages import Outgoing
from ..contracts.options import FlowControlOptions
from ..contracts.worker import Member, WorkerEnd, WorkerInfo
from ..transports.base import ENDED, LoopbackTransport, Transport, TransportClosedError
from ..transports.grpc_stream import GrpcStream
from ..transports.socket_frames import MAX_ENVELOPE_BYTES
from ..transports.sockets import TCP, UNIX
from ..wire.parsing import check_envelope
from .control import ControlStream
from .flow_control import CALL_BYTES, Backlog, Window
from .link import Absence, Link, Links, LinkState

__all__ = ["INLINE", "MessageListener", "Pause", "Peer", "PeerParts", "Peers", "ReceivedQueue", "check_size"]

INLINE = "inline"
"""The name of the channel of what is in an envelope, or attached to it."""

_LARGE_BYTES = 1 << 20
"""Bytes of an envelope from which on it may be larger than what receivers accept."""

Pause = concurrent.futures.Future[None] | None
"""What to wait for before more is read from a peer: see TransportListener.on_envelope."""


class MessageListener(Protocol):
    """Handles the messages of peers. Its methods are called on any thread and must not block."""

    def on_announced(self, peer: "Peer", envelope: agent_pb2.Envelope) -> Pause:
        """Handles an envelope whose payloads have not arrived, or have to be collected.

        `on_message`, `on_rejected` or `on_dropped` follows.
        """

    def on_message(
        self, peer: "Peer", envelope: agent_pb2.Envelope, payloads: PayloadReader, nbytes: int, *, announced: bool
    ) -> Pause:
        """Handles a message that has arrived with all payloads; the bytes are those of its envelope, too.

        If it was `announced`, `on_announced` came before.
        """

    def on_rejected(self, peer: "Peer", envelope: agent_pb2.Envelope, error: Exception) -> Pause:
        """Handles a message whose payloads are not accepted."""

    def on_dropped(self, peer: "Peer", envelope: agent_pb2.Envelope) -> None:
        """Handles a message whose payloads will not arrive, because its sender is lost, or its connection."""


@final
@dataclass(frozen=True, slots=True)
class PeerParts:
    """What the peers of one agent share.

    links: what their links share.
    make_stream: makes a connection to a peer at an address, which is not connected.
    wrap: wraps every transport.
    channels: what their channels share.
    messages: handles what arrives.
    flow_control: bounds what waits here.
    """

    links: Links
    make_stream: "Callable[[Peer, str], GrpcStream]"
    wrap: Callable[[Transport, WorkerInfo], Transport]
    channels: Channels
    messages: MessageListener
    flow_control: FlowControlOptions


@final
class ReceivedQueue:
    """The requests of one worker that have arrived and have not begun to run. Safe to use from any thread.

    Beyond a bound, nothing more is read from the worker until half of them have begun. That delays everything that
    the worker sends, answers included, but for a finite time: the executor begins every request that is queued,
    whatever the functions that run wait for. So it cannot close a circle of waits.
    """

    def __init__(self, options: FlowControlOptions) -> None:
        self._max_requests = options.max_received
        self._max_bytes = options.max_received_bytes
        self._sizes: deque[int] = deque()
        """The bytes of each, in the order of arrival. They begin in nearly the same order."""
        self._limit = min(self._max_requests, self._max_bytes // CALL_BYTES)
        """The number at which reading pauses, with as many bytes as there are."""
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._extra_bytes = 0
        """Bytes of large requests beyond CALL_BYTES of each."""
        self.pause: Pause = None
        """Done when reading may go on; None unless it pauses."""

    def add(self, nbytes: int) -> Pause:
        """Counts a request that has arrived and waits for a thread, with the bytes of its envelope and payloads.

        Returns a future before which nothing more should be read from the worker; None if there is no need.
        """
        if nbytes > CALL_BYTES:
            self._add_bytes(nbytes - CALL_BYTES)
        self._sizes.append(nbytes)
        return self._begin_pause() if len(self._sizes) > self._limit else None

    def begin(self) -> int:
        """Counts a request that begins to run, or is postponed; returns its bytes."""
        nbytes = self._sizes.popleft()
        if nbytes > CALL_BYTES:
            self._add_bytes(CALL_BYTES - nbytes)
        if self.pause is not None:
            self._end_pause()
        return nbytes

    def figures(self) -> Mapping[str, int]:
        """Returns the number of these requests, and their bytes."""
        with self._lock:
            return {
                "received_requests": len(self._sizes),
                "received_bytes": len(self._sizes) * CALL_BYTES + self._extra_bytes,
                "reading_paused": int(self.pause is not None),
            }

    def _add_bytes(self, nbytes: int) -> None:
        with self._lock:
            self._extra_bytes += nbytes
            self._limit = min(self._max_requests, (self._max_bytes - self._extra_bytes) // CALL_BYTES)

    def _begin_pause(self) -> Pause:
        with self._lock:
            if len(self._sizes) <= self._limit:
                return self.pause
            if self.pause is None:
                self.pause = concurrent.futures.Future()
            pause = self.pause
        self._end_pause()  # if requests have begun in between: `begin` may have seen no pause
        return pause

    def _end_pause(self) -> None:
        """Ends the pause if half of what is allowed, or less, has not begun."""
        with self._lock:
            count, pause = len(self._sizes), self.pause
            nbytes = count * CALL_BYTES + self._extra_bytes
            if pause is None or (count and (2 * count > self._max_requests or 2 * nbytes > self._max_bytes)):
                return
            self.pause = None
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled with the connection
            pause.set_result(None)


@final
class _Traffic:
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


@final
class Peer:
    """One incarnation of a worker. Its state is changed on the event loop; all else may be used on any thread.

    It is the TransportListener of its transport, and the LinkOwner of its link.
    """

    # Each of these is made when it is first used: most workers of a large group never talk to each other.

    channels: PeerChannels
    """Carry payloads to it, and from it."""
    window: Window
    """The calls to it that are in flight."""
    received: ReceivedQueue
    """The requests of it that wait for a thread."""
    backlog: Backlog
    """What it has not read of the answers to it."""
    control: ControlStream
    """The control messages to it, and from it."""
    traffic: _Traffic
    """What has gone between it and this worker."""

    def __init__(self, member: Member, parts: PeerParts, *, is_me: bool = False) -> None:
        """Makes the peer of a worker, which may be this one itself, without a connection."""
        info = self.info = member.info
        self.member = member
        self.id = info.wire_id
        self._parts = parts
        self._is_closing = False
        self.absence: Absence | None = None
        """Why nothing can be sent to it now; None if something can."""
        self.end: WorkerEnd | None = None
        """How it ended, if it is lost."""
        self.breaks = 0
        """How often its connection broke."""
        self._unsent: Collection[bytes] = ()
        self._incomplete: dict[int, agent_pb2.Envelope] = {}
        """The envelopes that have come, and not all of their payloads, by their `id`."""
        self._completed: asyncio.Event | None = None
        """Set when one of them is complete, or never will be. None until somebody waits for that."""
        self.parked_requests = self.parked_bytes = 0
        """The requests of it that wait without a thread. Guarded by the lock of the server."""
        self.stream: GrpcStream | None = None
        """Its connection. None for this worker itself, and for a worker that is lost."""
        self.link: Link | None = None
        """None for this worker itself."""
        transport: Transport
        if is_me:
            transport = LoopbackTransport(self)
        else:
            self.link = Link(self, member.address, parts.links)
            transport = self.stream = parts.make_stream(self, member.address)
        self.transport = parts.wrap(transport, info)

    def __getattr__(self, name: str) -> Any:
        """Makes a part."""
        if (make := _PARTS.get(name)) is None:
            raise AttributeError(name)
        return self.__dict__.setdefault(name, make(self))  # one, whoever else makes one at the same time

    @property
    def is_used(self) -> bool:
        """Whether there has been anything to do with it."""
        return not _PARTS.keys().isdisjoint(self.__dict__)

    @property
    def used_channels(self) -> PeerChannels | None:
        """Its channels; None if they have not been needed."""
        return self.__dict__.get("channels")

    @property
    def large_channel(self) -> str:
        """The name of the channel that large payloads to it go by now."""
        if (channels := self.used_channels) is not None:
            return channels.large
        return LocalChannel.name if self.is_me else ChunkedChannel.name

    @property
    def is_on_this_host(self) -> bool:
        """Whether it is on this host, in this network namespace."""
        return self.member.network == self._parts.channels.network

    @property
    def has_socket(self) -> bool:
        """Whether its envelopes travel by a socket beside the gRPC stream."""
        return self.transport.name in (UNIX, TCP)

    @property
    def is_me(self) -> bool:
        """Whether this is this worker itself."""
        return self.link is None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to it."""
        return self.link is not None and self.link.state is LinkState.CONNECTED

    @property
    def has_connected(self) -> bool:
        """Whether there has ever been one."""
        return self.link is not None and self.link.has_connected

    # Sending.

    def check_present(self) -> None:
        """Raises WorkerLostError or WorkerSuspectError if it is known to be lost, or suspect."""
        if (absence := self.absence) is not None:
            raise absence.as_error(self.info.name)

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> Transport:
        """Queues an envelope, and the bytes that are attached to it; returns the transport that has them.

        Raises:
            WorkerLostError: the worker is lost.
            WorkerSuspectError: the connection to it is broken.
            SendFailedError: it was not sent for another reason.
            SerializationError: the envelope is larger than a frame can be.
        """
        if len(envelope) > _LARGE_BYTES:
            check_size(envelope, attached)
        transport = self.transport
        try:
            transport.send(envelope, attached)
        except TransportClosedError as error:
            absence = self.absence
            if absence is None:  # the event loop is about to learn it
                end = WorkerEnd(LossCause.DISCONNECTED, str(error))
                absence = Absence(end, is_lost=self._is_closing or self.is_me)
            raise absence.as_error(self.info.name) from None
        return transport

    def withdraw(self, message: Outgoing) -> bool:
        """Takes a message back if nothing of it is on its way; on the loop if it has payloads apart."""
        beginning = message.beginning()
        if not message.payloads:
            return self.transport.withdraw(beginning)
        return self.channels.chunked.withdraw(message.payloads, lambda: self.transport.withdraw(beginning))

    def queued_bytes(self) -> int:
        """Returns the bytes for it, except in shared memory, that the operating system has not taken yet."""
        if self._is_closing or self.end is not None:
            return 0
        return self.transport.queued_bytes + self.queued_payload_bytes

    @property
    def queued_payload_bytes(self) -> int:
        """The bytes of payloads for it that are in this worker's own memory until they are sent."""
        channels = self.used_channels
        return channels.queued_bytes if channels is not None else 0

    # Receiving.

    def on_envelope(
        self,
        envelope: agent_pb2.Envelope,
        nbytes: int,
        attached: memoryview | None = None,
        *,
        breaks: int | None = None,
    ) -> Pause:
        """Collects the payloads of an envelope that has arrived, and reports the message."""
        if self.end is not None:
            return None  # read after its loss has been handled, with which all that it had asked for has ended
        messages = self._parts.messages
        if not envelope.has_payloads:
            return messages.on_message(self, envelope, read_inline, nbytes, announced=False)
        breaks = self.breaks if breaks is None else breaks
        arrived: PayloadReader | Collecting | None = None
        try:
            payloads = EnvelopePayloads(self.channels, envelope, attached)
            if not payloads.needs_loop:
                arrived = payloads.collect()
        except Exception as error:  # a refusal, or no memory
            return messages.on_rejected(self, envelope, error)
        nbytes += payloads.nbytes
        if arrived is not None and not isinstance(arrived, concurrent.futures.Future):
            return messages.on_message(self, envelope, arrived, nbytes, announced=False)
        pause = messages.on_announced(self, envelope)
        self._incomplete[id(envelope)] = envelope
        if arrived is None:
            self._parts.links.loop.call_soon_threadsafe(self._collect, envelope, payloads, nbytes, breaks)
        else:
            arrived.add_done_callback(partial(self._on_collected, envelope, nbytes))
        return pause

    def _collect(self, envelope: agent_pb2.Envelope, payloads: EnvelopePayloads, nbytes: int, breaks: int) -> None:
        """Collects the payloads of an envelope that came by the connection after so many breaks. On the loop."""
        # Those of a connection that broke since then do not come any more.
        if self.end is not None or self.breaks != breaks:
            self._complete(envelope, self._parts.messages.on_dropped)
            return
        try:
            arrived = payloads.collect()
        except Exception as error:  # a refusal, or no memory
            self._complete(envelope, self._parts.messages.on_rejected, error)
            return
        if isinstance(arrived, concurrent.futures.Future):
            arrived.add_done_callback(partial(self._on_collected, envelope, nbytes))
        else:
            self._complete(envelope, self._parts.messages.on_message, arrived, nbytes, announced=True)

    def _on_collected(self, envelope: agent_pb2.Envelope, nbytes: int, done: Collecting) -> None:
        messages = self._parts.messages
        error = None if done.cancelled() else done.exception()
        if isinstance(error, ValueError):
            self._complete(envelope, messages.on_rejected, error)
        elif done.cancelled() or error is not None:  # it is lost
            self._complete(envelope, messages.on_dropped)
        else:
            self._complete(envelope, messages.on_message, done.result(), nbytes, announced=True)

    def _complete(
        self, envelope: agent_pb2.Envelope, report: Callable[..., object], *args: object, **kwargs: object
    ) -> None:
        """Reports what has become of an envelope whose payloads had not all come."""
        try:
            report(self, envelope, *args, **kwargs)
        finally:
            self._incomplete.pop(id(envelope), None)
            if self._completed is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._parts.links.loop.call_soon_threadsafe(self._completed.set)

    async def wait_for_payloads(self) -> None:
        """Waits until the payloads of all envelopes that have come are there, or will not come."""
        completed = self._completed = asyncio.Event()
        while self._incomplete:
            await completed.wait()
            completed.clear()

    def new_segments(self) -> PeerSegments:
        """Returns what handles the frames about shared memory on a new unix socket. Called on the event loop."""
        return self.channels.shared_memory.connect()

    def on_frame(self, frame: agent_pb2.Frame) -> None:
        """Handles what a frame tells of its channels. Called on the event loop."""
        if frame.HasField("bulk_request") or frame.HasField("bulk_offer") or frame.HasField("devices"):
            self.channels.on_frame(frame)

    # What its connection does: reported by the transport to the link, on the event loop.

    def on_opened(self) -> None:
        """Handles a new connection."""
        if self.link is not None:
            self.link.on_opened()

    def on_broken(self, end: WorkerEnd, unsent: Collection[bytes]) -> None:
        """Handles a connection that broke, or cannot be made."""
        if self.link is not None:
            self.link.on_broken(end, unsent)

    def on_closed(self, end: WorkerEnd, unsent: Collection[bytes] = ()) -> None:
        """Handles the end of the worker, or of all connections to it."""
        if self.link is not None:
            self.link.on_closed(end, unsent)

    # What the link and the channels ask of its connection.

    def renew_transport(self) -> None:
        """Replaces the transport, which has ended, by one that does not connect by itself."""
        if self.stream is not None:
            self.stream = self.stream.renewed()
            self.transport = self._parts.wrap(self.stream, self.info)

    def break_off(self, reason: str) -> None:
        """Ends the connection, after which there may be another one."""
        if self.stream is not None:
            self.stream.break_off(reason)

    def abort(self, reason: str) -> None:
        """Ends the connection for good, because the worker cannot be used."""
        if self.stream is not None:
            self.stream.abort(reason)

    def send_frame(self, frame: agent_pb2.Frame) -> None:
        """Sends a frame without envelopes. Called on the event loop."""
        if self.stream is not None:
            self.stream.send_frame(frame)

    def begin_to_close(self) -> None:
        """Reports nothing that becomes of it any more. Called on the event loop."""
        self._is_closing = True
        if self.link is not None:
            self.link.close()

    # What becomes of it: on the event loop.

    def disconnect(self, end: WorkerEnd) -> None:
        """Sends nothing before it is back, and drops the payloads that were on their way."""
        self.absence = Absence(end, waits=True)
        self.breaks += 1
        if (channels := self.used_channels) is not None:
            channels.drop(PayloadLostError(end.reason))

    def suspect(self, end: WorkerEnd, unsent: Collection[bytes], *, waits: bool) -> None:
        """Handles that it does not answer; see LinkOwner."""
        self.absence = Absence(end, waits=waits)
        self._unsent = unsent

    def reconnect(self) -> None:
        """Sends again."""
        self.absence = None

    def lose(self, end: WorkerEnd, unsent: Collection[bytes]) -> None:
        """Handles its loss; see LinkOwner."""
        self.absence, self.end = Absence(end, is_lost=True), end
        self._unsent = unsent
        self._refuse(end.reason)
        if (channels := self.used_channels) is not None:
            channels.drop(ConnectionError(end.reason))
            # Little is kept of a lost worker. Who asks for its channels later gets others, which carry nothing.
            self.__dict__.pop("channels", None)

    def take_unsent(self) -> Collection[bytes]:
        """Returns, once, the beginnings of the envelopes that were queued when its connection broke, or ended."""
        unsent, self._unsent = self._unsent, ()
        return unsent

    def evicted(self, me: str, reason: str) -> None:
        """Handles that this worker, which has this name, is no member any more: it can call nobody."""
        if self.link is not None:
            self.link.on_evicted(WorkerEnd(LossCause.REFUSED, f"this worker was evicted: {reason}"))
            self.absence = Absence(WorkerEnd(LossCause.REFUSED, reason), is_lost=True, evicted=me)

    def mark_lost(self, end: WorkerEnd) -> None:
        """Makes it lost, which has never been present here. Nobody is told. Called on any thread."""
        if self.link is not None:
            self.link.mark_lost(end)
            self.absence, self.end = Absence(end, is_lost=True), end
            self._parts.links.loop.call_soon_threadsafe(self._refuse, end.reason)

    def _refuse(self, reason: str) -> None:
        """Lets it in no more, which is told this reason, and keeps nothing of its connection."""
        if self.stream is not None:
            self.stream.refuse(reason)
            self.stream, self.transport = None, self._parts.wrap(ENDED, self.info)


_PARTS: Mapping[str, Callable[[Peer], Any]] = {
    "channels": lambda peer: peer._parts.channels.to(peer),
    "backlog": lambda peer: Backlog(peer.info, peer.queued_bytes),
    "control": lambda peer: ControlStream(peer.info),
    "received": lambda peer: ReceivedQueue(peer._parts.flow_control),
    "traffic": lambda _: _Traffic(),
    "window": lambda peer: Window(peer.info),
}


@final
class Peers:
    """The peers of one agent. They are added on one thread, and looked up on any."""

    def __init__(self, me: WorkerInfo, *, dynamic: bool = False) -> None:
        """Knows nobody yet. Workers join and leave a dynamic group at any time."""
        self.me = me
        self.by_id: dict[int, Peer] = {}
        """All peers, by wire id: current and former ones, and this worker itself."""
        self.by_name: dict[str, Peer] = {}
        """The latest incarnation of each worker."""
        self._by_rank: dict[int, Peer] = {}
        self._dynamic = dynamic

    def add(self, peer: Peer) -> None:
        """Adds a peer, which takes the place of those that had its name or its rank."""
        self.by_id[peer.id] = peer  # first: who is found by name is looked up by id then
        self.by_name[peer.info.name] = peer
        self._by_rank[peer.info.id] = peer

    def of(self, worker: WorkerInfo) -> Peer:
        """Returns the peer that a worker is."""
        return self.by_id[worker.wire_id]

    def find(self, destination: object) -> Peer:
        """Returns the latest incarnation of the worker with this name, rank or WorkerInfo.

        Raises:
            UnknownWorkerError: there is no such member.
            ValueError: the destination is neither a name, a rank nor a WorkerInfo.
        """
        found: Peer | None
        if isinstance(destination, WorkerInfo):
            found = self._by_rank.get(destination.id)
            found = found if found is not None and found.info.name == destination.name else None
        elif isinstance(destination, bool) or not isinstance(destination, str | int):
            raise ValueError(f"destination is {destination!r}: give a worker's name, id or WorkerInfo")
        elif isinstance(destination, str):
            found = self.by_name.get(destination)
        else:
            found = self._by_rank.get(destination)
        if found is None:
            raise UnknownWorkerError(
                destination, [peer.info.name for peer in self.current()], dynamic=self._dynamic
            )
        return found

    def all(self) -> list[Peer]:
        """Returns all peers, by id."""
        peers = self.by_id.copy()
        return [peers[identifier] for identifier in sorted(peers)]

    def current(self) -> list[Peer]:
        """Returns the latest incarnation of each worker, by rank; of a dynamic group, those that are not lost."""
        by_rank = self._by_rank.copy()
        latest = [by_rank[rank] for rank in sorted(by_rank)]
        return [peer for peer in latest if peer.end is None] if self._dynamic else latest

    def connected(self) -> list[WorkerInfo]:
        """Returns the workers that have been connected and are not lost."""
        links = ((peer.info, peer.link) for peer in self.all())
        absent = (LinkState.UNCONNECTED, LinkState.LOST)
        return [info for info, link in links if link is not None and link.state not in absent]

    def close(self) -> None:
        """Reports nothing that becomes of them any more. Called on the event loop."""
        for peer in self.all():
            peer.begin_to_close()

    def traffic(self) -> dict[str, int]:
        """Returns the sums of what has gone between this worker and its peers."""
        names = ("messages_sent", "messages_received", "bytes_sent", "bytes_received")
        counts = [peer.traffic.counts() for peer in self.all() if peer.is_used]
        return dict(zip(names, map(sum, zip((0, 0, 0, 0), *counts, strict=True)), strict=True))

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns the state of each link by the worker's name: see `Link.describe`."""
        return {peer.info.name: peer.link.describe() for peer in self.all() if peer.link is not None}


def check_size(envelope: bytes, attached: Sequence[memoryview] = ()) -> None:
    """Raises SerializationError if receivers would refuse an envelope: it has too many bytes, or too many parts.

    What is attached is put into it where there is no socket.
    """
    nbytes = len(envelope) + sum(map(len, attached))
    problem = f"{nbytes} bytes, of {MAX_ENVELOPE_BYTES} at most"
    if nbytes <= MAX_ENVELOPE_BYTES:
        try:
            check_envelope(envelope)
        except DecodeError:
            problem = "too many parts"
        else:
            return
    raise SerializationError(
        "the message",
        f"its envelope has {problem}: too many tensors or references; stack small tensors into large ones",
    )
