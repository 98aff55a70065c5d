"""The messages that take part in a pass: SMART and FAST mode, long chains, timeouts."""

import sys

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.autograd.extension import Autograd
from gradwire.autograd.graph import MAX_HEADER_SENDS, Graph
from gradwire.errors import RpcTimeoutError
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.contracts.messages import Outgoing
from gradwire.rpc.requests.codec import Extensions

from tests.remote_functions import assert_clean, multiply

HEADER_BYTES = 4096


@pytest.fixture
def three_workers(three_workers):
    """Three workers in an RPC group; after the test another backward pass succeeds."""
    yield three_workers

    def one_more() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", relay, (x,)).sum()
            autograd.backward(context_id, [loss])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 6.0))

    three_workers[0].run(one_more)


def relay(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", torch.mul, (x, 2)) * 3


def relay_and_forget(x: torch.Tensor) -> torch.Tensor:
    rpc.rpc_sync("worker2", torch.mul, (x, 2))
    return x * 3


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_modes_agree_if_all_messages_take_part(three_workers, mode):
    def check() -> None:
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = (rpc.rpc_sync("worker1", relay, (x,)) * rpc.rpc_sync("worker2", multiply, (x, y))).sum()
            autograd.backward(context_id, [loss], retain_graph=True, mode=mode)
            autograd.backward(context_id, [loss], mode=mode, timeout=30)
            found = autograd.get_gradients(context_id)
            assert torch.allclose(found[x], 2 * 12 * x * y)
            assert torch.allclose(found[y], 2 * 6 * x * x)

    three_workers[0].run(check)


def test_fast_waits_for_a_message_that_takes_no_part_and_smart_does_not(three_workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", multiply, (x, x)).sum()
            rpc.rpc_sync("worker2", multiply, (x, x))
            with pytest.raises(RpcTimeoutError, match=r"timeout of 0.2 s.*'worker\d' waits for .* message \d+ to"):
                autograd.backward(context_id, [loss], retain_graph=True, mode="fast", timeout=0.2)
            autograd.backward(context_id, [loss], mode="smart")
            assert torch.equal(autograd.get_gradients(context_id)[x], 2 * x)

    three_workers[0].run(check)


def test_fast_waits_for_messages_among_other_workers(three_workers):
    """The message that takes no part is between other workers, so the caller has to ask for it."""

    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", relay_and_forget, (x,)).sum()
            with pytest.raises(RpcTimeoutError) as caught:
                autograd.backward(context_id, [loss], retain_graph=True, mode="fast", timeout=0.2)
            assert caught.value.worker in ("worker1", "worker2")
            autograd.backward(context_id, [loss])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 3.0))

    three_workers[0].run(check)


def test_wrong_modes_and_timeouts(three_workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", multiply, (x, x)).sum()
            with pytest.raises(ValueError, match="mode is 'clever': give one of 'smart', 'fast'"):
                autograd.backward(context_id, [loss], mode="clever")
            for timeout in (-1, float("inf"), float("nan")):
                with pytest.raises(ValueError, match="timeout is"):
                    autograd.backward(context_id, [loss], timeout=timeout)
            autograd.backward(context_id, [loss])

    three_workers[0].run(check)


def hop(x: torch.Tensor) -> torch.Tensor:
    return x * 1.01


header_sizes: list[int] = []
"""Bytes of the autograd headers that this worker has sent since `measure_headers`."""


def measure_headers() -> None:
    on_send = Extensions.on_send

    def measured(self: Extensions, message: Outgoing) -> None:
        on_send(self, message)
        header_sizes.append(message.envelope.autograd.ByteSize())

    Extensions.on_send = measured


def largest_header() -> int:
    return max(header_sizes, default=0)


def send_at_most(limit: int) -> None:
    sys.modules[Graph.__module__].MAX_HEADER_SENDS = limit


@pytest.mark.parametrize(("limit", "hops"), [(MAX_HEADER_SENDS, 200), (7, 30)])
@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_headers_of_a_long_chain_are_small(workers, limit, hops, mode):
    """Workers ask for the closures that are omitted from headers."""

    def check() -> None:
        x, y = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
        x.requires_grad_()
        y.requires_grad_()
        with autograd.context() as context_id:
            h = x
            total = y
            for number in range(hops):
                h = rpc.rpc_sync(f"worker{1 + number % 2}", hop, (h,))
                total = total + h  # a graph that grows on this worker
                h = h + 0.001 * total
            omitted = omitted_closures(context_id)
            autograd.backward(context_id, [(h * y).sum()], mode=mode)
            found = autograd.get_gradients(context_id)
        h, total = x, y
        for _ in range(hops):
            h = hop(h)
            total = total + h
            h = h + 0.001 * total
        expected = torch.autograd.grad((h * y).sum(), [x, y])
        for leaf, gradient in zip((x, y), expected, strict=True):
            assert torch.allclose(found[leaf], gradient)
        assert omitted

    a, *others = workers.rpc(3)
    everybody = [a, *others]
    workers.each(everybody, measure_headers)
    workers.each(everybody, send_at_most, limit)
    a.run(check)
    sizes = workers.each(everybody, largest_header)
    assert 0 < max(sizes) < HEADER_BYTES
    workers.each(everybody, assert_clean)


def omitted_closures(context_id: int) -> int:
    """Returns how many closures of this worker are too large for a header."""
    context = current_agent().extension(Autograd).contexts.get(context_id)
    return sum(found is None for found in context._closures.values())
