"""Parsers of rpc for what envelopes and frames tell of payloads: where they are, and segments of device memory."""

import asyncio
import concurrent.futures
import fcntl
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from google.protobuf.message import DecodeError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.channels.base import ChannelDependencies, PayloadLostError
from gradwire.rpc.channels.channels import Channels
from gradwire.rpc.channels.cuda.channel import MAX_MAPPED, CudaIpcChannel
from gradwire.rpc.channels.cuda.devices import FIRST_NUMBER, Devices
from gradwire.rpc.channels.payloads import EnvelopePayloads, body_of
from gradwire.rpc.channels.segments import SEALS
from gradwire.rpc.contracts.options import ChannelOptions, RpcBackendOptions
from gradwire.rpc.wire.parsing import parse_envelope, parse_frame
from gradwire.rpc.wire.tensors import decode_tensors
from hypothesis import strategies as st

from tests.fuzz.rpc_wire_targets import ME, MIB, PEER
from tests.fuzz.target import Target

__all__ = ["RPC_PAYLOAD_TARGETS"]

SEGMENT_BYTES = 4096

OPTIONS = ChannelOptions(max_payload_bytes=MIB, max_mapped_bytes=MIB)

_loop = asyncio.new_event_loop()


class _Executor:
    """Runs what is submitted at once."""

    poller = SimpleNamespace(unwatch=lambda _descriptor: None)

    def submit(self, task: Callable[..., None], *args: Any) -> None:
        task(*args)

    submit_urgent = submit

    def blocking(self) -> Any:
        return nullcontext()


class _Memory:
    """What a runtime of devices has mapped."""

    def __init__(self) -> None:
        self.is_closed = False

    def copy_to(self, target: torch.Tensor, offset: int) -> None:
        """Is not called: there are no devices."""

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class _Runtime:
    """Maps device memory."""

    def __init__(self) -> None:
        self.opened: list[_Memory] = []

    def find(self, _uuid: str) -> None:
        """Finds no device."""

    def open(self, _device: object, handle: bytes, _nbytes: int) -> _Memory:
        if not handle:
            raise RuntimeError("the handle is none")
        self.opened.append(_Memory())
        return self.opened[-1]


class _Peer:
    """The other worker, on the same host."""

    info = PEER
    end = None
    is_me = False
    is_on_this_host = True
    has_socket = True

    def __init__(self) -> None:
        self.sent: list[agent_pb2.Frame] = []
        self.ended: list[str] = []
        self.send_frame, self.abort = self.sent.append, self.ended.append


class _Channels:
    """The channels of one worker, which has a unix socket and bulk connections to the other one."""

    def __init__(self) -> None:
        executor: Any = _Executor()
        handshake: Any = SimpleNamespace(me=ME)
        sockets: Any = SimpleNamespace(on_malformed=lambda *_: None)
        self.peer: Any = _Peer()
        self.runtime: Any = _Runtime()
        options = RpcBackendOptions(channels=OPTIONS)
        dependencies = ChannelDependencies(_loop, executor, options, sockets, handshake, str)
        self.all = Channels(dependencies, lambda: self.runtime, lambda: [self.to_peer])
        self.to_peer = self.all.to(self.peer)
        segments = self.to_peer.shared_memory.connect()
        segments.connect(SimpleNamespace(flush_released=lambda: None))
        for number in (1, 2):
            segments.on_segment(number, SEGMENT_BYTES, _segment(), is_shared=number == 2)
        for _ in range(2):
            sent = segments.pool.put(memoryview(bytes(16)))
            assert sent is not None
            os.close(sent[0].descriptor)
        assert self.to_peer.bulk.on_offered(1)

    async def close(self) -> None:
        """Checks that nothing is left when the other worker is lost."""
        self.to_peer.drop(ConnectionError("the test is over"))
        for _ in range(16):  # the message notices that one payload is dropped, then others are
            await asyncio.sleep(0)
        assert (self.to_peer.announced.count, self.to_peer.announced.nbytes) == (0, 0)
        assert not self.peer.ended
        assert all(memory.is_closed for memory in self.runtime.opened)
        await self.all.close()


