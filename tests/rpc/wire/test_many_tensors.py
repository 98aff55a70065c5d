"""Messages with many tensors: those that are small travel as a table, with one payload."""

import itertools
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
import torch
from gradwire import autograd, rpc
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.wire.gathered import Gathered
from gradwire.rpc.wire.tensor_table import MAX_GATHERED_BYTES
from gradwire.rpc.wire.tensors import decode_tensors, encode_tensors
from hypothesis import given

from tests.remote_functions import identity

KIB = 1 << 10

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]


def bytes_sent(worker: str) -> dict[str, int]:
    """Returns the bytes that this worker has sent to another one, by channel."""
    sent: dict[str, int] = rpc.debug_info()["traffic"][worker]["bytes_sent"]
    return sent


def encode(tensors: Sequence[torch.Tensor]) -> tuple[list[agent_pb2.Tensor], list[bytes]]:
    """Returns the messages of tensors, and the payloads."""
    payloads: list[bytes] = []

    def put(data: memoryview) -> agent_pb2.Payload:
        payloads.append(bytes(data))
        return agent_pb2.Payload(local=len(payloads) - 1)

    def put_gathered(gathered: Gathered) -> agent_pb2.Payload:
        return put(gathered.joined())

    return encode_tensors(tensors, put, put_gathered=put_gathered), payloads


def decode(messages: Sequence[agent_pb2.Tensor], payloads: Sequence[bytes]) -> list[torch.Tensor]:
    copies = [agent_pb2.Tensor.FromString(each.SerializeToString()) for each in messages]
    return decode_tensors(copies, lambda payload: payloads[payload.local])


def assert_same(tensor: torch.Tensor, other: torch.Tensor) -> None:
    assert (tensor.dtype, tensor.shape, tensor.layout) == (other.dtype, other.shape, other.layout)
    assert (tensor.device, tensor.requires_grad) == (other.device, other.requires_grad)
    assert other.is_leaf
    if tensor.is_meta:
        return
    if tensor.layout is not torch.strided:
        tensor, other = tensor.to_dense(), other.to_dense()
    assert torch.equal(tensor.detach().to(torch.complex128), other.detach().to(torch.complex128))


def made(kind: int, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    """Returns a tensor of one of the kinds that a table can have, or cannot."""
    matrix = torch.arange(rows * columns).to(torch.uint8).view(rows, columns).to(dtype)
    kinds: list[Callable[[], torch.Tensor]] = [
        lambda: matrix,
        lambda: matrix.t(),
        lambda: matrix[:, ::2],
        lambda: matrix[:1].expand(3, columns),
        lambda: matrix.flatten()[:0],
        lambda: matrix.flatten()[0],
        lambda: matrix.to("meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(rows, columns, requires_grad=True),
        lambda: torch.ones(MAX_GATHERED_BYTES // 4 + 1),
    ]
    return kinds[kind]()


@given(
    st.lists(
        st.builds(made, st.integers(0, 9), st.sampled_from(DTYPES), st.integers(1, 5), st.integers(1, 5)),
        max_size=12,
    )
)
def test_any_tensors_arrive(tensors):
    messages, payloads = encode(tensors)
    received = decode(messages, payloads)
    for tensor, other in zip(tensors, received, strict=True):
        assert_same(tensor, other)


def test_there_is_one_message_and_one_payload():
    tensors = [torch.full((KIB,), float(number)) for number in range(100)]
    messages, payloads = encode(tensors)
    assert (len(messages), len(payloads)) == (1, 1)
    assert messages[0].ByteSize() < 1000
    for tensor, other in zip(tensors, decode(messages, payloads), strict=True):
        assert_same(tensor, other)


def test_each_has_memory_of_its_own_but_those_that_share_it_at_the_sender():
    base = torch.arange(12.0).view(3, 4)
    first, row, *others = decode(*encode([base, base[1], *(torch.ones(3) for _ in range(4))]))
    row[0] = 99.0
    assert first[1, 0] == 99.0
    assert {each.untyped_storage().nbytes() for each in others} == {12}
    assert len({each.untyped_storage().data_ptr() for each in others}) == 4


def test_permuted_tensors_keep_their_strides():
    tensors = [torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1), torch.ones(3, 4).t()] * 3
    strides = [each.stride() for each in tensors]
    messages, payloads = encode([each.clone(memory_format=torch.preserve_format) for each in tensors])
    assert len(messages) == 1
    assert [each.stride() for each in decode(messages, payloads)] == strides


TABLE = encode([torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(4), torch.ones(5)])


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": [0, 1, 2]},
        {"positions": [0, 1, 2, 2]},
        {"positions": [0, 1, 2, 4]},
        {"dtypes": [1, 1, 1]},
        {"dtypes": [1, 1, 1, 999]},
        {"dtypes": [1, 1, 1, 42]},  # quantized
        {"dimensions": [2, 2, 1, 9]},
        {"dimensions": [2, 2, 1, 1 << 31]},
        {"sizes": [2, 3, 2, 3, 4]},
        {"sizes": [2, 3, 2, 3, 4, 6]},
        {"sizes": [2, 3, 2, 3, 4, 0]},
        {"sizes": [1 << 62, 4, 2, 3, 4, 5]},
        {"strides": [1]},
        {"strides": [1, 4]},
        {"strides": [0, 1]},
        {"strides": [-1, 2]},
        {"permuted": [0, 1], "strides": [3, 1, 1 << 62, 1]},
        {"permuted": [1, 9]},
    ],
    ids=itertools.count(),
)
def test_tables_that_contradict_themselves_are_refused(changes):
    (message,), payloads = TABLE
    assert len(decode([message], payloads)) == 4
    changed = agent_pb2.Tensor.FromString(message.SerializeToString())
    for name, values in changes.items():
        changed.table.ClearField(name)
        getattr(changed.table, name).extend(values)
    if changes == {"permuted": [1, 9]}:  # of no tensor: ignored
        assert len(decode([changed], payloads)) == 4
        return
    with pytest.raises(ValueError, match="malformed tensor"):
        decode([changed], payloads)


