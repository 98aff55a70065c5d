"""Peers that are unknown, of another version, or send malformed messages."""

import pickle

import grpc
import hypothesis.strategies as st
import pytest
import torch
from gradwire.errors import RpcError, WorkerLostError
from gradwire.net.event_loop import acquire_event_loop
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.messages import Handler, MessageType, Request
from gradwire.rpc.transports.grpc_endpoint import EXCHANGE_METHOD, PROTOCOL, TRANSFER_METHOD
from gradwire.rpc.wire.failures import decode_failure, encode_failure
from gradwire.rpc.wire.parsing import bytes_field
from gradwire.rpc.wire.pickling import Packer, unpickle
from gradwire.rpc.wire.tensors import decode_tensors, encode_tensors
from hypothesis import given, settings

from tests.remote_functions import identity, wait_until


@pytest.fixture
def loop():
    events = acquire_event_loop()
    yield events
    events.release()


async def connect_as_peer(
    address: str, method: str, first: bytes, then: bytes = b""
) -> grpc.aio.AioRpcError | bytes:
    """Opens a stream as a peer would. Returns the answer, or the error of the stream."""
    async with grpc.aio.insecure_channel(address) as channel:
        open_stream = channel.stream_stream if method == EXCHANGE_METHOD else channel.stream_unary
        call = open_stream(method)()
        try:
            await call.write(first)
            if method == EXCHANGE_METHOD:
                answer = await call.read()
                if answer is not grpc.aio.EOF:
                    if then:
                        await call.write(then)
                        answer = await call.read()
                    return b"" if answer is grpc.aio.EOF else answer
            else:
                await call.done_writing()
                await call
            raise grpc.aio.AioRpcError(await call.code(), None, None, await call.details())
        except grpc.aio.AioRpcError as error:
            return error


HELLO = agent_pb2.Hello(protocol=PROTOCOL, group="test", worker_id=1, worker_name="agent1")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": PROTOCOL + 1}, "speaks protocol 1, 'agent1' speaks 2"),
        ({"group": "another"}, "belongs to another job"),
        ({"worker_id": 7}, "knows no 'agent1' with id 7"),
        ({"worker_name": "eve"}, "knows no 'eve' with id 1"),
        ({"worker_id": 0, "worker_name": "agent0"}, "does not admit 'agent0': that is itself"),
    ],
)
@pytest.mark.parametrize("method", [EXCHANGE_METHOD, TRANSFER_METHOD])
def test_unknown_workers_are_refused(agents, loop, changes, reason, method):
    a, _ = agents(2)
    hello = agent_pb2.Hello()
    hello.CopyFrom(HELLO)
    for name, value in changes.items():
        setattr(hello, name, value)
    opening = agent_pb2.Frame(hello=hello) if method == EXCHANGE_METHOD else agent_pb2.Chunks(hello=hello)
    refusal = loop.run(connect_as_peer(a.peers.by_id[0].member.address, method, opening.SerializeToString()), 20)
    assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason in refusal.details()
    assert a.request(a.info, Request(MessageType.CALL, (identity, (1,), {}))).wait() == 1


def test_bytes_that_are_no_hello(agents, loop):
    a, _ = agents(2)
    refusal = loop.run(connect_as_peer(a.peers.by_id[0].member.address, EXCHANGE_METHOD, b"\xff\xff\xff"), 20)
    assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_a_peer_that_sends_malformed_frames_is_lost(agents, loop):
    a, b = agents(2)
    opening = agent_pb2.Frame(hello=HELLO).SerializeToString()
    loop.run(connect_as_peer(a.peers.by_id[0].member.address, EXCHANGE_METHOD, opening, b"\xff\xff\xff"), 20)
    wait_until(lambda: a.end_of(1) is not None)
    with pytest.raises(WorkerLostError, match="bytes that are no frame"):
        a.request(b.info, Request(MessageType.CALL, (identity, (1,), {}))).wait()


