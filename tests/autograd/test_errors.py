"""Backward passes that cannot run, and contexts that do not exist."""

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import AutogradError, NotInitializedError, UnknownContextError

from tests.remote_functions import add, multiply


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise LookupError("no gradient today")


def fail_in_backward(x: torch.Tensor) -> torch.Tensor:
    return Fails.apply(x) * 2


def relay(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", fail_in_backward, (x * 2,)) * 3


@pytest.fixture
def three_workers(three_workers):
    """Three workers in an RPC group; after the test another backward pass succeeds."""
    yield three_workers

    def one_more() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", multiply, (x, rpc.rpc_sync("worker2", multiply, (x, x)))).sum()
            autograd.backward(context_id, [loss])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 3.0))

    three_workers[0].run(one_more)


def test_bad_roots(three_workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            remote = rpc.rpc_sync("worker1", multiply, (x, x))
            cases = [
                ([torch.ones(())], r"requires_grad not set on roots\[0\]"),
                ([remote.sum(), remote.detach().sum()], r"requires_grad not set on roots\[1\]"),
                ([remote], r"roots\[0\] has shape \(3,\) and is not a scalar"),
                ([], "No tensors provided for gradient computation.*give a list"),
                (remote.sum(), "give a list"),
                ([1.0], "is not a tensor"),
            ]
            for roots, text in cases:
                with pytest.raises(AutogradError, match=text):
                    autograd.backward(context_id, roots)

    three_workers[0].run(check)


def test_unknown_contexts(three_workers):
    def check() -> None:
        x = torch.ones((), requires_grad=True)
        for context_id in (0, 12345, 1 << 48 | 7):
            with pytest.raises(UnknownContextError, match=str(context_id)):
                autograd.backward(context_id, [x])
            with pytest.raises(UnknownContextError, match="worker0"):
                autograd.get_gradients(context_id)
        with autograd.context() as ended:
            pass
        with pytest.raises(UnknownContextError, match="has ended"):
            autograd.get_gradients(ended)
        with pytest.raises(UnknownContextError, match="worker1"):
            rpc.rpc_sync("worker1", autograd.get_gradients, (5,))

    three_workers[0].run(check)


@pytest.mark.parametrize(
    ("to", "function"), [("worker1", fail_in_backward), ("worker1", relay), ("worker0", relay)]
)
def test_an_error_in_any_workers_backward(three_workers, to, function):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            other = rpc.rpc_sync("worker1", multiply, (x, x))
            loss = (rpc.rpc_sync(to, function, (x * other,)) * rpc.rpc_sync("worker2", add, (x, other))).sum()
            with pytest.raises(LookupError, match="no gradient today"):
                autograd.backward(context_id, [loss])

    three_workers[0].run(check)


def test_an_error_in_the_callers_backward(three_workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", multiply, (Fails.apply(x), x)).sum()
            with pytest.raises(LookupError, match="no gradient today"):
                autograd.backward(context_id, [loss])

    three_workers[0].run(check)


def test_the_graph_is_used_up(three_workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", multiply, (x, x)).sum()
            autograd.backward(context_id, [loss])
            with pytest.raises(RuntimeError, match="second time"):
                autograd.backward(context_id, [loss])

    three_workers[0].run(check)


def test_ordinary_backward_of_a_received_tensor(three_workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context():
            loss = rpc.rpc_sync("worker1", multiply, (x, x)).sum()
            with pytest.raises(AutogradError, match=r"use gradwire\.autograd\.backward"):
                loss.backward()

    three_workers[0].run(check)


def test_before_init():
    with pytest.raises(NotInitializedError), autograd.context():
        pass
    with pytest.raises(NotInitializedError):
        autograd.backward(1, [])
    with pytest.raises(NotInitializedError):
        autograd.get_gradients(1)


def test_a_context_ends_when_its_block_raises(three_workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with pytest.raises(KeyError), autograd.context():
            rpc.rpc_sync("worker1", multiply, (x, x))
            raise KeyError
        assert rpc.debug_info()["num_autograd_contexts"] == 0

    three_workers[0].run(check)


def test_contexts_nest(three_workers):
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as outer:
            first = rpc.rpc_sync("worker1", multiply, (x, x)).sum()
            with autograd.context() as inner:
                second = rpc.rpc_sync("worker1", multiply, (x, x)).sum()
                autograd.backward(inner, [second])
                assert torch.equal(autograd.get_gradients(inner)[x], 2 * x)
            autograd.backward(outer, [first])
            assert torch.equal(autograd.get_gradients(outer)[x], 2 * x)

    three_workers[0].run(check)
