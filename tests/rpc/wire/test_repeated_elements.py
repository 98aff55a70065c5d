"""Tensors that repeat their elements, as expanded ones do: what is repeated is not sent, by whatever channel."""

from collections.abc import Iterator

import pytest
import torch
from gradwire import autograd, rpc
from torch import Tensor

from tests.remote_functions import identity

MIB = 1 << 20
TIMES = 1 << 24
"""How often elements are repeated. Written out, the larger tensors would have 32 TiB."""


def large() -> Tensor:
    return torch.arange(MIB // 2, dtype=torch.float32)[:, None].expand(MIB // 2, TIMES)


def windows() -> Tensor:
    return torch.arange(MIB // 2, dtype=torch.float32).unfold(0, MIB // 4, 1)


def small() -> Tensor:
    return torch.arange(16).expand(TIMES, 16)


def numbers() -> Iterator[Tensor]:
    yield from (large(), windows(), small())


def summary(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int, float]:
    """Returns shape, strides, the bytes of memory, and the sum of some elements."""
    some = tensor[:, :2] if tensor.shape[1] == TIMES else tensor[:2]
    return tuple(tensor.shape), tensor.stride(), tensor.untyped_storage().nbytes(), some.sum().item()


def summaries(tensors: list[Tensor]) -> list[object]:
    return [summary(tensor) for tensor in tensors]


def gather() -> list[object]:
    gathered = rpc.all_gather([large(), small()], timeout=60)
    return [summaries(tensors) for tensors in gathered.values()]


def scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    return tensor * factor


def check(workers: list[str]) -> None:
    tensors = [large(), windows(), small()]
    expected = summaries(tensors)
    for name in workers:
        for tensor, one in zip(tensors, expected, strict=True):
            assert rpc.rpc_sync(name, summary, (tensor,)) == one
        assert rpc.rpc_sync(name, summaries, (tensors,)) == expected
        assert summaries(rpc.rpc_sync(name, identity, (tensors,))) == expected  # sent back
        assert summaries(rpc.remote(name, identity, (tensors,)).to_here()) == expected
    assert summaries(list(rpc.rpc_stream(workers[-1], numbers))) == expected
    for future in rpc.broadcast_call(workers, summaries, (tensors,)):
        assert future.wait() == expected


def check_gradients() -> None:
    base, factor = torch.ones(MIB // 8, 1, requires_grad=True), torch.full((MIB // 8, 4), 3.0, requires_grad=True)
    leaf = torch.ones(1).expand(1000).requires_grad_()
    with autograd.context() as context_id:
        product = rpc.rpc_sync("worker1", scaled, (base.expand(MIB // 8, 4), factor))
        ones = rpc.rpc_sync("worker1", scaled, (leaf, torch.arange(1000.0)))
        autograd.backward(context_id, [product.sum() + ones.sum()])
        gradients = autograd.get_gradients(context_id)
        assert torch.equal(gradients[base], torch.full((MIB // 8, 1), 12.0))
        assert torch.equal(gradients[factor], torch.ones(MIB // 8, 4))
        assert torch.equal(gradients[leaf], torch.arange(1000.0))


@pytest.mark.parametrize("transports", [("unix", "tcp", "grpc"), ("tcp", "grpc"), ("grpc",)])
def test_repeated_elements_are_not_sent(workers, transports):
    a, *others = workers.rpc(3, transports=transports, broadcasts=rpc.BroadcastOptions(threshold=256 << 10))
    a.run(check, ["worker0", "worker1", "worker2"])
    a.run(check, ["worker1", "worker2"])  # by connections that have been made meanwhile
    a.run(check_gradients)
    gathering = [worker.start(gather) for worker in (a, *others)]
    expected = summaries([large(), small()])
    for each in gathering:
        assert each.result() == [expected] * 3
