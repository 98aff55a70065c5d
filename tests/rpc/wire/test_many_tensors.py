"""Messages with many tensors: those that are small travel as a table, with one payload."""

import contextlib
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
import torch
from gradwire import autograd, rpc
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.wire.small_tensors import MAX_GATHERED_BYTES, Gathered
from gradwire.rpc.wire.tensor_memory import PLAIN_DTYPES
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


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", sorted(PLAIN_DTYPES, key=str), ids=str)
def test_every_plain_dtype_is_in_the_table(dtype):
    values = torch.arange(24, dtype=torch.uint8).to(dtype)
    tensors = [values.clone(), values[:5].clone(), values[0].clone(), values.view(4, 6).t()]
    messages, payloads = encode(tensors)
    assert len(messages) == 1
    for tensor, other in zip(tensors, decode(messages, payloads), strict=True):
        assert_same(tensor, other)


def test_tensors_of_any_first_size_are_one_group():
    tensors = [torch.full((rows, 3), float(rows)) for rows in range(1, 50)]
    (message,), payloads = encode(tensors)
    assert len(message.table.groups) == 1
    for tensor, other in zip(tensors, decode([message], payloads), strict=True):
        assert_same(tensor, other)


def test_one_that_is_permuted_or_has_gaps_changes_nothing_for_the_others_of_its_shape():
    alike = [torch.full((3, 3), float(number)) for number in range(8)]
    for odd in (
        torch.arange(9.0).view(3, 3).t(),
        torch.arange(3.0).expand(3, 3),
        torch.arange(18.0).view(3, 6)[:, ::2],
    ):
        messages, payloads = encode([*alike, odd])
        with_rows = [group for group in messages[0].table.groups if group.rows]
        assert [list(group.positions) for group in with_rows] == [list(range(8))]
        for tensor, other in zip([*alike, odd], decode(messages, payloads), strict=True):
            assert_same(tensor, other)


def test_conjugated_and_negated_ones_arrive_as_their_values():
    complex_ones = [torch.tensor([1 + 2j, 3 - 4j]) for _ in range(4)]
    tensors = [*(each.conj() for each in complex_ones), *(torch._neg_view(torch.arange(3.0)) for _ in range(4))]
    for tensor, other in zip(tensors, decode(*encode(tensors)), strict=True):
        assert not other.is_conj()
        assert not other.is_neg()
        assert torch.equal(tensor, other)


def test_a_change_of_one_is_no_change_of_another():
    """Neither its elements, nor its size, nor its version: by that autograd knows what has changed since."""
    first, second, *_ = decode(*encode([torch.full((4, 4), 2.0) for _ in range(8)]))
    weight = torch.ones(4, 4, requires_grad=True)
    loss = (weight * second).sum()
    first.add_(1.0)
    first.resize_(100, 4).fill_(5.0)
    loss.backward()
    assert torch.equal(weight.grad, torch.full((4, 4), 2.0))


def test_tensors_without_memory_are_refused():
    tensors = [torch.ones(8) for _ in range(4)]
    for nbytes in (0, 16):
        tensors[2].untyped_storage().resize_(nbytes)
        with pytest.raises(ValueError, match=r"its memory has [0-9]+ of 32 bytes: .* send it while it has all"):
            encode(tensors)


TABLE = encode([torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(4), torch.ones(5), torch.tensor(1.0)])
PERMUTED, SCALARS, ROWS_OF_3, ROWS = range(4)
"""The groups of it."""


@pytest.mark.parametrize(
    ("group", "changes"),
    [
        (ROWS, {"positions": [2]}),
        (ROWS, {"positions": []}),
        (ROWS, {"positions": [2, 3, 4]}),
        (ROWS, {"positions": [2, 2]}),
        (ROWS, {"positions": [2, 5]}),
        (ROWS, {"positions": [2, 1]}),
        (ROWS, {"dtype": 999}),
        (ROWS, {"dtype": 0}),
        (ROWS, {"dtype": agent_pb2.QINT8}),
        (ROWS, {"rows": [4]}),
        (ROWS, {"rows": [4, 0]}),
        (ROWS, {"rows": [4, 1 << 63]}),
        (ROWS, {"rows": [1 << 63, 1 << 63]}),
        (ROWS, {"sizes": [1 << 63] * 63}),
        (ROWS, {"sizes": [1] * 64}),
        (ROWS, {"order": [0]}),
        (ROWS_OF_3, {"sizes": [0]}),
        (ROWS_OF_3, {"sizes": [1 << 62]}),
        (PERMUTED, {"sizes": [3]}),
        (PERMUTED, {"sizes": [3, 2, 1]}),
        (PERMUTED, {"order": [0, 0]}),
        (PERMUTED, {"order": [1, 2]}),
        (PERMUTED, {"order": [1, 0, 2]}),
        (SCALARS, {"sizes": [1 << 40]}),
        (SCALARS, {"order": [0]}),
    ],
)
def test_tables_that_contradict_themselves_are_refused(group, changes):
    (message,), payloads = TABLE
    assert len(decode([message], payloads)) == 5
    changed = agent_pb2.Tensor.FromString(message.SerializeToString())
    for name, value in changes.items():
        changed.table.groups[group].ClearField(name)
        changed.table.groups[group].MergeFrom(agent_pb2.TensorGroup(**{name: value}))
    with pytest.raises(ValueError, match="malformed tensor"):
        decode([changed], payloads)


def groups() -> st.SearchStrategy[agent_pb2.TensorGroup]:
    """Returns any groups, many of which are nearly well-formed."""
    small = st.integers(0, 4)
    return st.builds(
        agent_pb2.TensorGroup,
        positions=st.lists(small, max_size=3),
        dtype=st.sampled_from([0, agent_pb2.FLOAT32, agent_pb2.BOOL, agent_pb2.COMPLEX128, agent_pb2.QINT8]),
        sizes=st.lists(st.integers(0, 4) | st.integers(0, (1 << 64) - 1), max_size=3),
        rows=st.lists(small, max_size=3) | st.lists(st.integers(0, (1 << 64) - 1), max_size=3),
        order=st.permutations([0, 1]) | st.lists(small, max_size=3),
        requires_grad=st.booleans(),
    )


@given(st.lists(groups(), max_size=3), st.binary(max_size=300))
def test_any_table_has_tensors_or_is_refused(some, payload):
    message = agent_pb2.Tensor(data=agent_pb2.Payload(local=0), table=agent_pb2.TensorTable(groups=some))
    tensors: list[torch.Tensor] = []
    with contextlib.suppress(ValueError):
        tensors = decode([message], [payload])
        assert len(tensors) == sum(len(each.positions) for each in some)
    assert sum(each.nbytes for each in tensors) <= len(payload)
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in tensors)


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