def send_envelope(a, b, envelope: agent_pb2.Envelope):
    """Sends a hand-made request from a to b. Returns a future of its answer."""
    future = a.request(b.info, Request(MessageType.CALL, (identity, ("ready",), {})))
    assert future.wait() == "ready"
    from gradwire.rpc.execution.futures import Future
    from gradwire.rpc.requests.call import Call

    call = Call(a._caller._parts, a.peers.of(b.info), Handler(print), 0.0, 0)
    call.future = future = Future(a._executor)
    envelope.id = call.identifier = 1 << 40
    a._caller.in_flight[envelope.id] = call
    envelope.has_headers = True
    a.peers.of(b.info).send(envelope.SerializeToString())
    return future


def test_malformed_requests_get_errors(agents):
    a, b = agents(2)
    chunked = agent_pb2.Payload(chunked=agent_pb2.ChunkedPayload(transfer_id=1, nbytes=1 << 60))
    inline = agent_pb2.Payload(inline=b"1234")
    float32 = agent_pb2.FLOAT32
    cases = [
        (agent_pb2.Envelope(type=MessageType.CALL), "EOFError|Ran out of input"),
        (
            agent_pb2.Envelope(type=MessageType.CALL, body=chunked, has_payloads=True),
            "bytes are refused: .* max_payload_bytes",
        ),
        (agent_pb2.Envelope(type=999), "message type 999 has no handler"),
    ]
    tensors = [
        agent_pb2.Tensor(dtype=float32, sizes=[2], data=inline),
        agent_pb2.Tensor(dtype=float32, sizes=[-1], data=inline),
        agent_pb2.Tensor(dtype=float32, sizes=[1 << 62, 1 << 62], data=inline),
        agent_pb2.Tensor(dtype=0, sizes=[1], data=inline),
        agent_pb2.Tensor(dtype=float32, sizes=[1], data=chunked),
        agent_pb2.Tensor(dtype=float32, sizes=[1], parts=[agent_pb2.Tensor(dtype=float32, sizes=[0])]),
    ]
    cases += [
        (agent_pb2.Envelope(type=MessageType.CALL, tensors=[t], has_payloads=True), "malformed|refused")
        for t in tensors
    ]
    indices = agent_pb2.Tensor(dtype=agent_pb2.INT64, sizes=[1, 1])
    indices.data.inline = (7).to_bytes(8, "little")
    outside = agent_pb2.Tensor(
        dtype=float32, sizes=[3], parts=[indices, agent_pb2.Tensor(dtype=float32, sizes=[1], data=inline)]
    )
    cases.append((agent_pb2.Envelope(type=MessageType.CALL, tensors=[outside]), "malformed sparse tensor"))
    header = agent_pb2.AutogradHeader(context_id=5, differentiable=[3])
    cases.append((agent_pb2.Envelope(type=MessageType.CALL, autograd=header), "malformed autograd header"))
    for group, nbytes, text in ((1, 1 << 60, "bytes are refused"), (2, 0, "bytes is refused"), (3, 4, "twice")):
        announced = agent_pb2.BroadcastPayload(
            group=group, nbytes=nbytes, members=[0, 1], transfer_id=1000 + group
        )
        tensor = agent_pb2.Tensor(dtype=float32, sizes=[1], data=agent_pb2.Payload(broadcast=announced))
        cases.append(
            (agent_pb2.Envelope(type=MessageType.CALL, tensors=[tensor, tensor], has_payloads=True), text)
        )
    reference = agent_pb2.Reference(owner=9)
    cases.append((agent_pb2.Envelope(type=MessageType.CALL, references=[reference]), "does not know the owner of"))
    for envelope, text in cases:
        with pytest.raises(Exception, match=text):
            send_envelope(a, b, envelope).wait()
    assert a.request(b.info, Request(MessageType.CALL, (identity, (1,), {}))).wait() == 1


def test_chunks_that_do_not_fit_are_refused(agents, loop):
    a, b = agents(2)
    payload = agent_pb2.Payload(chunked=agent_pb2.ChunkedPayload(transfer_id=77, nbytes=4))

    async def transfer() -> None:
        async with grpc.aio.insecure_channel(b.peers.by_id[1].member.address) as channel:
            call = channel.stream_unary(TRANSFER_METHOD)()
            hello = agent_pb2.Hello(protocol=1, group="test", worker_id=0, worker_name="agent0")
            await call.write(agent_pb2.Chunks(hello=hello).SerializeToString())
            await call.write(
                agent_pb2.Chunks(chunks=[agent_pb2.Chunk(transfer_id=77, data=b"too many")]).SerializeToString()
            )
            await call.done_writing()
            await call

    future = send_envelope(a, b, agent_pb2.Envelope(type=MessageType.CALL, body=payload, has_payloads=True))
    loop.run(transfer(), 20)
    with pytest.raises(ValueError, match="more than the announced 4 bytes"):
        future.wait()


