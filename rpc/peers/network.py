"""An agent's connections: its gRPC server, a transport to every member, and the channels for payloads."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import grpc

from ...c10d.addresses import format_address
from ...c10d.event_loop import acquire_event_loop
from ...errors import EvictedError, LossCause, RpcError, UnknownWorkerError, WorkerLostError, WorkerSuspectError
from ...proto.v1 import agent_pb2
from ..channels.broadcast.channel import BroadcastChannel
from ..channels.broadcast.sending import Broadcast
from ..channels.bulk.buffers import BufferCache
from ..channels.bulk.channel import BulkChannel
from ..channels.chunked import ChunkedChannel
from ..channels.cuda.channel import CudaIpcChannel
from ..channels.cuda.runtime import DeviceRuntime
from ..channels.cuda.torch_runtime import TorchDevices
from ..channels.inline import InlineChannel
from ..channels.local import LocalChannel
from ..channels.payload_writer import PayloadWriter
from ..channels.router import ChannelRouter
from ..channels.shared_memory.channel import SharedMemoryChannel
from ..contracts.control import ControlMessages
from ..contracts.messages import Outgoing
from ..contracts.options import RpcBackendOptions
from ..contracts.roster_version import RosterVersion
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd
from ..execution.executor import Executor
from ..execution.futures import ReadAnswer
from ..membership.addresses import ListenAddress
from ..membership.directory import Directory
from ..membership.members import Member
from ..membership.roster_log import RosterLog
from ..transports.base import Connecting, Transport, TransportClosedError
from ..transports.bulk_sockets import BulkSockets
from ..transports.grpc_calls import StreamParts
from ..transports.grpc_endpoint import GrpcEndpoint
from ..transports.grpc_streams import GrpcStreams
from ..transports.handshake import Handshake
from ..transports.heartbeat import Heartbeats
from ..transports.loopback import LoopbackTransport
from ..transports.pulse import Pulse
from ..transports.settings import DRAIN_SECONDS, FAREWELL_DIALS
from ..transports.socket_parts import FrameListener, SocketParts
from ..transports.sockets import TCP, UNIX, SocketListener
from .connections import Connections
from .envelope_limit import LARGE_BYTES, check_size
from .evictions import Evictions
from .incoming import Incoming
from .links import Absence, Links
from .network_listener import NetworkListener
from .newcomers import Newcomers
from .roster_follower import RosterFollower
from .vouching import Vouching

__all__ = ["Network"]


Wrap = Callable[[Transport, WorkerInfo, asyncio.AbstractEventLoop], Transport]
"""Wraps a transport to a worker, which lives on an event loop, in another that changes what it does."""


@final
class Network:
    """Made in three steps: the constructor, `listen`, and `open` once all members are known."""

    def __init__(
        self,
        me: WorkerInfo,
        options: RpcBackendOptions,
        group: str,
        roster: RosterLog | None,
        executor: Executor,
        wrap: Wrap = lambda transport, _peer, _loop: transport,
        load_devices: Callable[[], DeviceRuntime] = TorchDevices,
    ) -> None:
        """Makes a network that does not listen yet.

        Args:
            me: this worker.
            options: the agent's.
            group: the name of the group, unique among all groups.
            roster: the log of joins and leaves; None in a group that nobody joins or leaves.
            executor: its threads read the sockets.
            wrap: wraps every transport.
            load_devices: returns what copies tensors from CUDA devices and to them, when that is first needed.
        """
        self.me = me
        self._roster = roster
        self._is_dynamic = roster is not None and roster.dynamic
        self._options = options
        self._executor = executor
        self._listener: NetworkListener  # given to `listen`, before which nothing is reported
        self._wrap = wrap
        self._directory = Directory()
        self._transports: dict[int, Transport] = {}
        self._closing = False
        self._endpoint = GrpcEndpoint(me.name, options.find_credentials(), options.liveness)
        self.audit = self._endpoint.audit
        self._events = acquire_event_loop()
        self._events.run(self._build(group, load_devices))

    async def _build(self, group: str, load_devices: Callable[[], DeviceRuntime]) -> None:
        loop, executor, channels = self._events.loop, self._executor, self._options.channels
        executor.poller.forbid_waits_here()
        roster = self._roster
        learn = Newcomers(self.me, roster, executor, self._follow).learn if roster is not None else None
        self._handshake = Handshake(group, self.me, learn, self._endpoint)
        memory = self._shared_memory = SharedMemoryChannel(loop, executor, channels)
        kinds = [kind for kind in self._options.transports if kind in (UNIX, TCP)]
        sockets = self._sockets = SocketListener(loop, kinds, self._endpoint.identity, self.audit)
        bulk = BulkSockets(loop, sockets, self._directory.incarnation, self._is_on_this_host, self._send_frame)
        self.cuda_ipc = CudaIpcChannel(loop, executor, memory, self._send_frame, self._options, load_devices)
        listeners: list[FrameListener] = [bulk, self.cuda_ipc] if UNIX in kinds else [bulk]
        pulse, cache = Pulse(), BufferCache(channels.max_cached_bytes)
        self._pulse = pulse
        same_host, allocate = self._is_on_this_host, cache.allocate
        parts = SocketParts(kinds, sockets, executor, same_host, memory.listener, listeners, pulse, allocate)
        liveness = self._options.liveness
        self.links = Links(loop, liveness, self._endpoint)
        self._follower = None
        if roster is not None:
            self._follower = RosterFollower(self.me, roster, self._directory, self.links, self)
        self._vouching = Vouching(self.me, group, self._endpoint, self.links, self._directory, executor)
        ask, follow = self._vouching.ask_others, self._follow
        self._evictions = Evictions(self.me, loop, executor, self.links, roster, liveness.lease, ask, follow)
        self.incoming = Incoming(loop, self.links)
        heartbeats = Heartbeats(loop, liveness, pulse)
        self._streams = GrpcStreams(StreamParts(loop, self._handshake, self.incoming, parts, heartbeats))
        chunks = ChunkedChannel(
            loop, self._handshake, self._open_channel, channels, self._streams.abort, self._streams.break_off
        )
        self.broadcasts = BroadcastChannel(
            loop, self.me.wire_id, chunks, memory, self._may_share_memory, channels, self._options.broadcasts
        )
        self._router = ChannelRouter(
            channels,
            self.me.wire_id,
            small=InlineChannel(),
            bulk=BulkChannel(loop, bulk, executor, chunks, channels, self._has_socket, cache),
            chunked=chunks,
            local=LocalChannel(),
            shared_memory=memory,
            cuda_ipc=self.cuda_ipc,
            broadcast=self.broadcasts,
            has_socket=self._has_socket,
        )
        exchange = grpc.stream_stream_rpc_method_handler(self._streams.serve)
        transfer = grpc.stream_unary_rpc_method_handler(chunks.serve)
        vouch = grpc.unary_unary_rpc_method_handler(self._vouching.serve)
        self._endpoint.serve({"Exchange": exchange, "Transfer": transfer, "Vouch": vouch})

    def listen(self, where: ListenAddress, listener: NetworkListener) -> str:
        """Starts serving, and reports to a listener from now on.

        Returns:
            The address at which other workers dial: see `Member.address`.
        """
        self._listener = listener
        self.links.listen(
            listener,
            Connections(
                self._streams, self._transports, self._wrap_transport, self._router, self._evictions, where
            ),
        )
        self.incoming.listen(self._router, listener)
        self._endpoint.reach = where.reach
        self._vouching.where = where
        self._sockets.set_address(where.bind, where.advertised, where.ports)
        if where.directory is not None:
            return self._events.run(self._endpoint.listen_for_user(where.directory))
        try:
            port = where.ports.choose(
                where.bind, lambda port: self._events.run(self._endpoint.listen(format_address(where.bind, port)))
            )
        except OSError as error:
            raise RpcError(f"worker {self.me.name!r} cannot listen: {error.strerror}") from error
        return format_address(where.advertised, port)

    @property
    def _members(self) -> Mapping[int, Member]:
        return self._directory.members

    def open(self, members: Sequence[Member], control: ControlMessages) -> None:
        """Sets the members; none of them is let in before `admit`. Changes of the roster are told by `control`."""
        self._evictions.open(control)
        if self._follower is not None:
            self._follower.begin(members)
        else:
            for member in sorted(members, key=lambda member: member.info.wire_id):
                self.add(member)

    def _follow(self) -> None:
        if self._follower is not None:
            self._follower.follow()

    def _open_channel(self, peer: int) -> Any:
        """Makes a gRPC channel to a member, on a connection that no other channel uses."""
        member = self._members[peer]
        return self._endpoint.channel(member.info.name, member.address, use_local_subchannel_pool=1)

    def _send_frame(self, peer: int, frame: agent_pb2.Frame) -> None:
        self._streams.send_frame(peer, frame)

    def _may_share_memory(self, peer: int) -> bool:
        return UNIX in self._options.transports and self._is_on_this_host(peer)

    def _has_socket(self, peer: int) -> bool:
        return self._transports[peer].name in (UNIX, TCP)

    def _is_on_this_host(self, peer: int) -> bool:
        return self._members[peer].network == self._members[self.me.wire_id].network

    def admit(self) -> None:
        """Accepts connections of the members from now on."""
        self._events.loop.call_soon_threadsafe(self.let_in)

    def add(self, member: Member) -> None:
        """Adds a worker, which is not let in yet."""
        identifier = member.info.wire_id
        transport: Transport
        if identifier == self.me.wire_id:
            transport = LoopbackTransport(self.me, self.incoming)
        else:
            transport = self._streams.add(member.info, member.address)
            self.links.add(member.info, member.address)
        self._transports[identifier] = self._wrap_transport(transport, member.info)
        self._directory.add(member)

    def _wrap_transport(self, transport: Transport, peer: WorkerInfo) -> Transport:
        return self._wrap(transport, peer, self._events.loop)

    def let_in(self) -> None:
        """Accepts connections of all members. Called on the event loop."""
        version = self._roster.version if self._roster is not None else RosterVersion()
        self._handshake.open(self._directory.infos(), version)

    def on_joined(self, worker: WorkerInfo) -> None:
        """Reports a member that has joined."""
        self._listener.on_peer_joined(worker)

    @property
    def by_name(self) -> Mapping[str, WorkerInfo]:
        """The latest incarnations of all members, by name. Always the same object."""
        return self._directory.by_name

    @property
    def incarnations(self) -> Mapping[int, WorkerInfo]:
        """All incarnations of all workers, by wire id. Always the same object."""
        return self._directory.incarnations

    @property
    def lost(self) -> Mapping[int, WorkerEnd]:
        """The ends of the lost workers, by id."""
        return self.links.lost

    def workers(self) -> list[WorkerInfo]:
        """Returns the latest incarnations of all members by id; of a dynamic group, those that are not lost."""
        workers = self._directory.latest()
        if self._is_dynamic:
            workers = [worker for worker in workers if worker.wire_id not in self.lost]
        return workers

    def worker(self, destination: object) -> WorkerInfo:
        """Returns the latest incarnation of the member with this name, id or WorkerInfo.

        Raises:
            UnknownWorkerError: there is no such member.
            ValueError: the destination is neither a name, an id nor a WorkerInfo.
        """
        found = self._directory.find(destination)
        if found is None:
            known = [worker.name for worker in self.workers()]
            raise UnknownWorkerError(destination, known, dynamic=self._is_dynamic)
        return found

    def incarnation(self, wire_id: int) -> WorkerInfo:
        """Returns the worker, current or former, with this wire id. Raises UnknownWorkerError without one."""
        return self._directory.incarnation(wire_id)

    def queued_bytes(self, worker: int) -> int:
        """Returns the bytes for a worker, except in shared memory, that the operating system has not taken yet."""
        if self._closing or worker in self.lost:
            return 0
        return self._transports[worker].queued_bytes + self._router.queued_bytes(worker)

    def transport_names(self) -> dict[str, str]:
        """Returns the name of the transport to each member, by the member's name."""
        return {worker.name: self._transports[worker.wire_id].name for worker in self.workers()}

    def channel_names(self) -> dict[str, str]:
        """Returns the name of the channel for large payloads to each member, by the member's name."""
        return {worker.name: self._router.name_for(worker.wire_id) for worker in self.workers()}

    def writer(self, worker: WorkerInfo, broadcast: Broadcast | None = None) -> PayloadWriter:
        """Returns a writer for the payloads of an envelope; `broadcast` is shared with other envelopes."""
        return self._router.writer(worker.wire_id, broadcast)

    def broadcast(self, workers: Sequence[WorkerInfo]) -> Broadcast | None:
        """Returns what envelopes to these workers share; None if they share nothing."""
        return self.broadcasts.broadcast(
            [worker.wire_id for worker in workers if worker.wire_id not in self.links.absent]
        )

    def answer_reader(self, worker: WorkerInfo) -> ReadAnswer | None:
        """Returns what has a thread wait for an answer of a worker and read it; None for this worker."""
        return self._transports[worker.wire_id].read_answer if worker.wire_id != self.me.wire_id else None

    def connect(self, worker: WorkerInfo) -> Connecting:
        """Connects to a worker now, so that its loss is noticed; see `Transport.connect`."""
        return self._transports[worker.wire_id].connect()

    def absence(self, worker: WorkerInfo) -> Absence | None:
        """Returns why nothing can be sent to a worker now; None if something can."""
        return absent.get(worker.wire_id) if (absent := self.links.absent) else None

    def check_present(self, worker: WorkerInfo) -> None:
        """Raises WorkerLostError or WorkerSuspectError if a worker is known to be lost, or suspect."""
        if (absence := self.absence(worker)) is not None:
            raise absence.as_error(worker.name)

    def send(self, worker: WorkerInfo, envelope: bytes, attached: Sequence[memoryview] = ()) -> int:
        """Queues an envelope, and the bytes that are attached to it.

        Returns:
            A ticket for `withdraw`.

        Raises:
            WorkerLostError: the worker is lost.
            WorkerSuspectError: the connection to it is broken.
            SendFailedError: it was not sent for another reason.
            SerializationError: the envelope is larger than a frame can be.
        """
        if len(envelope) > LARGE_BYTES:
            check_size(envelope, attached)
        try:
            return self._transports[worker.wire_id].send(envelope, attached)
        except TransportClosedError as error:
            raise self._absence_error(worker, error) from None

    def _absence_error(
        self, worker: WorkerInfo, error: TransportClosedError
    ) -> WorkerLostError | WorkerSuspectError | EvictedError:
        absence = self.absence(worker)
        if absence is None:  # the event loop is about to learn it
            end = WorkerEnd(LossCause.DISCONNECTED, str(error))
            absence = Absence(end, is_lost=self._closing or worker.wire_id == self.me.wire_id)
        return absence.as_error(worker.name)

    @property
    def is_loop_here(self) -> bool:
        """Whether the calling thread is that of the event loop."""
        return self._events.is_current

    def call_soon(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function on the event loop, after everything that has been queued before."""
        self._events.loop.call_soon_threadsafe(function, *args)

    def withdraw(self, sent: Outgoing, payloads: Sequence[agent_pb2.Payload] = ()) -> bool:
        """Takes an envelope and its payloads back if nothing is on its way; on the loop if there are any."""
        # All or nothing: a payload without its envelope would hold up those after it.
        can = self._router.can_withdraw(sent.destination.wire_id, payloads)
        if not can or not self._transports[sent.destination.wire_id].withdraw(sent.ticket, sent.beginning()):
            return False
        self._router.withdraw(sent.destination.wire_id, payloads)
        return True

    def leave(self) -> None:
        """Removes this worker from the roster of a dynamic group, unless the store is gone."""
        if self._roster is not None and self._is_dynamic and self.me.wire_id in self._members:
            self._roster.try_to_leave(self.me.wire_id)

    def disconnect(self, end: WorkerEnd) -> None:
        """Sends what is queued, says goodbye to all peers and stops serving.

        Args:
            end: how this worker ends, for the goodbye.
        """
        self._closing = True
        if self._follower is not None:
            self._follower.close()
        self.broadcasts.stop()
        self._events.run(self._disconnect(end))

    def release(self) -> None:
        """Releases the event loop, and the sockets. Called when the executor has ended."""
        self._streams.release()
        self._events.release()

    async def _disconnect(self, end: WorkerEnd) -> None:
        self.links.close()
        self._evictions.close()
        # A failure is told also to workers without a connection: the lowest ids, which lead collectives.
        told = () if end.orderly else sorted(self._transports.keys() - self.links.absent.keys())[:FAREWELL_DIALS]
        transports = self._transports.items()
        await asyncio.gather(*(t.close(DRAIN_SECONDS, end, dial=peer in told) for peer, t in transports))
        await asyncio.gather(*(channel.close() for channel in self._router.channels))
        await self._sockets.close()
        self._pulse.close()
        await self._endpoint.stop()
