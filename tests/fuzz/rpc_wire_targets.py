"""Parsers of rpc for what is in messages: frames, envelopes, tensors, errors and profiles."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from google.protobuf.message import DecodeError, Message
from gradwire.net.security import Audit
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.policy import Policy
from gradwire.rpc.contracts.worker import MAX_REASON, WorkerEnd, WorkerInfo
from gradwire.rpc.membership.evictions import MAX_REQUEST_BYTES, parse_question
from gradwire.rpc.profiling.sessions import events_from_tensor, events_to_tensor, merge_events, relabel
from gradwire.rpc.transports.grpc_endpoint import RefusedError
from gradwire.rpc.wire import parsing
from gradwire.rpc.wire.failures import decode_failure, encode_failure
from gradwire.rpc.wire.parsing import SMALL_BYTES, parse_envelope, parse_frame
from gradwire.rpc.wire.plain_pickle import RestrictedReader
from gradwire.rpc.wire.tensor_memory import MAX_GAP_FACTOR
from gradwire.rpc.wire.tensors import decode_tensors, encode_tensors
from hypothesis import strategies as st
from torch.autograd.profiler_util import EventList

from tests.fuzz.target import Target

__all__ = ["AUDIT", "ENVELOPES", "FAILURES", "ME", "MIB", "NUMBERS", "PEER", "RPC_WIRE_TARGETS"]

MIB = 2**20

ME, PEER = WorkerInfo("me", 0), WorkerInfo("peer", 1)

AUDIT = Audit(ME.name)

# Frames and envelopes.

SMALL_PARSED_BYTES = 60 << 10
"""What a message takes that is parsed without a look at it, by parsing.SMALL_BYTES."""

NUMBERS = st.sampled_from([0, 1, 2, 77, 2**31, 2**63, 2**64 - 1])
WORKER_IDS = st.sampled_from([0, 1, 2, 2**32 - 1])
IDS = st.builds(agent_pb2.GlobalId, worker_id=WORKER_IDS, number=NUMBERS)
REFERENCES = st.builds(agent_pb2.Reference, worker_id=WORKER_IDS, number=NUMBERS, fork=NUMBERS, owner=WORKER_IDS)
SENDS = st.builds(
    agent_pb2.WorkerSends,
    worker_id=WORKER_IDS,
    message_ids=st.lists(NUMBERS, max_size=4),
    omitted=st.lists(NUMBERS, max_size=4),
)
PAYLOADS = st.one_of(
    st.builds(agent_pb2.Payload, inline=st.binary(max_size=8)),
    st.builds(agent_pb2.Payload, chunked=st.builds(agent_pb2.ChunkedPayload, transfer_id=NUMBERS, nbytes=NUMBERS)),
    st.builds(
        agent_pb2.Payload,
        segment=st.builds(agent_pb2.SegmentPayload, number=NUMBERS, nbytes=NUMBERS, sent_back=st.booleans()),
    ),
    st.builds(
        agent_pb2.Payload,
        broadcast=st.builds(agent_pb2.BroadcastPayload, nbytes=NUMBERS, members=st.lists(WORKER_IDS, max_size=4)),
    ),
)
ENVELOPES = st.builds(
    agent_pb2.Envelope,
    id=NUMBERS,
    type=st.integers(0, 70),
    body=PAYLOADS,
    tensors=st.lists(st.builds(agent_pb2.Tensor, sizes=st.lists(st.integers(-1, 9), max_size=9)), max_size=3),
    needed_values=st.lists(IDS, max_size=3),
    references=st.lists(REFERENCES, max_size=3),
    autograd=st.builds(agent_pb2.AutogradHeader, closure=st.lists(SENDS, max_size=3)),
    control=st.builds(
        agent_pb2.ControlHeader,
        messages=st.lists(
            st.builds(
                agent_pb2.ControlMessage,
                kind=st.text(max_size=4),
                numbers=st.lists(NUMBERS, max_size=4),
                pickled=st.binary(max_size=4),
            ),
            max_size=3,
        ),
    ),
    trace=st.lists(
        st.builds(agent_pb2.TraceField, name=st.text(max_size=8), value=st.text(max_size=60)), max_size=3
    ),
)
SEGMENTS = st.builds(agent_pb2.DeviceSegment, number=NUMBERS, size=NUMBERS, handle=st.binary(max_size=4))
FRAMES = st.builds(
    agent_pb2.Frame,
    envelopes=st.lists(ENVELOPES, max_size=3),
    hello=st.builds(agent_pb2.Hello, worker_name=st.text(max_size=4)),
    departure=st.builds(agent_pb2.Departure, kind=st.integers(0, 3), reason=st.text(max_size=20)),
    devices=st.builds(
        agent_pb2.DeviceFrame, segments=st.lists(SEGMENTS, max_size=3), dropped=st.lists(NUMBERS, max_size=4)
    ),
)


def parse_one_frame(data: bytes) -> None:
    """Parses a frame."""
    with suppress(DecodeError):
        frame, nbytes = parse_frame(data)
        _check_estimate(frame, data, nbytes)
        assert len(WorkerEnd.from_proto(frame.departure).reason) <= MAX_REASON + 1


def parse_one_envelope(data: bytes) -> None:
    """Parses an envelope."""
    with suppress(DecodeError):
        envelope, nbytes = parse_envelope(data)
        _check_estimate(envelope, data, nbytes)


QUESTIONS = st.builds(
    agent_pb2.VouchRequest,
    group=st.text(max_size=20),
    worker_name=st.text(max_size=20),
    member_id=WORKER_IDS,
)


def parse_one_question(data: bytes) -> None:
    """Parses a question about a member."""
    with suppress(RefusedError):
        assert len(parse_question(data).worker_name) <= MAX_REQUEST_BYTES


def _check_estimate(message: Message, data: bytes, nbytes: int) -> None:
    """Checks that a message does not take more memory than was known before it was parsed."""
    taken = _parts_bytes(message)
    assert taken <= nbytes - len(data) if len(data) > SMALL_BYTES else taken <= SMALL_PARSED_BYTES


def _parts_bytes(message: Message) -> int:
    """Returns what the parts of a message take in memory, by counting them."""
    nbytes = 0
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                nbytes += parsing._MESSAGE_BYTES + _parts_bytes(part)
        elif field.is_repeated:
            is_text = field.type in (field.TYPE_STRING, field.TYPE_BYTES)
            nbytes += len(value) * (parsing._STRING_BYTES if is_text else parsing._SCALAR_BYTES)
    return nbytes


# Tensors.


def _make_tensors() -> list[torch.Tensor]:
    base = torch.arange(24.0).view(4, 6)
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]])
    channels = torch.tensor([0.5, 0.25]), torch.tensor([0, 1])
    with warnings.catch_warnings():  # that support of sparse layouts is new
        warnings.simplefilter("ignore")
        return [
            base,
            base[1:3],  # shares the memory of `base`
            base.t(),
            torch.arange(24).view(2, 3, 4).permute(2, 0, 1)[:, :, 1:],
            torch.randn(3, dtype=torch.complex64).conj(),
            torch.ones(2, 1).expand(2, 3),
            torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)[:, :, None, 1:].expand(4, 2, 5, 2),
            torch.arange(6.0).unfold(0, 3, 1),
            torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True),
            torch.zeros(5, dtype=torch.float8_e5m2),
            torch.empty(0, 3),
            torch.tensor(data=True),
            torch.empty(3, 2, device="meta"),
            torch.sparse_coo_tensor(indices, torch.ones(3), (2, 3)),
            torch.eye(4).to_sparse_csr(),
            torch.eye(4).to_sparse_csc(),
            torch.eye(4).to_sparse_bsr((2, 2)),
            torch.eye(4).to_sparse_bsc((2, 2)),
            torch.quantize_per_tensor(torch.ones(3), 0.5, 2, torch.quint8),
            torch.quantize_per_channel(torch.ones(2, 3), *channels, 0, torch.qint8),
        ]


TENSORS = st.lists(st.sampled_from(_make_tensors()), min_size=1, max_size=8)


def _envelope_of(tensors: list[torch.Tensor]) -> bytes:
    def put(data: memoryview) -> agent_pb2.Payload:
        return agent_pb2.Payload(inline=bytes(data))

    messages = encode_tensors(tensors, put, put_gathered=lambda gathered: put(gathered.joined()))
    return agent_pb2.Envelope(tensors=messages).SerializeToString()


def decode_all_tensors(data: bytes) -> None:
    """Decodes the tensors of an envelope, whose memory is in proportion to their bytes."""
    with suppress(DecodeError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        envelope, _ = parse_envelope(data)
        tensors = decode_tensors(envelope.tensors, lambda payload: payload.inline)
        dense = [each.untyped_storage() for each in tensors if each.layout is torch.strided and not each.is_meta]
        storages = {storage.data_ptr(): storage.nbytes() for storage in dense}
        assert sum(storages.values()) <= MAX_GAP_FACTOR * len(data)


# Errors.

reader = RestrictedReader(ME, Policy(accepts="plain"), Audit(ME.name))

FAILURES = st.sampled_from(
    [ValueError("text", 3), KeyError("key"), FileNotFoundError(2, "no such file", "name"), SystemExit(3)]
).map(encode_failure)


def read_failure(data: bytes) -> None:
    """Reads the error that a worker answers with."""
    assert isinstance(decode_failure(data, PEER.name, partial(reader.load, PEER)), Exception)


# Profiles.

TIMES = st.sampled_from([0, 1000, 2000, 10**18, 2**63 - 1, -(2**63)])
EVENTS = st.lists(
    st.builds(
        agent_pb2.ProfileEvent,
        name=st.sampled_from(["aten::add", "", "\u00e9"]),
        node_id=WORKER_IDS,
        start_ns=TIMES,
        end_ns=TIMES,
        thread=st.integers(-1, 2),
        shapes=st.lists(st.builds(agent_pb2.Sizes, sizes=st.lists(st.integers(0, 3), max_size=3)), max_size=2),
        stack=st.lists(st.text(max_size=3), max_size=2),
        kernels=st.lists(st.builds(agent_pb2.Kernel, name=st.just("k"), duration_us=st.floats()), max_size=2),
        asynchronous=st.booleans(),
    ),
    max_size=6,
).map(lambda events: events_to_tensor(events).numpy().tobytes())

BEGIN_NS = 10**18
"""When the profiled call began, in nanoseconds of Unix time."""

MAX_MERGED = 64
"""Events that are made objects of torch: each takes some 2 KiB."""


def read_profile(data: bytes) -> None:
    """Reads the events of a remote function, and adds them to a profile."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    try:
        events = events_from_tensor(tensor)
    except ValueError:
        return
    relabel(events, "call", BEGIN_NS, BEGIN_NS + 1000)
    merge_events(EventList(), events[:MAX_MERGED], BEGIN_NS)


def _target(name: str, parse: Callable[[bytes], Any], inputs: st.SearchStrategy[bytes], mebibytes: int) -> Target:
    return Target(name=f"rpc-{name}", parse=parse, inputs=inputs, max_bytes=mebibytes * MIB)


RPC_WIRE_TARGETS = (
    _target("frames", parse_one_frame, FRAMES.map(agent_pb2.Frame.SerializeToString), 4),
    _target("envelopes", parse_one_envelope, ENVELOPES.map(agent_pb2.Envelope.SerializeToString), 4),
    _target("questions", parse_one_question, QUESTIONS.map(agent_pb2.VouchRequest.SerializeToString), 1),
    _target("tensors", decode_all_tensors, TENSORS.map(_envelope_of), 2),
    _target("failures", read_failure, FAILURES, 2),
    _target("profiles", read_profile, EVENTS, 4),
)
