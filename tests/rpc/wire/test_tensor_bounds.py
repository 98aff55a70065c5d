"""Whatever a tensor message says, decoding it gives a tensor or a ValueError, in bounded time."""

import contextlib
import warnings

import pytest
import torch
from gradwire import rpc
from gradwire.errors import SerializationError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.wire.small_tensors import small_tensor
from gradwire.rpc.wire.tensor_memory import MAX_DIMENSIONS
from gradwire.rpc.wire.tensors import decode_tensors
from hypothesis import example, given
from hypothesis import strategies as st

from tests.remote_functions import identity

sizes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, -1, 2**40, 2**62, 2**63 - 1]), max_size=5)
strides = st.one_of(st.just([]), st.lists(st.sampled_from([0, 1, 2, 4, 8, -1, 2**62]), max_size=5))


@st.composite
def messages(draw, depth: int = 0) -> agent_pb2.Tensor:
    message = agent_pb2.Tensor(
        dtype=draw(st.integers(0, 46)),
        sizes=draw(sizes),
        strides=draw(strides),
        requires_grad=draw(st.booleans()),
        coalesced=draw(st.booleans()),
        device=draw(st.sampled_from(["", "", "", "meta", "cpu", "cuda:99", "nonsense", "cuda"])),
        layout=draw(st.integers(0, 6)),
    )
    if draw(st.booleans()):
        message.data.inline = bytes(draw(st.sampled_from([0, 1, 2, 4, 8, 16, 32, 64])))
    if draw(st.booleans()):
        message.quantization.scale = draw(st.floats())
        message.quantization.zero_point = draw(st.integers(-(2**63), 2**63 - 1))
        message.quantization.axis = draw(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2))
    if draw(st.integers(0, 3)) == 0:
        message.shared.tensor = draw(st.integers(0, 2))
        message.shared.offset = draw(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 4))
    if depth < 2:
        message.parts.extend(draw(st.lists(messages(depth + 1), max_size=3)))
    return message


@given(st.lists(messages(), min_size=1, max_size=3))
@example([agent_pb2.Tensor(dtype=1, sizes=[2**40, 2**40, 0], device="cpu")])
def test_any_tensor_message_is_decoded_or_refused(drawn):
    with warnings.catch_warnings(), contextlib.suppress(ValueError):
        warnings.simplefilter("ignore")
        decode_tensors(drawn, lambda payload: payload.inline)


def test_strides_of_empty_tensors_are_bounded():
    (tensor,) = decode_tensors([agent_pb2.Tensor(dtype=1, sizes=[2**62, 2, 0])], lambda _: b"")
    assert tensor.shape == (2**62, 2, 0)
    with pytest.raises(ValueError, match="malformed tensor: dtype number 1, shape"):
        decode_tensors([agent_pb2.Tensor(dtype=1, sizes=[0, 2, 2**62])], lambda _: b"")


@pytest.mark.parametrize("count", [MAX_DIMENSIONS + 1, 200_000])
@pytest.mark.parametrize("size", [0, 1])
def test_dimensions_are_bounded(count, size):
    """200,000 of them took minutes."""
    data = agent_pb2.Payload(inline=bytes(4))
    base = agent_pb2.Tensor(dtype=1, sizes=[1], data=data)
    many = [size] * count
    for message in (
        agent_pb2.Tensor(dtype=1, sizes=many, data=data),
        agent_pb2.Tensor(dtype=1, sizes=many, strides=[1] * count, data=data),
        agent_pb2.Tensor(dtype=1, sizes=many, strides=[1] * count, device="meta"),
        agent_pb2.Tensor(dtype=1, sizes=many, strides=[1] * count, shared=agent_pb2.SharedMemory(tensor=0)),
        agent_pb2.Tensor(dtype=1, sizes=[1], strides=[1] * count, shared=agent_pb2.SharedMemory(tensor=0)),
        agent_pb2.Tensor(dtype=1, sizes=[1], strides=[1] * count, data=data),
    ):
        with pytest.raises(ValueError, match="malformed tensor"):
            decode_tensors([base, message], lambda payload: payload.inline)
    with pytest.raises(ValueError, match="malformed tensor"):
        small_tensor(1, tuple(many), bytes(4))


def inline(nbytes: int) -> agent_pb2.Payload:
    return agent_pb2.Payload(inline=bytes(nbytes))


HUGE_AND_EMPTY = [2**40, 2**40, 0]
"""A shape of no elements whose strides fit into 64 bits, and which torch refuses."""


@pytest.mark.parametrize("device", ["", "cpu", "cuda:0", "nonsense"])
@pytest.mark.parametrize(
    "message",
    [
        agent_pb2.Tensor(dtype=1, sizes=[0, 2**62, 2**62]),
        agent_pb2.Tensor(dtype=1, sizes=HUGE_AND_EMPTY),
        agent_pb2.Tensor(dtype=34, sizes=HUGE_AND_EMPTY),
        agent_pb2.Tensor(dtype=44, sizes=HUGE_AND_EMPTY),
        agent_pb2.Tensor(dtype=1, sizes=[2**62, 2**62], strides=[0, 0], shared=agent_pb2.SharedMemory(tensor=0)),
        agent_pb2.Tensor(dtype=1, sizes=[1], strides=[-(2**63)], data=inline(4)),
        agent_pb2.Tensor(dtype=34, sizes=[1], strides=[-(2**63)], data=inline(1)),
        agent_pb2.Tensor(
            dtype=1,
            sizes=[2, 2],
            parts=[agent_pb2.Tensor(dtype=12, sizes=HUGE_AND_EMPTY), agent_pb2.Tensor(dtype=1, sizes=[0])],
        ),
        agent_pb2.Tensor(
            dtype=44,
            sizes=[1],
            data=inline(4),
            quantization=agent_pb2.Quantization(axis=0),
            parts=[
                agent_pb2.Tensor(dtype=12, sizes=[1], data=inline(16)),
                agent_pb2.Tensor(dtype=10, sizes=[1], data=inline(1)),
            ],
        ),
    ],
)
def test_what_torch_refuses_is_a_value_error(message, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refused = agent_pb2.Tensor()
    refused.CopyFrom(message)
    refused.device = device
    base = agent_pb2.Tensor(dtype=1, sizes=[1], data=inline(4))
    with pytest.raises(ValueError, match="malformed tensor"):
        decode_tensors([base, refused], lambda payload: payload.inline)


def test_small_tensors_of_impossible_shapes_are_refused():
    for shape in ((-1, -1), (2**70,), (-1,)):
        with pytest.raises(ValueError, match="malformed tensor"):
            small_tensor(1, shape, bytes(4))


def test_tensors_of_too_many_dimensions_are_not_sent(two_workers):
    def check() -> None:
        most = torch.ones((1,) * MAX_DIMENSIONS, requires_grad=True)
        assert rpc.rpc_sync("worker1", identity, (most,)).dim() == MAX_DIMENSIONS
        for requires_grad in (True, False):
            many = torch.ones((1,) * (MAX_DIMENSIONS + 1), requires_grad=requires_grad)
            with pytest.raises((SerializationError, ValueError), match="dimensions|malformed tensor"):
                rpc.rpc_sync("worker1", identity, (many,))

    two_workers[0].run(check)
