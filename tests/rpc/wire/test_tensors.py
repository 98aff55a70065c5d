"""Tensors of every kind arrive as they were sent, and tensors of one message share memory as at the sender."""

import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import SerializationError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.wire.tensors import decode_tensors, encode_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.remote_functions import identity

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*quantize"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
]


def matrix() -> Tensor:
    return torch.arange(6.0).view(2, 3)


def per_channel(zero_points: Tensor, axis: int = 0) -> Tensor:
    return torch.quantize_per_channel(
        matrix(), torch.linspace(0.1, 0.3, len(zero_points)), zero_points, axis, torch.quint8
    )


QUANTIZED: dict[str, Callable[[], Tensor]] = {
    "quint8": lambda: torch.quantize_per_tensor(matrix(), 0.1, 10, torch.quint8),
    "qint8": lambda: torch.quantize_per_tensor(matrix(), 0.1, -2, torch.qint8),
    "qint32": lambda: torch.quantize_per_tensor(matrix(), 0.1, 0, torch.qint32),
    "empty": lambda: torch.quantize_per_tensor(torch.empty(0, 3), 0.1, 10, torch.quint8),
    "scalar": lambda: torch.quantize_per_tensor(torch.tensor(2.0), 0.1, 10, torch.quint8),
    "transposed": lambda: torch.quantize_per_tensor(matrix(), 0.1, 10, torch.quint8).t(),
    "slice": lambda: torch.quantize_per_tensor(matrix(), 0.1, 10, torch.quint8)[:, 1:],
    "channels": lambda: per_channel(torch.tensor([1, 2])),
    "channels of the last dimension": lambda: per_channel(torch.tensor([1, 2, 3]), 1),
    "channels with zero points that are no integers": lambda: per_channel(torch.tensor([1.5, 2.0])),
}

SPARSE: dict[str, Callable[[], Tensor]] = {
    "csr": lambda: matrix().to_sparse_csr(),
    "csr of int32": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), torch.ones(2)
    ),
    "csr of several": lambda: torch.stack([torch.eye(2)] * 3).to_sparse_csr(),
    "csc": lambda: matrix().to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "csr without elements": lambda: torch.zeros(2, 3).to_sparse_csr(),
    "csr that requires grad": lambda: matrix().to_sparse_csr().requires_grad_(),
    "coo": lambda: matrix().to_sparse(),
}

BYTES: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name)
    for name in (*(f"{u}int{n}" for u in ("", "u") for n in range(1, 8)), "bits8", "bits16", "bits1x8", "bits2x4")
    if hasattr(torch, name)
)


def quantized(name: str) -> Tensor:
    return QUANTIZED[name]()


def sparse(name: str) -> Tensor:
    return SPARSE[name]()


def quantization(tensor: Tensor) -> list[Any]:
    if tensor.qscheme() is torch.per_tensor_affine:
        parts = [tensor.q_scale(), tensor.q_zero_point()]
    else:
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        parts = [scales.tolist(), zero_points.tolist(), zero_points.dtype, tensor.q_per_channel_axis()]
    return [tensor.qscheme(), tensor.dtype, tensor.shape, tensor.int_repr().tolist(), *parts]


def compressed(tensor: Tensor) -> list[Any]:
    if tensor.layout is torch.sparse_coo:
        indices: tuple[Tensor, ...] = (tensor.indices(), tensor.is_coalesced() * torch.ones(1))
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        indices = (tensor.crow_indices(), tensor.col_indices())
    else:
        indices = (tensor.ccol_indices(), tensor.row_indices())
    parts = [part.tolist() for part in (*indices, tensor.detach().values())]
    return [tensor.layout, indices[0].dtype, tensor.shape, tensor.requires_grad, *parts]


def check_kinds(make: Callable[[str], Tensor], names: list[str], describe: Callable[[Tensor], list[Any]]) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        expected = describe(make(name))
        for to in ("worker0", "worker1"):
            assert rpc.rpc_sync(to, describe, (make(name),)) == expected, name
            assert describe(rpc.rpc_sync(to, make, (name,))) == expected, name
            assert describe(rpc.remote(to, identity, ([make(name)],)).to_here()[0]) == expected, name
        with autograd.context():
            assert describe(rpc.rpc_sync("worker1", make, (name,)).detach())[:3] == expected[:3]


def test_quantized_tensors(two_workers):
    two_workers[0].run(check_kinds, quantized, list(QUANTIZED), quantization)


def test_sparse_tensors(two_workers):
    two_workers[0].run(check_kinds, sparse, list(SPARSE), compressed)


def test_quantized_tensors_keep_their_strides(two_workers):
    def check() -> None:
        for name in ("transposed", "channels"):
            received = rpc.rpc_sync("worker1", quantized, (name,))
            assert received.stride() == quantized(name).stride()

    two_workers[0].run(check)


