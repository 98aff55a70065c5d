"""Clipping gradients by their norm over several workers."""

import math

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import UnknownContextError
from gradwire.optim import DistributedOptimizer, clip_grad_norm_

from tests.optim.models import (
    Layer,
    Model,
    Table,
    assert_same_weights,
    local_step,
    loss_of,
    parameters_of,
    remote_forwards,
    spread,
)

OWNERS = ("worker1", "worker2", "worker0", "worker1")


def gradients_of(models: list[rpc.RRef], context_id: int) -> list[torch.Tensor | None]:
    return [gradient for model in models for gradient in model.rpc_sync().gradients(context_id)]


def local_gradients(kind: type[Model]) -> list[torch.nn.Parameter]:
    local = [kind(seed) for seed in range(len(OWNERS))]
    loss_of(local, 1).backward()
    return [parameter for model in local for parameter in model.parameters()]


@pytest.mark.parametrize("norm_type", [2.0, 1, 3.5, math.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0.25, 1e6, 0])
def test_equals_clipping_in_one_process(three_workers, max_norm, norm_type):
    def check() -> None:
        parameters = local_gradients(Layer)
        expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        models = spread(Layer, *OWNERS)
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(remote_forwards(models), 1)])
            total = clip_grad_norm_(context_id, parameters_of(models), max_norm, norm_type)
            torch.testing.assert_close(total, expected)
            torch.testing.assert_close(gradients_of(models, context_id), [p.grad for p in parameters])
            assert all(model.rpc_sync().weights() for model in models)  # which also looks for a `.grad`

    three_workers[0].run(check)


def test_the_step_takes_the_clipped_gradients(three_workers):
    def check() -> None:
        models, local = spread(Layer, "worker1", "worker2"), [Layer(0), Layer(1)]
        parameters = [p for layer in local for p in layer.parameters()]
        reference = torch.optim.SGD(parameters, lr=1.0)
        reference.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(parameters, 0.1) and None)
        rrefs = parameters_of(models)
        optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
        for step in range(3):
            local_step(local, reference, step)
            with autograd.context() as context_id:
                autograd.backward(context_id, [loss_of(remote_forwards(models), step)])
                clip_grad_norm_(context_id, rrefs, 0.1)
                optimizer.step(context_id)
        assert_same_weights(models, local)

    three_workers[0].run(check)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_sparse_gradients(three_workers, norm_type):
    """torch cannot clip sparse gradients, so the expected values are those of dense ones."""

    def check() -> None:
        parameters = local_gradients(Table)
        for parameter in parameters:
            parameter.grad = parameter.grad.to_dense()
        expected = torch.nn.utils.clip_grad_norm_(parameters, 0.5, norm_type)
        models = spread(Table, *OWNERS)
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(remote_forwards(models), 1)])
            total = clip_grad_norm_(context_id, parameters_of(models), 0.5, norm_type)
            torch.testing.assert_close(total, expected)
            clipped = gradients_of(models, context_id)
            assert all(gradient.is_sparse for gradient in clipped)
            torch.testing.assert_close([g.to_dense() for g in clipped], [p.grad for p in parameters])

    three_workers[0].run(check)


def test_gradients_are_scaled_in_place_and_add_up_afterwards(three_workers):
    def check() -> None:
        leaf = torch.tensor([3.0, 4.0], requires_grad=True)
        rref = rpc.RRef(leaf)
        with autograd.context() as context_id:
            autograd.backward(context_id, [(leaf * leaf.detach()).sum()])
            before = autograd.get_gradients(context_id)[leaf]
            assert clip_grad_norm_(context_id, [rref], 1.0) == 5.0
            assert autograd.get_gradients(context_id)[leaf] is before
            torch.testing.assert_close(before, torch.tensor([0.6, 0.8]))
            # A gradient that torch computes as a view of one number is the context's own too.
            autograd.backward(context_id, [leaf.sum()])
            torch.testing.assert_close(autograd.get_gradients(context_id)[leaf], torch.tensor([1.6, 1.8]))
        with autograd.context() as context_id:
            autograd.backward(context_id, [leaf.sum()])
            clip_grad_norm_(context_id, [rref], 1.0)
            torch.testing.assert_close(autograd.get_gradients(context_id)[leaf], torch.full((2,), 0.5**0.5))

    three_workers[0].run(check)


