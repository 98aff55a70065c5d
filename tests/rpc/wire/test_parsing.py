"""Bytes from peers are parsed only if that takes a bounded amount of memory."""

import contextlib
import socket
import struct
import threading

import pytest
import torch
from google.protobuf.message import DecodeError
from gradwire.errors import SerializationError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.peers.peer import check_size
from gradwire.rpc.profiling.sessions import events_from_tensor
from gradwire.rpc.transports.envelope_socket import EnvelopeSocket, FrameReader
from gradwire.rpc.wire import parsing
from gradwire.rpc.wire.parsing import (
    SMALL_BYTES,
    check_envelope,
    parse_chunks,
    parse_envelope,
    parse_events,
    parse_frame,
)
from hypothesis import given
from hypothesis import strategies as st

MIB = 1 << 20

DENSE = {
    "envelopes": b"\x0a\x00",
    "tensors": b"\x0a\x80\x10" + b"\x22\x00" * 1024,
    "parts of tensors": b"\x0a\x83\x10\x22\x80\x10" + b"\x2a\x00" * 1024,
    "places of one payload": b"\x0a\x83\x10\x1a\x80\x10" + b"\x12\x00\x22\x00" * 512,
    "references": b"\x0a\x80\x10" + b"\x2a\x00" * 1024,
    "control messages": b"\x0a\x83\x10\x3a\x80\x10" + b"\x12\x00" * 1024,
    "device segments": b"\x4a\x80\x10" + b"\x0a\x00" * 1024,
    "released segments": b"\x4a\x83\x10\x22\x80\x10" + b"\x01" * 2048,
    "strides": b"\x0a\x86\x10\x22\x83\x10\x3a\x80\x10" + b"\x01" * 2048,
    "sizes that are not packed": b"\x0a\x83\x10\x22\x80\x10" + b"\x10\x01" * 1024,
}
"""By what they are full of: fields of a Frame that take far more memory than bytes."""


def test_a_dense_frame_is_refused_before_it_takes_memory(python):
    """16 MiB took up to 0.9 GB; here an eighth of it. In a process of its own, whose memory is limited."""
    code = f"""if True:
        import resource
        from google.protobuf.message import DecodeError
        from gradwire.rpc.wire import parsing
        parsing.MAX_PARSED_BYTES >>= 3  # the walk to it takes a second
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, used + 2**25))
        for what, field in {DENSE!r}.items():
            data = field * (2 * 2**20 // len(field))
            try:
                parsing.parse_frame(data)
            except DecodeError as error:
                assert "memory" in str(error), (what, error)
            else:
                raise SystemExit(what + " were parsed")
    """
    done = python.run("-c", code)
    assert done.returncode == 0, done.stderr


def test_ordinary_messages_are_parsed_as_they_are():
    envelope = agent_pb2.Envelope(id=1, body=agent_pb2.Payload(inline=bytes(3000)))
    for _ in range(2000):
        tensor = envelope.tensors.add(dtype=1, sizes=[3, 4], strides=[1, 3])
        tensor.data.inline = bytes(48)
        envelope.references.add(worker_id=1, number=5, fork=5)
        envelope.needed_values.add(worker_id=1).number = 5
    data = envelope.SerializeToString()
    parsed, nbytes = parse_envelope(data)
    assert parsed == envelope
    assert len(data) < nbytes < 20 * len(data)
    frame = agent_pb2.Frame(envelopes=[envelope] * 3)
    assert parse_frame(frame.SerializeToString())[0] == frame
    chunks = agent_pb2.Chunks(chunks=[agent_pb2.Chunk(transfer_id=1, data=bytes(2000))])
    assert parse_chunks(chunks.SerializeToString()) == chunks


def test_payloads_cost_nothing_but_their_bytes():
    envelope = agent_pb2.Envelope(id=1, body=agent_pb2.Payload(inline=bytes(8 * MIB)))
    assert check_envelope(envelope.SerializeToString()) < 1000


def test_profiles_are_bounded(monkeypatch):
    """They are payloads, so nothing has looked at them before."""
    monkeypatch.setattr(parsing, "MAX_EVENTS_BYTES", 100_000)
    event = agent_pb2.ProfileEvent(name="x", shapes=[agent_pb2.Sizes(sizes=[2])])
    assert len(parse_events(agent_pb2.ProfileEvents(events=[event] * 300).SerializeToString()).events) == 300
    with pytest.raises(ValueError, match="malformed profile: it has too many parts"):
        events_from_tensor(torch.frombuffer(bytearray(b"\x0a\x00" * 2000), dtype=torch.uint8))


@pytest.mark.parametrize(
    "field",
    [
        b"\x50\x01",  # of which the last counts
        b"\x7a\x00",  # unknown and empty
        b"\xf8\xff\xff\xff\x0f\x01",  # a long tag
        b"\x7a\x80\x80\x80\x00",  # a long length
        b"\x4a\x02\x22\x00",  # packed and empty
    ],
)
def test_fields_that_take_no_memory_do_not_make_it_walk_without_end(monkeypatch, field):
    monkeypatch.setattr(parsing, "MAX_PARSED_BYTES", MIB)
    parse_frame(field * 1000)
    with pytest.raises(DecodeError, match="too many parts"):
        parse_frame(field * 50_000)


def test_too_many_chunks_are_refused():
    with pytest.raises(DecodeError, match="memory"):
        parse_chunks(b"\x0a\x00" * MIB)


@given(st.binary(min_size=SMALL_BYTES + 1, max_size=SMALL_BYTES + 200), st.integers(0, 7))
def test_bytes_of_no_meaning_are_parsed_or_refused(data, field):
    for prefix in (b"", bytes([field << 3 | 2]) + b"\xff\x07"):
        for parse in (parse_frame, parse_envelope, parse_chunks):
            with contextlib.suppress(DecodeError):
                parse(prefix + data)


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\xff", b"\x80", b"\xff" * 20, b"\x09", b"\x0b\x0c", b"\x0a\x05a"])
def test_what_ends_within_a_field_is_refused(data):
    padded = b"\x0a\x82\x08\x1a\xff\x07" + bytes(1023) + data
    with pytest.raises(DecodeError):
        parse_frame(padded)


def test_messages_nested_without_end_are_refused():
    data = b""
    for _ in range(50):
        data = b"\x2a" + varint(len(data)) + data
    with pytest.raises(DecodeError, match="parts"):
        check_envelope(b"\x22" + varint(len(data)) + data)


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def test_a_sender_is_told_of_too_many_parts(monkeypatch):
    envelope = agent_pb2.Envelope(tensors=[agent_pb2.Tensor()] * 1000).SerializeToString()
    check_size(envelope)
    monkeypatch.setattr(parsing, "MAX_PARSED_BYTES", 100_000)
    with pytest.raises(SerializationError, match="too many parts: too many tensors or references"):
        check_size(envelope)


def test_a_dense_envelope_ends_the_socket():
    executor = Executor(2, "test-dense")
    mine, other = socket.socketpair()
    ended = threading.Event()
    reasons: list[str] = []

    def on_end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    end = EnvelopeSocket("unix", mine, executor, FrameReader(lambda *_: pytest.fail("it was handled")), on_end)
    try:
        end.start()
        content = b"\x22\x00" * (2 * MIB)
        sender = threading.Thread(target=lambda: other.sendall(struct.pack("<IB", len(content), 0) + content))
        sender.start()
        assert ended.wait(20)
        assert "memory" in reasons[0]
        sender.join(20)
    finally:
        end.close()
        assert executor.close(10)
        end.release()
        other.close()