def quantization_despite_warnings(tensor: Tensor) -> list[Any]:
    """Returns the quantization of a tensor. Called on a worker that turns warnings into errors."""
    return quantization(tensor)


def empty_bytes() -> list[Tensor]:
    return [torch.empty((0, 3), dtype=torch.uint8).view(dtype) for dtype in BYTES if dtype.itemsize == 1]


def describe_empty(tensors: list[Tensor]) -> list[Any]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]


def test_tensors_without_elements_arrive_in_deterministic_programs(two_workers):
    def check() -> None:
        torch.use_deterministic_algorithms(mode=True)
        try:
            received = rpc.rpc_sync("worker1", empty_bytes)
        finally:
            torch.use_deterministic_algorithms(mode=False)
        assert describe_empty(received) == describe_empty(empty_bytes())

    two_workers[0].run(check)


def test_quantized_tensors_arrive_where_warnings_are_errors(workers):
    a, b = workers.rpc(2)
    b.run(warnings.simplefilter, "error")

    def check() -> None:
        for name in ("quint8", "channels"):
            assert rpc.rpc_sync("worker1", quantization_despite_warnings, (quantized(name),)) == quantization(
                quantized(name)
            )

    a.run(check)


def quantized_model() -> nn.Module:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="needs fbgemm")
def test_quantized_modules(two_workers):
    def check() -> None:
        x = torch.ones(1, 2)
        expected = quantized_model()(x)
        assert torch.equal(rpc.rpc_sync("worker1", quantized_model)(x), expected)
        assert torch.equal(rpc.rpc_sync("worker1", quantized_model().forward, (x,)), expected)

    two_workers[0].run(check)


def test_dtypes_that_torch_only_stores(two_workers):
    def check() -> None:
        for dtype in BYTES:
            carrier = torch.int16 if dtype.itemsize == 2 else torch.uint8
            integers = torch.arange(8, dtype=carrier)
            for sent in (integers, integers[::2], integers.view(2, 4).t(), integers[:0]):
                received = rpc.rpc_sync("worker1", identity, (sent.view(dtype),))
                assert received.dtype == dtype
                assert torch.equal(received.view(carrier), sent)

    two_workers[0].run(check)


def on_meta() -> Tensor:
    return torch.empty(2, 3, device="meta").t()


def test_tensors_without_elements_on_meta(two_workers):
    def check() -> None:
        received = rpc.rpc_sync("worker1", on_meta)
        assert (received.device.type, received.shape, received.stride()) == ("meta", (3, 2), (1, 3))
        model = rpc.rpc_sync("worker1", identity, (nn.Linear(1 << 20, 1 << 20, device="meta"),))
        assert all(isinstance(p, nn.Parameter) and p.is_meta and p.requires_grad for p in model.parameters())
        assert rpc.rpc_sync("worker1", identity, ([on_meta(), on_meta()],))[1].is_meta

    two_workers[0].run(check)


def yields() -> Iterator[int]:
    yield 1


async def yields_asynchronously() -> AsyncIterator[int]:
    yield 1


async def asynchronous() -> None:
    pass


def an_mkldnn_tensor() -> torch.Tensor:
    return torch.ones(2, 2).to_mkldnn()


def a_nested_tensor() -> dict[str, torch.Tensor]:
    return {"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}


def a_future() -> torch.futures.Future:
    return torch.futures.Future()


def a_quantized_tensor_without_scale() -> torch.Tensor:
    return torch.empty(2, dtype=torch.qint8)


def a_sparse_tensor_on_meta() -> torch.Tensor:
    return torch.sparse_coo_tensor(size=(2, 2), device="meta")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (yields, "the result cannot be sent: it is a generator: call the function by rpc_stream"),
        (yields_asynchronously, "it is an asynchronous generator: .*rpc_stream"),
        (asynchronous, "it is a coroutine, .* asyncio.run"),
        (a_future, "Can not pickle torch.futures.Future: wait for it, .*async_execution"),
        (an_mkldnn_tensor, r"layout torch._mkldnn: send tensor.to_dense\(\)"),
        (a_nested_tensor, r"the result\['a'\] .* nested tensor .*torch.jagged"),
        (a_quantized_tensor_without_scale, "quantized tensor without scale"),
        (a_sparse_tensor_on_meta, "sparse tensor on meta"),
    ],
)
def test_errors_for_unsendable_values_say_what_to_do(two_workers, function, problem):
    def check() -> None:
        with pytest.raises(SerializationError, match=problem):
            rpc.rpc_sync("worker1", function)
        with pytest.raises(SerializationError, match=problem):
            rpc.remote("worker1", function).to_here()

    two_workers[0].run(check)