def test_mixed_and_complex_types(three_workers):
    def check() -> None:
        leaves = [
            torch.ones(3, requires_grad=True),
            torch.ones(2, dtype=torch.float64, requires_grad=True),
            torch.ones(2, dtype=torch.complex64, requires_grad=True),
        ]
        copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        sum((copy.abs() * 3).sum() for copy in copies).backward()
        expected = torch.nn.utils.clip_grad_norm_(copies, 1.0)
        with autograd.context() as context_id:
            autograd.backward(context_id, [sum((leaf.abs() * 3).sum() for leaf in leaves)])
            total = clip_grad_norm_(context_id, [rpc.RRef(leaf) for leaf in leaves], 1.0)
            torch.testing.assert_close(total, expected)
            found = autograd.get_gradients(context_id)
            torch.testing.assert_close([found[leaf] for leaf in leaves], [copy.grad for copy in copies])

    three_workers[0].run(check)


def test_no_gradients_at_all(three_workers):
    def check() -> None:
        models = spread(Layer, "worker1", "worker2")
        with autograd.context() as context_id:
            assert clip_grad_norm_(context_id, parameters_of(models), 1.0) == torch.tensor(0.0)
            assert clip_grad_norm_(context_id, [], 1.0) == torch.tensor(0.0)
            # Some have one: the others neither count nor get one.
            autograd.backward(context_id, [loss_of(remote_forwards(models[:1]), 1)])
            clip_grad_norm_(context_id, parameters_of(models), 0.5)
            squares = [g.square().sum() for g in models[0].rpc_sync().gradients(context_id)]
            torch.testing.assert_close(sum(squares).sqrt(), torch.tensor(0.5))
            assert models[1].rpc_sync().gradients(context_id) == [None, None]

    three_workers[0].run(check)


def make_infinite() -> rpc.RRef:
    return rpc.RRef(torch.tensor([0.0, 1.0], requires_grad=True))


def test_norms_that_are_not_finite(three_workers):
    def check() -> None:
        infinite, finite = rpc.rpc_sync("worker1", make_infinite), rpc.rpc_sync("worker2", make_infinite)
        with autograd.context() as context_id:
            loss = infinite.to_here().sqrt().sum() + (finite.to_here() * 3).sum()
            autograd.backward(context_id, [loss])

            def finite_gradient() -> torch.Tensor:
                return rpc.rpc_sync("worker2", gradient_of, (context_id, finite))

            with pytest.raises(RuntimeError, match=r"order 2.0 .* is non-finite"):
                clip_grad_norm_(context_id, [infinite, finite], 1.0, error_if_nonfinite=True)
            assert finite_gradient().tolist() == [3.0, 3.0]
            assert clip_grad_norm_(context_id, [infinite, finite], 1.0) == math.inf
            assert finite_gradient().tolist() == [0.0, 0.0]

    three_workers[0].run(check)


def gradient_of(context_id: int, rref: rpc.RRef) -> torch.Tensor:
    return autograd.get_gradients(context_id)[rref.local_value()]


def test_bad_arguments(three_workers):
    def check() -> None:
        rref = rpc.rpc_sync("worker1", make_infinite)
        with pytest.raises(TypeError, match=r"params_rref\[1\] is of type Tensor"):
            clip_grad_norm_(0, [rref, torch.ones(1)], 1.0)
        with pytest.raises(TypeError, match="params_rref is of type RRef"):
            clip_grad_norm_(0, rref, 1.0)
        for max_norm in (-1.0, math.nan):
            with pytest.raises(ValueError, match=f"max_norm is {max_norm:g}"):
                clip_grad_norm_(0, [rref], max_norm)
        with pytest.raises(UnknownContextError) as caught:
            clip_grad_norm_(99, [rref], 1.0)
        assert "taking the norms of gradients failed on worker 'worker1'" in caught.value.__notes__

    three_workers[0].run(check)
