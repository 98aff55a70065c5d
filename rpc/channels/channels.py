"""The channels of an agent, and those between it and each of its peers."""

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar, final

import torch

from ...net.host_identity import network_id
from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer
from ..transports.sockets import UNIX
from .base import AnnouncedPayloads, Channel, ChannelDependencies, ChannelPeer, PayloadLostError, StartTransfer
from .broadcast import BroadcastChannel, Broadcasts
from .buffers import BufferCache, keep_freed_memory
from .bulk import BulkChannel
from .chunked import ChunkedChannel
from .cuda.channel import CudaIpcChannel
from .cuda.devices import Devices
from .cuda.runtime import DeviceRuntime
from .shared_memory import SharedMemory, SharedMemoryChannel

__all__ = ["Channels", "LocalChannel", "PeerChannels"]

IDLE_TIMEOUT_S = 10.0
"""Seconds after which memory is given back that is kept for payloads, if nothing has used it."""

DRAIN_CHECK_S = 0.01
"""Seconds between two looks at what a worker that leaves has not sent."""


@final
class Channels:
    """What the channels of one agent share."""

    def __init__(
        self,
        dependencies: ChannelDependencies,
        load_devices: Callable[[], DeviceRuntime],
        used: Callable[[], Collection["PeerChannels"]],
    ) -> None:
        """Made on the event loop. `used` returns the channels to other workers that there are."""
        keep_freed_memory()
        self.dependencies = dependencies
        loop, executor, options = dependencies.loop, dependencies.executor, dependencies.options
        self.cache = BufferCache(options.channels.max_cached_bytes)
        self.memory = SharedMemory(loop, executor, options.channels)
        self.devices = Devices(loop, executor, options, load_devices)
        self.broadcasts = Broadcasts(dependencies, self.memory)
        self.network = network_id()
        """Which workers of this host have, too."""
        self._loop = loop
        self._used = used
        self._idle_check = loop.call_later(IDLE_TIMEOUT_S, self._remove_idle)

    def to(self, peer: ChannelPeer) -> "PeerChannels":
        """Makes the channels between this worker and another. Called on any thread."""
        return PeerChannels(peer, self)

    @property
    def groups(self) -> int:
        """The number of groups in which this worker broadcasts, or takes part."""
        return self.broadcasts.groups + sum(len(each.broadcast.groups) for each in self._used())

    def device_figures(self) -> Mapping[str, object]:
        """Returns how tensors on devices travel to workers that some were sent to, and memory in use in bytes."""
        described = ((each.info.name, each.cuda_ipc.describe()) for each in self._used())
        return {
            "channels": {name: how for name, how in described if how},
            "ipc_bytes": self.devices.limit.used,
            "pinned_bytes": self.devices.staging.pinned_bytes,
        }

    def _remove_idle(self) -> None:
        self._idle_check = self._loop.call_later(IDLE_TIMEOUT_S, self._remove_idle)
        self.cache.remove_idle()
        self.memory.remove_idle()
        for each in self._used():
            each.shared_memory.remove_idle()
            each.cuda_ipc.remove_idle()

    def stop(self) -> None:
        """Ends all broadcasts, and waits for their threads. Must not be called on the loop."""
        self.broadcasts.stop()
        for each in self._used():
            each.broadcast.stop()

    async def close(self) -> None:
        """Drops all payloads, and releases connections and threads. Called on the loop."""
        self._idle_check.cancel()
        self.devices.is_closed = True
        for each in self._used():
            each.drop(ConnectionError("this worker shuts down"))
        self.cache.close()
        await self.devices.close()