def test_both_open_a_stream_at_once(agents):
    started = agents(4)
    for _ in range(5):
        futures = [
            x.request(y.info, Request(MessageType.CALL, (identity, (i,), {})))
            for i, (x, y) in enumerate((x, y) for x in started for y in started)
        ]
        assert [f.wait() for f in futures] == list(range(16))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
SHAPES = st.lists(st.integers(0, 4), max_size=4)


@given(PLAIN, st.lists(SHAPES, max_size=3))
@settings(max_examples=60)
def test_values_and_tensors_round_trip(value, shapes):
    packer = Packer()
    tensors = [torch.randn(shape) for shape in shapes]
    packed = packer.pack((value, tensors, value), "the value")
    messages = encode_tensors(packed.tensors, lambda data: agent_pb2.Payload(inline=bytes(data)))
    sent = [message.SerializeToString() for message in messages]
    arrived = decode_tensors(map(agent_pb2.Tensor.FromString, sent), lambda p: p.inline)
    first, got, second = unpickle(packed.body, arrived, [])
    assert first == second == value
    assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))


class Shelf:
    """Unpickles another message while it is unpickled, as an object that makes a call would."""

    def __init__(self, content: object) -> None:
        self.content = content

    def __reduce__(self) -> tuple:
        packed = Packer().pack(self.content, "the content")
        return unpack_content, (packed.body, [tensor.tolist() for tensor in packed.tensors])


def unpack_content(body: bytes, tensors: list[list[float]]) -> object:
    return unpickle(body, [torch.tensor(tensor) for tensor in tensors], [])


@pytest.mark.parametrize("buffer", [bytes, memoryview])
def test_each_message_has_tensors_of_its_own(buffer):
    outer, inner = torch.zeros(2, requires_grad=True), torch.ones(2)  # inner is in the pickle
    packed = Packer().pack([outer, Shelf([inner, inner]), outer, "x" * (1 << 17)], "the value")
    first, (second, third), fourth, text = unpickle(buffer(packed.body), [outer], [])
    assert first is fourth is outer
    assert second is third
    assert second.tolist() == [1, 1]
    assert text == "x" * (1 << 17)


@pytest.mark.parametrize("value", [torch.ones(1, requires_grad=True), torch.nn.Parameter(torch.ones(1))])
def test_placeholders_of_tensors_that_a_message_does_not_have(value):
    packed = Packer().pack([torch.ones(1, requires_grad=True), value], "the value")
    with pytest.raises(pickle.UnpicklingError, match="malformed message: it has no tensor 0"):
        unpickle(packed.body, [], [])
    with pytest.raises(IndexError):
        unpickle(packed.body, packed.tensors[:1], [])


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_any_bytes_as_a_tensor_decode_or_raise_value_error(data):
    try:
        message = agent_pb2.Tensor.FromString(data)
    except Exception:
        return
    try:
        decode_tensors([message], lambda p: p.inline)
    except ValueError as error:
        assert "malformed" in str(error)  # noqa: PT017 - any other error fails the test by itself


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 40))
def test_hand_framing_is_protobufs(number, length):
    from google.protobuf.internal.encoder import TagBytes, _VarintBytes

    assert bytes_field(number, length) == TagBytes(number, 2) + _VarintBytes(length)


@given(st.text(), st.text())
def test_any_text_travels_in_an_error(text, surrogates):
    error = decode_failure(encode_failure(KeyError(text + "\ud800" + surrogates)), "w")
    assert isinstance(error, KeyError)
    assert isinstance(error.__cause__, RpcError)


def test_framing_of_chunks():
    data = b"x" * 300
    built = agent_pb2.Chunk(transfer_id=5).SerializeToString() + bytes_field(2, 300) + data
    assert agent_pb2.Chunk.FromString(built) == agent_pb2.Chunk(transfer_id=5, data=data)
