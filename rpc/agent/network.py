"""An agent's connections: its gRPC server, a transport to every member, and the channels for payloads."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import grpc

from ...errors import RpcError
from ...net.addresses import format_address
from ...net.event_loop import acquire_event_loop
from ..channels.base import ChannelDependencies
from ..channels.channels import Channels, PeerChannels
from ..channels.chunked import ChunkedChannel, serve_chunks
from ..channels.cuda.runtime import DeviceRuntime
from ..channels.cuda.torch_runtime import TorchDevices
from ..contracts.agent import ControlMessages
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import Member, WorkerEnd, WorkerInfo, WorkerWatcher
from ..execution.executor import Executor
from ..membership.addresses import ListenAddress
from ..membership.evictions import Evictions, Vouching
from ..membership.roster import RosterFollower, RosterLog
from ..peers.link import Links
from ..peers.peer import MessageListener, Peer, PeerParts, Peers
from ..transports.base import Transport
from ..transports.grpc_endpoint import GrpcEndpoint, Handshake
from ..transports.grpc_stream import GrpcStream, serve_stream
from ..transports.liveness import Heartbeats, Pulse
from ..transports.outbox import StreamParts
from ..transports.sockets import TCP, UNIX, BulkSockets, SocketListener

__all__ = ["Network", "NetworkSeams"]

DRAIN_SECONDS = 5.0
"""Seconds that a closing worker waits for its peers to receive what is queued for them."""

FAREWELL_DIALS = 16
"""The number of unconnected workers that a failing worker dials to say goodbye."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSeams:
    """What fault injection and tests exchange.

    wrap: wraps the transport to a worker, which lives on an event loop, in another that changes what it does.
    load_devices: returns what copies tensors from CUDA devices and to them, when that is first needed.
    """

    wrap: Callable[[Transport, WorkerInfo, asyncio.AbstractEventLoop], Transport] = (
        lambda transport, _peer, _loop: transport
    )
    load_devices: Callable[[], DeviceRuntime] = TorchDevices


