"""Strides of tensors, TorchScript functions and modules, and references in arguments of both."""

import logging
import math

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import RpcError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.wire.pickling import MANY_OBJECTS, ONE_TENSOR, SMALL_BODY_BYTES, Packer, unpickle
from gradwire.rpc.wire.tensors import decode_tensors, encode_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.remote_functions import add, assert_clean, identity


@torch.jit.script
def doubled(x):
    return x + x


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return self.scale * x


def is_confirmed(rref) -> bool:
    return rref.confirmed_by_owner()


def call(function, x):
    return function(x)


def round_trip(tensor):
    kept = []

    def put(data):
        kept.append(bytes(data))
        return agent_pb2.Payload(local=len(kept))

    messages = encode_tensors([tensor], put)
    return decode_tensors(messages, lambda payload: kept[payload.local - 1])[0], sum(map(len, kept))


@given(st.data())
@settings(max_examples=200)
def test_strides_are_kept_and_repeated_elements_are_sent_once(data):
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(math.prod(sizes), dtype=torch.float32).view(sizes)
    for dim, size in enumerate(sizes):
        if data.draw(st.booleans()):
            step = data.draw(st.integers(1, 3))
            tensor = tensor.repeat_interleave(step, dim)[(slice(None),) * dim + (slice(0, None, step),)]
            assert tensor.shape[dim] == size
    tensor = tensor.permute(data.draw(st.permutations(range(len(sizes)))))
    once = tensor.numel()
    if data.draw(st.booleans()):
        tensor = tensor.unsqueeze(-1).expand(*tensor.shape, 2)
    received, nbytes = round_trip(tensor)
    assert torch.equal(received, tensor)
    assert nbytes == once * 4
    assert received.untyped_storage().nbytes() <= 4 * nbytes
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if once and span <= 4 * once:
        assert received.is_contiguous() == tensor.is_contiguous()
        assert tensor.is_contiguous() or received.stride() == tensor.stride()
    else:
        assert received.is_contiguous() == (once == tensor.numel())


COLUMN = torch.arange(1000.0).view(10, 100)[:, :1]