@final
class LocalChannel:
    """Copies large payloads of a worker's calls to itself.

    So a function's arguments are as independent of the caller's as on another worker.
    """

    name: ClassVar[str] = "local"

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._copies: dict[int, Buffer] = {}

    def send(self, data: memoryview) -> agent_pb2.Payload:
        """Copies the bytes."""
        number = next(self._numbers)
        self._copies[number] = torch.frombuffer(data, dtype=torch.uint8).clone().numpy().data
        return agent_pb2.Payload(local=number)

    def receive(self, payload: agent_pb2.Payload) -> Buffer:
        """Returns the copy, and keeps it no longer."""
        return self._copies.pop(payload.local)

    def discard(self, payload: agent_pb2.Payload) -> None:
        """Drops the copy."""
        self._copies.pop(payload.local, None)

    def drop(self, error: Exception) -> None:  # noqa: ARG002
        """Drops all copies."""
        self._copies.clear()


@final
class PeerChannels:
    """The channels between this worker and one peer. Those of a lost peer carry nothing."""

    def __init__(self, peer: ChannelPeer, channels: Channels) -> None:
        dependencies = channels.dependencies
        options = dependencies.options
        self.info = peer.info
        self.options = options.channels
        self.staging = channels.devices.staging
        self.announced = AnnouncedPayloads(options.channels.max_payload_bytes)
        self._peer = peer
        self._channels = channels
        may_share = UNIX in options.transports and peer.is_on_this_host and not peer.is_me
        self.shared_memory = SharedMemoryChannel(channels.memory, may_connect=may_share)
        self.cuda_ipc = CudaIpcChannel(peer, channels.devices, self.shared_memory)
        self.chunked = ChunkedChannel(peer, dependencies)
        self.bulk = BulkChannel(peer, dependencies, channels.cache, self.chunked)
        self.broadcast = BroadcastChannel(peer, channels.broadcasts, self.chunked)
        self.local = LocalChannel() if peer.is_me else None
        """For a worker's large payloads to itself."""
        all_of_them = self.shared_memory, self.cuda_ipc, self.chunked, self.bulk, self.broadcast
        self._by_name: dict[str, Channel] = {channel.name: channel for channel in all_of_them}
        if self.local is not None:
            self._by_name[self.local.name] = self.local

    @property
    def has_socket(self) -> bool:
        """Whether payloads can be attached to envelopes."""
        return self._peer.has_socket

    @property
    def large(self) -> str:
        """The name of the channel that large payloads go by now."""
        if self.local is not None:
            return self.local.name
        if self.shared_memory.is_connected:
            return self.shared_memory.name
        return self.bulk.name if self.bulk.is_connected else self.chunked.name

    def send_large(self, data: memoryview) -> tuple[agent_pb2.Payload, StartTransfer | None]:
        """Describes a payload that goes by no shared memory; returns also what starts to send it, if anything."""
        return self.bulk.send(data) if self.local is None else (self.local.send(data), None)

    def find(self, name: str) -> Channel | None:
        """Returns the channel of this name; None if the worker sends nothing by it."""
        return self._by_name.get(name)

    @property
    def queued_bytes(self) -> int:
        """The bytes of payloads that are in this worker's own memory until they are sent."""
        return self.bulk.queued_bytes + self.chunked.queued_bytes

    async def drain(self, seconds: float) -> None:
        """Waits until no payload is in this worker's own memory, or none of them has moved for so long."""
        loop, queued = self._channels.dependencies.loop, self.queued_bytes
        since = loop.time()
        while queued and loop.time() - since < seconds:
            await asyncio.sleep(DRAIN_CHECK_S)
            if (left := self.queued_bytes) < queued:
                queued, since = left, loop.time()

    def on_frame(self, frame: agent_pb2.Frame) -> None:
        """Handles what a frame tells of channels. Called on the loop. Raises ValueError if it is malformed."""
        self.bulk.on_frame(frame)
        if frame.HasField("devices"):
            self.cuda_ipc.on_frame(frame.devices)

    def drop(self, error: ConnectionError | PayloadLostError) -> None:
        """Drops what is on its way; see `Channel.drop`. Called on the loop."""
        for channel in self._by_name.values():
            channel.drop(error)
        self._channels.broadcasts.drop(self, is_lost=isinstance(error, ConnectionError))
