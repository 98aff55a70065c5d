"""Small tensors are in the pickle of a message, and arrive as they were."""

import pickle
import pickletools

import pytest
import torch
from gradwire import rpc
from gradwire.errors import SerializationError
from gradwire.net.security import Audit
from gradwire.rpc.wire.pickling import Packer, unpickle
from gradwire.rpc.wire.plain_pickle import RestrictedReader
from gradwire.rpc.wire.small_tensors import MAX_SMALL_BYTES, MAX_TINY_BYTES, pickle_small, small_tensor
from gradwire.rpc.wire.tensor_memory import DTYPE_NUMBERS, PLAIN_DTYPES
from hypothesis import given
from hypothesis import strategies as st


def round_trip(value):
    packed = Packer().pack(value, "the value")
    assert not packed.tensors
    return unpickle(packed.body, [], [])


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


@given(
    dtype=st.sampled_from(sorted(PLAIN_DTYPES, key=str)),
    sizes=st.lists(st.integers(1, 5), max_size=3),
    data=st.data(),
)
def test_all_dtypes_and_shapes(dtype, sizes, data):
    nbytes = torch.Size(sizes).numel() * dtype.itemsize
    raw = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).view(sizes)
    received = round_trip(tensor)
    assert received.dtype is dtype
    assert received.shape == tensor.shape
    assert torch.equal(bits(received), bits(tensor))
    assert received._base is None
    received.zero_()
    assert bytes(bits(tensor).tolist()) == raw


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(MAX_SMALL_BYTES // 4 + 1),
        torch.ones(2, requires_grad=True),
        torch.ones(0),
        torch.ones(4, 4).t()[1:],
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        torch.ones(2, device="meta"),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2).expand(3, 2),
    ],
    ids=[
        "large",
        "requires grad",
        "empty",
        "strided",
        "conjugated",
        "negated",
        "meta",
        "sparse",
        "expanded",
    ],
)
def test_others_are_beside_the_pickle(tensor):
    assert len(Packer().pack(tensor, "the value").tensors) == 1


@pytest.mark.parametrize(("nbytes", "inside"), [(4, 32), (MAX_TINY_BYTES, 11), (MAX_SMALL_BYTES, 1)])
def test_only_the_first_ones_are_in_the_pickle(nbytes, inside):
    tensors = [torch.full((nbytes // 4,), float(number)) for number in range(100)]
    packed = Packer().pack(tensors, "the value")
    assert 100 - len(packed.tensors) == inside
    unpacked = unpickle(packed.body, packed.tensors, [])
    assert all(map(torch.equal, unpacked, tensors))


def test_one_beside_it_may_share_memory_with_one_in_it():
    matrix = torch.arange(12.0).view(3, 4)
    for value in ([matrix[0], torch.ones(20_000), matrix.t()], [torch.ones(20_000), matrix.t(), matrix[0]]):
        packed = Packer().pack(value, "the value")
        assert len(packed.tensors) == len(value)


def test_tensors_that_share_memory_are_beside_it():
    matrix = torch.arange(12.0).view(3, 4)
    for value in ([matrix, matrix[1]], [matrix[0], matrix[1]], [matrix[0], torch.ones(2), matrix]):
        packed = Packer().pack(value, "the value")
        assert len(packed.tensors) == len(value)
    twice = round_trip([matrix, matrix])
    assert twice[0] is twice[1]


def test_a_tensor_without_memory_is_an_error():
    gone = torch.ones(4)
    gone.untyped_storage().resize_(0)
    shrunk = torch.ones(4)
    shrunk.untyped_storage().resize_(8)
    for tensor in (gone, shrunk, torch._efficientzerotensor(4)):
        assert len(Packer().pack(tensor, "the value").tensors) == 1  # which encoding refuses
        assert len(Packer().pack([torch.ones(2), tensor], "the value").tensors) == 1


@pytest.mark.parametrize(
    ("number", "sizes", "data"),
    [(DTYPE_NUMBERS[torch.float32], (2,), b"1234"), (99, (1,), b"1234"), (0, (1,), b"1"), (1, (), b"")],
)
def test_malformed_ones_are_refused(number, sizes, data):
    with pytest.raises(ValueError, match="malformed tensor"):
        small_tensor(number, sizes, data)


def test_a_value_that_does_not_pickle_names_its_part():
    with pytest.raises(SerializationError, match=r"the value\[1\]"):
        Packer().pack([torch.ones(2), lambda: 0, torch.ones(2)], "the value")
    assert torch.equal(round_trip([torch.ones(2)])[0], torch.ones(2))


@pytest.mark.parametrize("tensor", [torch.tensor(3.5), torch.arange(5), torch.ones(2, 3, 4, dtype=torch.bfloat16)])
def test_the_pickle_of_a_tensor_alone_is_one_that_any_reader_reads(tensor):
    body = Packer().pack(tensor, "the value").body
    assert body == pickle_small(tensor)
    me, peer = rpc.WorkerInfo("me", 0), rpc.WorkerInfo("peer", 1)
    restricted = RestrictedReader(me, rpc.Policy(accepts="plain"), Audit(me.name))
    for received in (pickle.loads(body), restricted.load(peer, body)):
        assert received.dtype is tensor.dtype
        assert torch.equal(received, tensor)
    assert [opcode.name for opcode, _, _ in pickletools.genops(body)][-2:] == ["REDUCE", "STOP"]


def test_larger_tensors_alone_are_pickled_by_the_pickler():
    assert pickle_small(torch.ones(MAX_TINY_BYTES // 4)) is not None
    larger = torch.ones(MAX_TINY_BYTES // 4 + 1)
    assert pickle_small(larger) is None
    assert torch.equal(round_trip(larger), larger)