OVERLAPPING = {
    "one number": (torch.ones(()).expand(1 << 34), 4),
    "a mask": (torch.tensor([True, False] * 8).expand(1 << 20, 1 << 20, 16), 16),
    "rows, permuted": (torch.arange(6.0).view(3, 2, 1).expand(3, 2, 1 << 30).permute(2, 1, 0), 24),
    "a column": (COLUMN.expand(10, 1 << 30), 40),
    "with a gap": (torch.arange(12.0).view(3, 4)[:, None, 1:].expand(3, 1 << 30, 3), 36),
    "windows": (torch.arange(100.0).unfold(0, 50, 1), 400),
    "windows, expanded": (torch.arange(100.0).unfold(0, 50, 1).expand(1 << 30, 51, 50), 400),
    "scattered": (torch.arange(1000.0).as_strided((3, 3), (100, 100)), 36),
    "conjugate": (torch.ones(2, dtype=torch.complex64).conj().expand(1 << 30, 2), 16),
    "bfloat16": (torch.ones(3, 1, dtype=torch.bfloat16).expand(3, 1 << 30), 6),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_what_overlaps_itself_is_not_written_out(name):
    tensor, expected = OVERLAPPING[name]
    received, nbytes = round_trip(tensor)
    assert nbytes == expected
    assert received.untyped_storage().nbytes() <= 2 * expected
    assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
    assert [stride == 0 for stride in received.stride()] == [stride == 0 for stride in tensor.stride()]
    few = tuple(slice(None, 3) if stride == 0 else slice(None) for stride in tensor.stride())
    assert torch.equal(received[few], tensor[few])
    if name not in ("a column", "scattered"):
        assert received.stride() == tensor.stride()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_that_repeats_elements():
    tensor = torch.quantize_per_tensor(torch.arange(3.0), 0.5, 1, torch.qint8).expand(1 << 30, 3)
    received, nbytes = round_trip(tensor)
    assert (nbytes, received.stride(), received.q_scale()) == (3, (0, 1), 0.5)
    assert torch.equal(received[0].int_repr(), tensor[0].int_repr())


REFUSED = [
    ((2, 2), (1,), 16),
    ((2, 2), (0, 1), 16),  # two elements
    ((2, 2), (1, 1), 16),  # three elements
    ((2, 2), (-2, 1), 16),
    ((2, 2), (1 << 40, 1), 16),
    ((2, 2), (100, 1), 16),
    ((3, 3), (100, 100), 36),  # would be sent as a contiguous tensor
    ((3, 3), (1, 1), 4 * 6),
    ((1 << 40, 1 << 40), (0, 0), 4),
    ((1 << 40, 1 << 40), (1, 0), 4),
    ((1 << 40, 1 << 40), (1, 1), 4),
    ((1 << 62, 4), (0, 1), 16),
]


@pytest.mark.parametrize(("sizes", "strides", "nbytes"), REFUSED)
def test_strides_that_are_refused(sizes, strides, nbytes):
    message = agent_pb2.Tensor(dtype=agent_pb2.FLOAT32, sizes=sizes, strides=strides, data=agent_pb2.Payload())
    with pytest.raises(ValueError, match="malformed tensor: strides"):
        decode_tensors([message], lambda _payload: bytes(nbytes))


def call_scripts() -> None:
    x = torch.ones(3)
    assert torch.equal(rpc.rpc_sync("worker1", doubled, (x,)), 2 * x)
    assert torch.equal(rpc.remote("worker1", doubled, (x,)).to_here(), 2 * x)
    module = torch.jit.script(Scaled())
    assert torch.equal(rpc.rpc_sync("worker1", call, (module, x)), 3 * x)
    nameless = torch.jit.trace(lambda x: x * 5, x)
    assert torch.equal(rpc.rpc_sync("worker1", nameless, (x,)), 5 * x)
    back = rpc.rpc_sync("worker1", identity, (module,))
    assert torch.equal(back(x), 3 * x)


def test_script_functions_and_modules(workers):
    a, _ = workers.rpc(2)
    a.run(call_scripts)


def calls_from_script(to: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, doubled, (x,))


def test_calls_from_torchscript_are_refused():
    with pytest.raises(RpcError, match="rpc_sync cannot be called from inside TorchScript"):
        torch.jit.script(calls_from_script)


@torch.jit.script
def add_to_reference(
    rref: torch.distributed.rpc.RRef[torch.Tensor], x: torch.Tensor, times: int = 1
) -> tuple[torch.Tensor, str, bool]:
    value = rref.local_value() if rref.is_owner() else rref.to_here()
    for _ in range(times):
        value = value + rref.to_here() * x
    return value, rref.owner_name(), rref.confirmed_by_owner()


@torch.jit.script
def return_reference(rref: torch.distributed.rpc.RRef[torch.Tensor]) -> torch.distributed.rpc.RRef[torch.Tensor]:
    return rref


def call_with_references(owner: str) -> None:
    rref = rpc.remote(owner, torch.ones, (2,))
    two = torch.full((2,), 2.0)
    for args, kwargs in (((rref, two), {}), ((rref,), {"times": 1, "x": two})):
        value, name, confirmed = rpc.rpc_sync("worker1", add_to_reference, args, kwargs)
        assert (value.tolist(), name, confirmed) == ([3.0, 3.0], owner, True)
    assert rpc.remote("worker1", add_to_reference, (rref, two, 3)).to_here()[0].tolist() == [7.0, 7.0]


def have_gradients_flow_through_references() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        value, _, _ = rpc.rpc_sync("worker1", add_to_reference, (rpc.RRef(leaf), torch.ones(2)))
        autograd.backward(context, [value.sum()])
        assert autograd.get_gradients(context)[leaf].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("owner", ["worker1", "worker2"])
def test_references_in_arguments_of_script_functions(workers, owner):
    trio = workers.rpc(3)
    trio[0].run(call_with_references, owner)
    trio[0].run(have_gradients_flow_through_references)
    for worker in trio:
        worker.run(assert_clean)


def misuse_references_in_scripts() -> None:
    rref = rpc.RRef(torch.ones(1))
    with pytest.raises(RpcError, match=r"'rref', RRef\[Tensor\], is used by prim::Return .*: use its value"):
        rpc.rpc_sync("worker1", return_reference, (rref,))
    for args, kwargs in (((rref,), {}), ((rref, 1, 2, 3), {}), ((rref, 1), {"rref": rref}), ((rref, 1), {"y": 1})):
        with pytest.raises(TypeError, match=r"do not fit .*add_to_reference\(RRef\(Tensor\) rref, Tensor x"):
            rpc.rpc_sync("worker1", add_to_reference, args, kwargs)
    with pytest.raises(TypeError, match="'rref' of add_to_reference is 5: give an RRef"):
        rpc.rpc_sync("worker1", add_to_reference, (5, 1))


def test_what_script_functions_cannot_do_with_references(workers):
    workers.rpc(2)[0].run(misuse_references_in_scripts)


def test_references_in_arguments_are_confirmed_when_the_function_runs(workers):
    trio = workers.rpc(3)

    def check():
        for _ in range(20):
            rref = rpc.remote("worker2", add, (1, 1))
            assert rpc.rpc_sync("worker1", is_confirmed, (rref,))
            assert rpc.remote("worker1", is_confirmed, (rref,)).to_here()

    trio[0].run(check)
    for worker in trio:
        worker.run(assert_clean)


def test_what_a_function_raises_is_logged_where_it_ran(workers, tmp_path):
    a, b = workers.rpc(2)
    path = tmp_path / "log"

    def log_to_file():
        logger = logging.getLogger("gradwire.rpc.calls")
        logger.setLevel(logging.INFO)
        logger.addHandler(logging.FileHandler(path))

    def fail():
        for run in (lambda: rpc.rpc_sync("worker1", add, (1, "x")), rpc.remote("worker1", add, (2, "y")).to_here):
            with pytest.raises(TypeError):
                run()

    b.run(log_to_file)
    a.run(fail)
    text = path.read_text()
    assert text.count("a call from worker worker0 failed") == 2
    assert text.count("TypeError: unsupported operand") == 2


def test_a_large_value_does_not_make_later_ones_slow_to_pickle():
    packer = Packer()
    packer.pack("small", "the value")
    (kept,) = packer._idle
    packer.pack([f"object {number}" for number in range(MANY_OBJECTS)], "the value")
    assert kept not in packer._idle  # its memo would be cleared, all of it, after each value
    packer.pack(b"x" * SMALL_BODY_BYTES, "the value")
    assert len(packer._idle) == 1


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tensor_by_itself_is_pickled_as_it_is_in_others(requires_grad):
    tensor = torch.ones(2, requires_grad=requires_grad)
    packer = Packer()
    alone, inside = packer.pack(tensor, "the value"), packer.pack([tensor], "the value")
    for packed in (alone, inside):
        value = unpickle(packed.body, packed.tensors, [])
        (unpickled,) = value if isinstance(value, list) else [value]
        assert torch.equal(unpickled, tensor)
    if requires_grad:
        assert unpickle(alone.body, alone.tensors, []) is tensor
        assert len(alone.body) < len(inside.body)
        two = [tensor, torch.zeros(1)]
        assert alone.body == ONE_TENSOR
        assert unpickle(ONE_TENSOR, two, []) is tensor  # by way of the unpickler