@final
class Network:
    """Made in three steps: the constructor, `listen`, and `open` once all members are known."""

    def __init__(
        self,
        me: WorkerInfo,
        options: RpcBackendOptions,
        group: str,
        roster: RosterLog,
        executor: Executor,
        seams: NetworkSeams = NetworkSeams(),
    ) -> None:
        """Makes a network that does not listen yet. See GrpcAgent, and its AgentFactories."""
        self.me = me
        self._roster = roster
        self._options = options
        self._executor = executor
        self._seams = seams
        self.peers = Peers(me, dynamic=roster.dynamic)
        self._endpoint = GrpcEndpoint(me.name, options.find_credentials(), options.liveness)
        self.audit = self._endpoint.audit
        self._events = acquire_event_loop()
        self._events.run(self._build(group))

    async def _build(self, group: str) -> None:
        loop, executor = self._events.loop, self._executor
        executor.poller.forbid_waits_here()
        self._follower = RosterFollower(self._roster, self.peers, self.add, self.let_in, executor)
        self._handshake = Handshake(group, self.me, self.peers.by_id, self._follower.learn, self._endpoint)
        kinds = [kind for kind in self._options.transports if kind in (UNIX, TCP)]
        sockets = self._sockets = SocketListener(loop, kinds, self._endpoint.identity, self.audit)
        bulk = BulkSockets(loop, sockets)
        dependencies = ChannelDependencies(
            loop, executor, self._options, bulk, self._handshake, self._open_channel
        )
        self.channels = Channels(dependencies, self._seams.load_devices, self._used_channels)
        pulse = self._pulse = Pulse()
        liveness = self._options.liveness
        self._vouching = Vouching(group, self._endpoint, self.peers, executor)
        self._evictions = Evictions(
            loop, executor, self.peers, self._follower, liveness.lease, self._vouching.ask_others
        )
        heartbeats = Heartbeats(loop, liveness, pulse)
        allocate = self.channels.cache.allocate
        streams = self._streams = StreamParts(loop, self._handshake, heartbeats, sockets, executor, allocate)
        exchange = grpc.stream_stream_rpc_method_handler(partial(serve_stream, streams, self.peers.by_id))
        transfer = grpc.stream_unary_rpc_method_handler(partial(serve_chunks, self._handshake, self._find_chunked))
        vouch = grpc.unary_unary_rpc_method_handler(self._vouching.serve)
        self._endpoint.serve({"Exchange": exchange, "Transfer": transfer, "Vouch": vouch})

    def listen(self, where: ListenAddress, messages: MessageListener, watchers: Sequence[WorkerWatcher]) -> str:
        """Starts serving; returns the address at which other workers dial: see `Member.address`.

        The watchers are told what becomes of other workers; more may be added until `admit`.
        """
        loop, wrap = self._events.loop, self._seams.wrap
        links = Links(loop, self._options.liveness, where, self._evictions, watchers, self._executor)
        self._parts = PeerParts(
            links,
            partial(GrpcStream, self._streams),
            lambda transport, peer: wrap(transport, peer, loop),
            self.channels,
            messages,
            self._options.flow_control,
        )
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

    def open(self, members: Sequence[Member], control: ControlMessages) -> None:
        """Sets the members; none of them is let in before `admit`. Changes of the roster are told by `control`."""
        self._evictions.open(control)
        self._follower.begin(members)

    def _open_channel(self, member: Member) -> Any:
        """Makes a gRPC channel to a member, on a connection that no other channel uses."""
        return self._endpoint.channel(member.info.name, member.address, use_local_subchannel_pool=1)

    def _used_channels(self) -> list[PeerChannels]:
        return [used for peer in self.peers.all() if (used := peer.used_channels) is not None]

    def _find_chunked(self, peer: int) -> ChunkedChannel:
        return self.peers.by_id[peer].channels.chunked

    def admit(self) -> None:
        """Accepts connections of the members from now on."""
        self._events.loop.call_soon_threadsafe(self.let_in)

    def add(self, member: Member) -> None:
        """Adds a worker. It is let in from now on, unless nobody is yet: see `admit`."""
        self.peers.add(Peer(member, self._parts, is_me=member.info.wire_id == self.me.wire_id))

    def let_in(self) -> None:
        """Accepts connections of all members. Called on the event loop."""
        self._handshake.open(self._roster.version)

    @property
    def is_loop_here(self) -> bool:
        """Whether the calling thread is that of the event loop."""
        return self._events.is_current

    def call_soon(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function on the event loop, after everything that has been queued before."""
        self._events.loop.call_soon_threadsafe(function, *args)

    def leave(self) -> None:
        """Removes this worker from the roster of a dynamic group, unless the store is gone."""
        if self._roster.dynamic and self.me.wire_id in self.peers.by_id:
            self._roster.try_to_leave(self.me.wire_id)

    def drain(self, seconds: float) -> None:
        """Waits until all large payloads are on their way, or some do not move; `seconds` at most, 0 for ever."""
        self._events.run(self._drain(seconds))

    async def _drain(self, seconds: float) -> None:
        drains = asyncio.gather(*(each.drain(DRAIN_SECONDS) for each in self._used_channels()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(drains, seconds or None)

    def disconnect(self, end: WorkerEnd) -> None:
        """Sends what is queued, except large payloads, says to all how this worker ends, and stops serving."""
        self._follower.close()
        self.channels.stop()
        self._events.run(self._disconnect(end))

    def release(self) -> None:
        """Releases the event loop, and the sockets. Called when the executor has ended."""
        self._streams.release()
        self._events.release()

    async def _disconnect(self, end: WorkerEnd) -> None:
        self.peers.close()
        self._evictions.close()
        peers = self.peers.all()
        # A failure is told also to workers without a connection: the lowest ids, which lead collectives.
        told = [] if end.orderly else [peer for peer in peers if peer.absence is None][:FAREWELL_DIALS]
        await asyncio.gather(*(peer.transport.close(DRAIN_SECONDS, end, dial=peer in told) for peer in peers))
        await self._sockets.close()
        await self.channels.close()
        self._pulse.close()
        await self._endpoint.stop()