@cache
def _segment() -> int:
    """Returns a descriptor of shared memory."""
    made = os.memfd_create("segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(made, SEGMENT_BYTES)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, SEALS)
    return made


# Payloads.

SIZES = st.sampled_from([4, 16, SEGMENT_BYTES, SEGMENT_BYTES + 1, 0, MIB, MIB + 1, 2**64 - 1])
IDS = st.sampled_from([1, 2, 3, 2**64 - 1])
DEVICE_IDS = st.sampled_from([FIRST_NUMBER, FIRST_NUMBER + 1, 1])
PAYLOADS = st.one_of(
    st.builds(agent_pb2.Payload),
    st.builds(agent_pb2.Payload, inline=SIZES.map(lambda nbytes: bytes(min(nbytes, 16)))),
    st.builds(agent_pb2.Payload, local=IDS),
    st.builds(agent_pb2.Payload, attached=st.builds(agent_pb2.AttachedPayload, offset=SIZES, nbytes=SIZES)),
    st.builds(
        agent_pb2.Payload,
        segment=st.builds(agent_pb2.SegmentPayload, number=IDS, nbytes=SIZES, sent_back=st.booleans()),
    ),
    st.builds(agent_pb2.Payload, chunked=st.builds(agent_pb2.ChunkedPayload, transfer_id=IDS, nbytes=SIZES)),
    st.builds(agent_pb2.Payload, bulk=st.builds(agent_pb2.BulkPayload, bundle=IDS, transfer_id=IDS, nbytes=SIZES)),
    st.builds(
        agent_pb2.Payload,
        broadcast=st.builds(
            agent_pb2.BroadcastPayload,
            group=IDS,
            number=IDS,
            nbytes=SIZES,
            members=st.just([PEER.id, ME.id]),
            transfer_id=IDS,
        ),
    ),
    st.builds(
        agent_pb2.Payload,
        cuda_ipc=st.builds(agent_pb2.DevicePayload, number=DEVICE_IDS, nbytes=SIZES, offset=SIZES),
    ),
)
TENSORS = st.builds(
    agent_pb2.Tensor,
    dtype=st.sampled_from([agent_pb2.UINT8, agent_pb2.FLOAT32]),
    sizes=st.sampled_from([[4], [16], [SEGMENT_BYTES], [0]]),
    data=PAYLOADS,
)
ENVELOPES = st.builds(
    agent_pb2.Envelope,
    body=PAYLOADS,
    tensors=st.lists(TENSORS, max_size=3),
    attached=st.sampled_from([b"", bytes(16), bytes(40)]),
)

DEVICES = agent_pb2.DeviceFrame(
    segments=[
        agent_pb2.DeviceSegment(number=FIRST_NUMBER, size=SEGMENT_BYTES, handle=b"handle", target="cuda:0"),
    ]
)
"""A segment of device memory that is known before an envelope arrives."""


def find_payloads(data: bytes) -> None:
    """Finds the payloads of an envelope."""
    with suppress(DecodeError):
        envelope, _ = parse_envelope(data)
        _loop.run_until_complete(_find(envelope))


async def _find(envelope: agent_pb2.Envelope) -> None:
    channels = _Channels()
    with mock.patch("torch.cuda.device_count", return_value=1):
        channels.to_peer.on_frame(agent_pb2.Frame(devices=DEVICES))
    for _ in range(2):  # the same bytes again: they are in use, or awaited
        with suppress(ValueError):
            found: Any = EnvelopePayloads(channels.to_peer, envelope).collect()
            if not isinstance(found, concurrent.futures.Future):
                decode_tensors(envelope.tensors, found)
                body_of(envelope, found)
    del envelope
    found = None
    await channels.close()


# Segments of device memory.

SEGMENTS = st.builds(
    agent_pb2.DeviceSegment,
    number=DEVICE_IDS,
    size=st.sampled_from([SEGMENT_BYTES, 0, MIB, 2**63]),
    handle=st.sampled_from([b"handle", b"", bytes(5000)]),
    uuid=st.sampled_from(["GPU-1", ""]),
    target=st.sampled_from(["cuda:0", "cuda:0", "cuda:1", "cpu", "", "\u00e9", "cuda:99999999999999999999"]),
)
FRAMES = st.builds(
    agent_pb2.Frame,
    devices=st.builds(
        agent_pb2.DeviceFrame,
        segments=st.lists(SEGMENTS, max_size=4),
        refused=st.lists(DEVICE_IDS, max_size=2),
        reason=st.text(max_size=4),
        dropped=st.lists(DEVICE_IDS, max_size=2),
        closed=st.lists(DEVICE_IDS, max_size=2),
    ),
)


def map_device_memory(data: bytes) -> None:
    """Maps the segments of a frame, and drops some."""
    with suppress(DecodeError), mock.patch("torch.cuda.device_count", return_value=1):
        frame, _ = parse_frame(data)
        _loop.run_until_complete(_map(frame))


async def _map(frame: agent_pb2.Frame) -> None:
    released: list[int] = []
    peer: Any = _Peer()
    executor: Any = _Executor()
    runtime: Any = _Runtime()
    segments = SimpleNamespace(is_connected=True, mapped=SimpleNamespace(release=released.append))
    memory: Any = SimpleNamespace(segments=segments)
    devices = Devices(_loop, executor, RpcBackendOptions(channels=OPTIONS), lambda: runtime)
    channel = CudaIpcChannel(peer, devices, memory)
    with suppress(ValueError):
        channel.on_frame(frame.devices)
    assert sum(not memory.is_closed for memory in runtime.opened) <= MAX_MAPPED
    await asyncio.sleep(0)
    refused = [number for each in peer.sent for number in each.devices.refused]
    assert len(refused) + len(runtime.opened) == min(len(frame.devices.segments), MAX_MAPPED)
    channel.drop(PayloadLostError("the test is over"))
    for _ in range(2):
        await asyncio.sleep(0)
    assert all(memory.is_closed for memory in runtime.opened)
    await devices.close()


def _target(name: str, parse: Callable[[bytes], None], inputs: st.SearchStrategy[bytes], mebibytes: int) -> Target:
    return Target(name=f"rpc-{name}", parse=parse, inputs=inputs, max_bytes=mebibytes * MIB, is_slow=True)


RPC_PAYLOAD_TARGETS = (
    _target("payloads", find_payloads, ENVELOPES.map(agent_pb2.Envelope.SerializeToString), 4),
    _target("device-segments", map_device_memory, FRAMES.map(agent_pb2.Frame.SerializeToString), 4),
)