def test_a_generator_is_found_within_arguments(two_workers):
    def check() -> None:
        with pytest.raises(
            SerializationError, match=r"args\[0\]\[1\] cannot be sent: it is a generator: .*rpc_stream"
        ):
            rpc.rpc_sync("worker1", identity, ([1, yields()],))
        assert list(rpc.rpc_stream("worker1", yields)) == [1]

    two_workers[0].run(check)


def test_the_future_of_a_call_is_found_within_arguments(two_workers):
    def check() -> None:
        with pytest.raises(SerializationError, match=r"args\[0\] cannot be sent: Can not pickle .*: wait for it"):
            rpc.rpc_sync("worker1", identity, (rpc.rpc_async("worker1", identity, (1,)),))

    two_workers[0].run(check)


def a_storage() -> torch.UntypedStorage:
    return torch.arange(3.0).untyped_storage()


def test_storages(two_workers):
    def check() -> None:
        received = rpc.rpc_sync("worker1", a_storage)
        assert type(received) is torch.UntypedStorage
        assert torch.empty(0).set_(received).tolist() == [0, 1, 2]

    two_workers[0].run(check)


def halves() -> list[Tensor]:
    whole = torch.zeros(4)
    return [whole[:2], whole, whole.view(2, 2).t(), whole[1:2].expand(3)]


def fill(first: Tensor, whole: Tensor, transposed: Tensor, row: Tensor) -> list[Any]:
    first += 1
    whole[3] = 5
    return [whole.tolist(), transposed.tolist(), row.tolist()]


def share_memory(model: nn.Module) -> bool:
    return model.first.data_ptr() == model.second.data_ptr() and model.first is not model.second


class TiedByMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2, 3))
        self.second = nn.Parameter(self.first.data.t())


def test_tensors_that_share_memory_share_it_where_they_arrive(two_workers):
    def check() -> None:
        expected = [[1, 1, 0, 5], [[1, 0], [1, 5]], [1, 1, 1]]
        assert fill(*halves()) == expected
        for to in ("worker0", "worker1"):
            assert rpc.rpc_sync(to, fill, tuple(halves())) == expected
            assert fill(*rpc.rpc_sync(to, halves)) == expected
        with autograd.context():
            assert share_memory(rpc.rpc_sync("worker1", TiedByMemory))
            assert rpc.rpc_sync("worker1", share_memory, (TiedByMemory(),))
        assert [future.wait() for future in rpc.broadcast_call(["worker0", "worker1"], fill, halves())] == [
            expected
        ] * 2

    two_workers[0].run(check)


def change_in_place(first: Tensor, whole: Tensor) -> Tensor:
    first *= 2
    return first.sum() + 10 * whole.square().sum()


def test_tensors_that_gradients_flow_through_do_not_share_memory(two_workers):
    def check() -> None:
        whole = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", change_in_place, (whole[:2], whole))
            assert loss.item() == 34
            autograd.backward(context_id, [loss])
            assert autograd.get_gradients(context_id)[whole].tolist() == [22, 22, 20]

    two_workers[0].run(check)


def change_by_weight(row: Tensor, whole: Tensor, weight: Tensor) -> Tensor:
    row *= weight
    return whole.sum()


def test_autograd_records_views_that_share_memory(two_workers):
    def check() -> None:
        whole, weight = torch.ones(2, 3), torch.full((), 5.0, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", change_by_weight, (whole[0], whole, weight))
            assert loss.item() == 18
            autograd.backward(context_id, [loss])
            assert autograd.get_gradients(context_id)[weight].item() == 3

    two_workers[0].run(check)


def round_trip(tensors: list[Tensor]) -> tuple[list[Tensor], int]:
    kept: list[bytes] = []

    def put(data: memoryview) -> agent_pb2.Payload:
        kept.append(bytes(data))
        return agent_pb2.Payload(local=len(kept))

    messages = encode_tensors(tensors, put)
    return decode_tensors(messages, lambda payload: kept[payload.local - 1]), sum(map(len, kept))


def element_addresses(tensor: Tensor) -> list[int]:
    """Returns the addresses of a tensor's elements."""
    offsets = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = torch.arange(size) * stride * tensor.itemsize
        offsets += steps.view([-1 if each == dim else 1 for each in range(tensor.dim())])
    return (offsets + tensor.data_ptr()).flatten().tolist()


@given(st.data())
@settings(max_examples=200)
def test_views_arrive_as_views(data):
    whole = torch.arange(24.0).view(2, 3, 4).permute(data.draw(st.permutations(range(3))))
    views = [whole]
    for _ in range(data.draw(st.integers(1, 4))):
        view = data.draw(st.sampled_from(views))
        for dim in range(view.dim()):
            start = data.draw(st.integers(0, view.shape[dim] - 1))
            step = data.draw(st.integers(1, 2))
            view = view[(slice(None),) * dim + (slice(start, None, step),)]
        if data.draw(st.booleans()):
            view = view.unsqueeze(0).expand(2, *view.shape)
        views.append(view)
    sent = data.draw(st.permutations(views))
    received, nbytes = round_trip(list(sent))
    assert all(torch.equal(a, b) for a, b in zip(received, sent, strict=True))
    assert nbytes == whole.numel() * whole.itemsize
    base = next(received for received, tensor in zip(received, sent, strict=True) if tensor is whole)
    here, there = element_addresses(base), element_addresses(whole)
    for a, b in zip(received, sent, strict=True):
        assert [there.index(place) for place in element_addresses(b)] == [
            here.index(place) for place in element_addresses(a)
        ]


def test_tensors_that_no_other_contains_are_sent_alone():
    whole = torch.arange(8.0)
    for tensors, nbytes in (
        ([whole[:5], whole[3:]], 40),  # neither lies within the other one
        ([whole[::2], whole[2:5]], 28),  # gaps are not sent
        ([whole, whole.view(torch.int32)], 64),
        ([whole[:0], whole], 32),
        ([torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64).conj()], 32),
    ):
        received, sent = round_trip(tensors)
        assert all(torch.equal(a, b) for a, b in zip(received, tensors, strict=True))
        assert sent == nbytes


