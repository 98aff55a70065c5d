"""What a worker's part of a backward pass leaves out: runs of torch's engine, copies, repeated bytes."""

from typing import Any

import torch
from gradwire import autograd, rpc
from gradwire.autograd import engine
from gradwire.autograd.gradient_sender import compress, decompress

from tests import remote_functions
from tests.remote_functions import add, identity, multiply

ELEMENTS = 1 << 17
"""Of tensors of 1 MiB, which travel in shared memory."""


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values or (1.0, 2.0, 3.0), dtype=torch.float64, requires_grad=True)


def test_a_leaf_that_is_sent_several_times_and_used_here_gets_one_gradient(three_workers):
    """Its hooks run once, with the sum."""

    def check() -> None:
        x, y = leaf(), leaf(4.0, 5.0, 6.0)
        seen = []
        x.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.clone()))
        with autograd.context() as context_id:
            there = rpc.rpc_sync("worker1", multiply, (x, y)) + rpc.rpc_sync("worker1", add, (x, y))
            elsewhere = rpc.rpc_sync("worker2", multiply, (x, x))
            autograd.backward(context_id, [(there + elsewhere + x * 7).sum()])
            found = autograd.get_gradients(context_id)
        expected = y + 1 + 2 * x + 7
        assert torch.equal(found[x], expected)
        assert torch.equal(found[y], x + 1)
        assert len(seen) == 1
        assert torch.equal(seen[0], expected)

    three_workers[0].run(check)


def test_hooks_of_a_leaf_that_are_registered_after_it_was_sent(three_workers):
    def check() -> None:
        x = leaf()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", multiply, (x, x)).sum()
            x.register_hook(lambda gradient: 10 * gradient)
            node = torch.autograd.graph.get_gradient_edge(x).node
            node.register_prehook(lambda gradients: (gradients[0] + 1,))
            autograd.backward(context_id, [loss])
            assert torch.equal(autograd.get_gradients(context_id)[x], 10 * 2 * x + 1)

    three_workers[0].run(check)


received: list[int] = []
"""The addresses of the gradients that this worker has received."""


def note_received() -> None:
    take = engine.decompress

    def noting(compressed: Any) -> Any:
        gradients = take(compressed)
        received.extend(each.data_ptr() for each in gradients)
        return gradients

    engine.decompress = noting


def addresses_received() -> list[int]:
    return received


def own_leaf() -> torch.Tensor:
    if not remote_functions.kept:
        remote_functions.keep(torch.rand(ELEMENTS, dtype=torch.float64, requires_grad=True))
    x: torch.Tensor = remote_functions.kept[0]
    return x


def own_gradient_is_the_received_one(context_id: int) -> bool:
    return autograd.get_gradients(context_id)[own_leaf()].data_ptr() == received[-1]


def test_large_gradients_of_leaves_are_not_copied(three_workers):
    """Neither those that come with the request of a pass, nor those that come with the answer."""

    def check() -> None:
        note_received()
        rpc.rpc_sync("worker1", note_received)
        x, y = (torch.rand(ELEMENTS, dtype=torch.float64, requires_grad=True) for _ in range(2))
        with autograd.context() as context_id:
            product = rpc.rpc_sync("worker1", multiply, (x, y))
            autograd.backward(context_id, [product.square().sum()])
            found = autograd.get_gradients(context_id)
            assert torch.allclose(found[x], 2 * x * y * y)
            assert {gradient.data_ptr() for gradient in found.values()} == set(addresses_received())
            del found
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", own_leaf).square().sum()])
            assert rpc.rpc_sync("worker1", own_gradient_is_the_received_one, (context_id,))

    three_workers[0].run(check)


def test_the_gradient_of_several_tensors_is_sent_once(three_workers):
    def check() -> None:
        x, y = (torch.rand(ELEMENTS, dtype=torch.float64, requires_grad=True) for _ in range(2))
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", add, (x, y)).square().sum()
            before = rpc.rpc_sync("worker1", rpc.debug_info)["bytes_sent"]
            autograd.backward(context_id, [loss])
            assert rpc.rpc_sync("worker1", rpc.debug_info)["bytes_sent"] - before < 1.5 * x.nbytes
            found = autograd.get_gradients(context_id)
            assert torch.equal(found[x], 2 * (x + y))
            found[x].zero_()
            assert torch.equal(found[y], 2 * (x + y))

    three_workers[0].run(check)


def test_small_gradients_are_sent_element_by_element():
    small, large = torch.ones(1).expand(8, 16), torch.ones(1).expand(1000, 1000)
    sent = compress([small, None, large, large])
    assert isinstance(sent[0], torch.Tensor)
    assert sent[0].is_contiguous()
    assert isinstance(sent[2], tuple)
    assert sent[2][0].numel() == 1
    assert sent[3] is sent[2]
    received = decompress(sent)
    assert [None if each is None else each.shape for each in received] == [
        (8, 16),
        None,
        (1000, 1000),
        (1000, 1000),
    ]
    assert not sent


def test_a_call_in_a_context_that_returns_what_it_was_given(three_workers):
    """All sends are of leaves, or of what was received: torch's engine has little to do on either worker."""

    def check() -> None:
        x = leaf()
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", identity, (x,)).sum()], mode="fast", timeout=20)
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.ones_like(x))

    three_workers[0].run(check)


def test_a_profile_shows_the_sends_of_leaves_too(three_workers):
    def check() -> None:
        x = leaf()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", multiply, (x, x)).sum()
            with torch.autograd.profiler.profile() as profile:
                autograd.backward(context_id, [loss])
            names = [event.name for event in profile.function_events]
            assert {"SendRpcBackward", "RecvRpcBackward"} <= set(names), names
            assert torch.equal(autograd.get_gradients(context_id)[x], 2 * x)

    three_workers[0].run(check)