def test_parts_of_the_payload_are_copied_once():
    """Many tensors that name the same part would take any memory."""
    tensors = [torch.ones(4), torch.ones(5), torch.ones(6), torch.ones(7, 2)[:, 0]]
    (table, other), payloads = encode(tensors)
    assert other.data.HasField("gathered")
    assert len(decode([table, other], payloads)) == 4
    with pytest.raises(ValueError, match="malformed tensor: 28 bytes at"):
        decode([table, *[other] * 100], payloads)
    other.data.gathered.offset = 1 << 40
    with pytest.raises(ValueError, match="malformed tensor: 28 bytes at"):
        decode([table, other], payloads)
    with pytest.raises(ValueError, match="malformed tensor"):  # without a table
        decode_tensors([other], lambda payload: payload.inline)


def test_between_workers_of_one_host_they_go_by_shared_memory(workers):
    a, _ = workers.rpc(2, transports=("unix", "grpc"))

    def send() -> dict[str, int]:
        rpc.rpc_sync("worker1", identity, (1,))
        values = [torch.full((8 * KIB,), float(number)) for number in range(64)]
        received = rpc.rpc_sync("worker1", identity, ({"list": values},))["list"]
        assert all(torch.equal(one, other) for one, other in zip(values, received, strict=True))
        received[0] += 1
        assert received[1][0] == 1
        return bytes_sent("worker1")

    sent = a.run(send)
    assert sent["segment"] >= 64 * 32 * KIB
    assert not sent.keys() & {"bulk", "chunked", "attached"}


@pytest.mark.parametrize("transports", [("unix", "grpc"), ("tcp", "grpc"), ("grpc",)])
@pytest.mark.parametrize("elements", [1, 300, 8 * KIB])
def test_they_travel_by_every_transport(workers, transports, elements):
    a, _ = workers.rpc(2, transports=transports, channels=rpc.ChannelOptions(max_shared_bytes=1 << 20))

    def send() -> None:
        values = [torch.full((elements,), float(number), requires_grad=True) for number in range(64)]
        parameters = torch.nn.ParameterList(values)
        received, module = rpc.rpc_sync("worker1", identity, ((values, parameters),))
        for value, one, other in zip(values, received, module, strict=True):
            assert torch.equal(value, one)
            assert torch.equal(value, other)
            assert one.requires_grad

    a.run(send)


def test_a_broadcast_counts_the_message(workers):
    """32 tensors of 64 KiB are large together."""
    started = workers.rpc(4, transports=("unix", "grpc"))
    names = [each.name for each in started[1:]]

    def send() -> list[float]:
        values = [torch.full((16 * KIB,), float(number)) for number in range(32)]
        calls = rpc.broadcast_call(names, sum_of_all, (values,))
        return [each.wait() for each in calls]

    assert started[0].run(send) == [sum(range(32)) * 16.0 * KIB] * 3
    traffic = [started[0].run(bytes_sent, name).get("segment", 0) for name in names]
    assert all(each >= 32 * 64 * KIB for each in traffic)


def sum_of_all(values: list[torch.Tensor]) -> float:
    return float(sum(each.sum() for each in values))


def test_gradients_flow_through_all_of_them(workers):
    a, _ = workers.rpc(2)

    def train() -> None:
        leaves = [torch.full((KIB,), float(number), requires_grad=True) for number in range(20)]
        with autograd.context() as context:
            loss = rpc.rpc_sync("worker1", weighted, (leaves,))
            autograd.backward(context, [loss])
            gradients = autograd.get_gradients(context)
        for number, leaf in enumerate(leaves):
            assert torch.equal(gradients[leaf], torch.full((KIB,), float(number)))

    a.run(train)


def weighted(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([number * each.sum() for number, each in enumerate(values)]).sum()