FLOAT, INT8 = agent_pb2.FLOAT32, agent_pb2.QINT8
FOUR = agent_pb2.Tensor(dtype=FLOAT, sizes=[4], data=agent_pb2.Payload(inline=bytes(16)))
SCALES = agent_pb2.Tensor(dtype=agent_pb2.FLOAT64, sizes=[1], data=agent_pb2.Payload(inline=bytes(8)))
ON_DEVICE = agent_pb2.Tensor(dtype=agent_pb2.INT64, sizes=[1], data=SCALES.data, device="cuda:0")


def sharing(
    tensor: int = 0, offset: int = 0, sizes: tuple[int, ...] = (4,), strides: tuple[int, ...] = (1,)
) -> Any:
    shared = agent_pb2.SharedMemory(tensor=tensor, offset=offset)
    return agent_pb2.Tensor(dtype=FLOAT, sizes=sizes, strides=strides, shared=shared)


@pytest.mark.parametrize(
    "message",
    [
        sharing(tensor=1),
        sharing(tensor=2),
        sharing(offset=1),
        sharing(offset=-1, sizes=(1,)),
        sharing(strides=(2,)),
        sharing(strides=(-1,)),
        sharing(strides=()),
        sharing(sizes=(-1,)),
        sharing(sizes=(1 << 62, 1 << 62), strides=(1, 1)),
        agent_pb2.Tensor(dtype=INT8, sizes=[4], shared=agent_pb2.SharedMemory()),
        agent_pb2.Tensor(dtype=INT8, sizes=[1], data=agent_pb2.Payload(inline=b"12")),
        agent_pb2.Tensor(dtype=INT8, sizes=[1], data=agent_pb2.Payload(inline=b"1"), parts=[SCALES]),
        agent_pb2.Tensor(
            dtype=INT8,
            sizes=[1],
            data=agent_pb2.Payload(inline=b"1"),
            parts=[SCALES, SCALES],
            quantization=agent_pb2.Quantization(axis=1),
        ),
        agent_pb2.Tensor(dtype=INT8, sizes=[2], data=agent_pb2.Payload(inline=b"12"), parts=[SCALES, SCALES]),
        agent_pb2.Tensor(dtype=FLOAT, sizes=[1, 1], layout=agent_pb2.SPARSE_CSR, parts=[SCALES, SCALES]),
        agent_pb2.Tensor(dtype=FLOAT, sizes=[1, 1], layout=agent_pb2.SPARSE_CSR, parts=[SCALES, SCALES, SCALES]),
        agent_pb2.Tensor(dtype=FLOAT, sizes=[1], parts=[ON_DEVICE, ON_DEVICE]),
        agent_pb2.Tensor(dtype=INT8, sizes=[1], data=agent_pb2.Payload(inline=b"1"), parts=[ON_DEVICE, ON_DEVICE]),
        agent_pb2.Tensor(dtype=FLOAT, sizes=[2], strides=[-1], device="meta"),
        agent_pb2.Tensor(dtype=FLOAT, sizes=[2], device="meta"),
        agent_pb2.Tensor(dtype=FLOAT, sizes=[1 << 62, 1 << 62], strides=[1 << 62, 1], device="meta"),
    ],
)
def test_malformed_messages(message):
    with pytest.raises(ValueError, match="malformed"):
        decode_tensors([FOUR, message], lambda payload: payload.inline)
