"""Hooks, copies, dtypes, dataclasses, sparse gradients and references in backward passes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import AutogradError
from torch import nn

from tests.remote_functions import add, identity, multiply


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values or (1.0, 2.0, 3.0), dtype=torch.float64, requires_grad=True)


def test_hooks_on_tensors_and_nodes(three_workers):
    def check() -> None:
        x = leaf()
        x.register_hook(lambda gradient: 10 * gradient)
        seen = []
        with autograd.context() as context_id:
            h = x * 2
            h.register_hook(lambda gradient: gradient + 1)
            h.grad_fn.register_hook(lambda inputs, outputs: seen.append("node"))
            received = rpc.rpc_sync("worker1", add, (h, h))
            received.register_hook(lambda gradient: 3 * gradient)
            received.grad_fn.register_hook(lambda inputs, outputs: seen.append("received"))
            autograd.backward(context_id, [received.sum()])
            # 1, times 3 where it was received, twice, plus 1 where it was sent, times 2 and 10.
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full_like(x, (3 * 2 + 1) * 2 * 10))
        assert seen == ["received", "node"]
        assert x.grad is None

    three_workers[0].run(check)


def test_hooks_of_accumulation_nodes(three_workers):
    def check() -> None:
        x = leaf()
        node = torch.autograd.graph.get_gradient_edge(x).node
        seen = []
        node.register_prehook(lambda gradients: (gradients[0] * 5,))
        node.register_hook(lambda inputs, outputs: seen.append((inputs, outputs[0].clone())))
        removed = node.register_hook(lambda inputs, outputs: seen.append("removed"))
        removed.remove()
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", multiply, (x, x)).sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], 10 * x)
        ((inputs, output),) = seen
        assert inputs == ()
        assert torch.equal(output, 10 * x)

    three_workers[0].run(check)


def test_post_accumulate_hooks_see_the_contexts_gradient(three_workers):
    def check() -> None:
        x, y = leaf(), leaf()
        x.grad = torch.full_like(x, 7)
        seen = []
        x.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.clone()))

        def consume(tensor: torch.Tensor) -> None:
            with torch.no_grad():
                tensor -= tensor.grad
            tensor.grad = None

        y.register_post_accumulate_grad_hook(consume)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", multiply, (x, y)).sum()
            autograd.backward(context_id, [loss], retain_graph=True)
            found = autograd.get_gradients(context_id)
            assert torch.equal(found[x], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
            assert y not in found
            autograd.backward(context_id, [loss])
            assert torch.equal(seen[1], 2 * seen[0])
        assert torch.equal(x.grad, torch.full_like(x, 7))
        assert y.grad is None
        assert torch.equal(y, torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64))

    three_workers[0].run(check)


def test_a_hook_may_run_a_pass_in_another_context(three_workers):
    def check() -> None:
        x, y = leaf(), leaf()
        seen = []

        def hook(_: torch.Tensor) -> None:
            with autograd.context() as inner, torch.enable_grad():
                autograd.backward(inner, [rpc.rpc_sync("worker2", multiply, (y, y)).sum()])
                seen.append(autograd.get_gradients(inner)[y])

        x.register_post_accumulate_grad_hook(hook)
        y.register_post_accumulate_grad_hook(lambda tensor: tensor.grad.mul_(3))
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", multiply, (x, x)).sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], 2 * x)
        assert torch.equal(seen[0], 6 * y)

    three_workers[0].run(check)


def test_a_hook_cannot_run_a_pass_in_its_own_context(three_workers):
    """The gradient of that pass would be lost when the hook returns."""

    def check() -> None:
        x = leaf()
        errors = []

        def hook(_: torch.Tensor) -> None:
            with torch.enable_grad(), pytest.raises(AutogradError, match="at the same time") as caught:
                autograd.backward(context_id, [(10 * x).sum()])
            errors.append(caught.value)

        x.register_post_accumulate_grad_hook(hook)
        with autograd.context() as context_id:
            autograd.backward(context_id, [x.sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.ones_like(x))
            assert len(errors) == 1

    three_workers[0].run(check)


def test_gradients_are_not_recorded_in_hooks(three_workers):
    def check() -> None:
        x = leaf()
        modes = []
        node = x.view_as(x).grad_fn.next_functions[0][0]
        for register in (
            x.register_hook,
            x.register_post_accumulate_grad_hook,
            node.register_prehook,
            node.register_hook,
        ):
            register(lambda *_: modes.append(torch.is_grad_enabled()))
        with autograd.context() as context_id:
            autograd.backward(context_id, [x.sum()])
        assert modes == [False] * 4

    three_workers[0].run(check)


leaves_with_hooks: list[torch.Tensor] = []


def keep(*leaves: torch.Tensor) -> None:
    leaves_with_hooks[:] = leaves


def pass_over(index: int) -> torch.Tensor:
    """Runs a pass over a leaf on this worker, in a context of its own; returns the gradient."""
    x = leaves_with_hooks[index]
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker2", multiply, (x, x)).sum()])
        return autograd.get_gradients(context_id)[x]


def pass_over_that_of(worker: str, index: int) -> torch.Tensor:
    return rpc.rpc_sync(worker, pass_over, (index,))


def test_a_hook_may_call_a_worker_that_runs_a_pass_on_this_one(three_workers):
    def check() -> None:
        x, y = leaf(), leaf()
        keep(x, y)
        seen = []
        x.register_post_accumulate_grad_hook(
            lambda _: seen.append(rpc.rpc_sync("worker1", pass_over_that_of, ("worker0", 1)))
        )
        y.register_post_accumulate_grad_hook(lambda tensor: tensor.grad.mul_(3))
        assert torch.equal(pass_over(0), 2 * x)
        assert torch.equal(seen[0], 6 * y)

    three_workers[0].run(check)


def test_a_leaf_in_two_contexts_has_the_gradient_of_one_while_its_hooks_run(three_workers):
    def check() -> None:
        x = leaf()
        in_hook, other_is_here = threading.Event(), threading.Event()

        def on_gradient(gradient: torch.Tensor) -> None:
            if gradient[0] == 5:
                other_is_here.set()

        def hook(tensor: torch.Tensor) -> None:
            before = tensor.grad
            in_hook.set()
            other_is_here.wait()
            assert tensor.grad is before
            tensor.grad = before * 2

        x.register_hook(on_gradient)
        x.register_post_accumulate_grad_hook(hook)

        def gradient(factor: float) -> torch.Tensor:
            with autograd.context() as context_id:
                autograd.backward(context_id, [(rpc.rpc_sync("worker1", identity, (x,)) * factor).sum()])
                return autograd.get_gradients(context_id)[x]

        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(gradient, 3)
            in_hook.wait()
            second = threads.submit(gradient, 5)
            assert torch.equal(first.result(), torch.full_like(x, 6))
            assert torch.equal(second.result(), torch.full_like(x, 10))
        assert x.grad is None

    three_workers[0].run(check)


def test_an_error_in_a_hook_ends_the_pass(three_workers):
    def check() -> None:
        x = leaf()

        def fail(_: torch.Tensor) -> None:
            raise LookupError("no hook today")

        handle = x.register_post_accumulate_grad_hook(fail)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", multiply, (x, x)).sum()
            with pytest.raises(LookupError, match="no hook today"):
                autograd.backward(context_id, [loss], retain_graph=True)
        assert x.grad is None
        handle.remove()
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", multiply, (x, x)).sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], 2 * x)

    three_workers[0].run(check)


class Stash(torch.autograd.Function):
    """Keeps the address of its gradient, and the gradient itself if told to."""

    pointer = 0
    kept = None

    @staticmethod
    def forward(ctx, x, keep):
        ctx.keep = keep
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        Stash.pointer = gradient.data_ptr()
        if ctx.keep:
            Stash.kept = gradient
        return gradient, None


class StashView(torch.autograd.Function):
    """As Stash, but its gradient is a view; keeps the tensor that it is a view of."""

    @staticmethod
    def forward(ctx, x, keep_base):
        ctx.keep_base = keep_base
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        base = gradient.clone()[None]
        Stash.pointer = base.data_ptr()
        if ctx.keep_base:
            Stash.kept = base
        return base.view(3), None


def test_gradients_are_stolen_unless_something_else_refers_to_them(three_workers):
    def check() -> None:
        for keep in (False, True):
            x = leaf()
            with autograd.context() as context_id:
                autograd.backward(context_id, [multiply(Stash.apply(x, keep), x.detach()).sum()])
                found = autograd.get_gradients(context_id)[x]
                assert (found.data_ptr() == Stash.pointer) is not keep
        for keep_base in (False, True):
            x = leaf()
            with autograd.context() as context_id:
                autograd.backward(context_id, [multiply(StashView.apply(x, keep_base), x.detach()).sum()])
                found = autograd.get_gradients(context_id)[x]
                assert (found.data_ptr() == Stash.pointer) is not keep_base
                Stash.kept = None
        for x, y in ((leaf(), leaf()[None]), (leaf()[None], leaf())):  # one has a view of the other's gradient
            x, y = (each.detach().requires_grad_() for each in (x, y))
            with autograd.context() as context_id:
                autograd.backward(context_id, [(x.view(3) + y.view(3)).square().sum()])
                found = autograd.get_gradients(context_id)
                assert found[x].data_ptr() != found[y].data_ptr()
        x, y = leaf(), leaf()
        with autograd.context() as context_id:
            autograd.backward(context_id, [(x + y).square().sum() + (x + y.view(3)).square().sum()])
            found = autograd.get_gradients(context_id)
            found[x].zero_()
            assert torch.equal(found[y], 4 * (x + y))
            assert found[y].is_contiguous()

    three_workers[0].run(check)


def weighted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x.to(dtype) * 2).real.sum()


def test_dtypes(three_workers):
    """Gradients have the dtype of their leaf, whatever the dtype of the computation."""

    def check() -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
            for other in (torch.bfloat16, torch.float64, torch.complex128):
                x = torch.ones(3, dtype=dtype, requires_grad=True)
                if dtype.is_complex and not other.is_complex:
                    continue
                with autograd.context() as context_id:
                    autograd.backward(context_id, [rpc.rpc_sync("worker1", weighted, (x, other))])
                    found = autograd.get_gradients(context_id)[x]
                assert torch.equal(found, torch.full_like(x, 2))
                assert found.dtype == dtype

    three_workers[0].run(check)


@dataclass
class Batch:
    inputs: torch.Tensor
    extra: dict[str, list[torch.Tensor]]


def combine(batch: Batch) -> Batch:
    return Batch(batch.inputs * 2, {"sums": [batch.inputs + batch.extra["more"][0], torch.ones(3)]})


def test_dataclasses(three_workers):
    def check() -> None:
        x, y = leaf(), leaf()
        with autograd.context() as context_id:
            back = rpc.rpc_sync("worker1", combine, (Batch(x, {"more": [y]}),))
            autograd.backward(context_id, [(back.inputs * back.extra["sums"][0]).sum()])
            found = autograd.get_gradients(context_id)
            assert torch.equal(found[x], 2 * (x + y) + 2 * x)
            assert torch.equal(found[y], 2 * x)

    three_workers[0].run(check)


def look_up(table: rpc.RRef, indices: torch.Tensor, sparse: bool) -> torch.Tensor:
    return nn.functional.embedding(indices, table.local_value(), sparse=sparse).sum()


def make_table() -> torch.Tensor:
    return torch.ones(5, 2, requires_grad=True)


def gradient_of(table: rpc.RRef, context_id: int) -> torch.Tensor:
    return autograd.get_gradients(context_id)[table.local_value()]


@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, True), (False, False)])
def test_sparse_and_dense_gradients_add_up(three_workers, kinds):
    """As in torch, the sum of sparse and dense gradients is dense."""

    def check() -> None:
        table = rpc.remote("worker1", make_table)
        with autograd.context() as context_id:
            for sparse in kinds:
                loss = rpc.rpc_sync("worker1", look_up, (table, torch.tensor([1, 3, 3]), sparse))
                autograd.backward(context_id, [loss])
            found = rpc.rpc_sync("worker1", gradient_of, (table, context_id))
        assert found.is_sparse is all(kinds)
        expected = torch.zeros(5, 2).index_add(0, torch.tensor([1, 3, 3]), torch.full((3, 2), 2.0))
        assert torch.equal(found.to_dense(), expected)

    three_workers[0].run(check)


def rref_loss(x: torch.Tensor) -> torch.Tensor:
    return (rpc.rpc_sync("worker2", multiply, (x, x)) * 2).sum()


def test_a_pass_from_a_reference(three_workers):
    def check() -> None:
        x = leaf()
        with autograd.context() as context_id:
            rref = rpc.remote("worker1", rref_loss, (x,))
            rref.backward(context_id, retain_graph=True)
            rref.backward(context_id)
            assert torch.equal(autograd.get_gradients(context_id)[x], 8 * x)

    three_workers[0].run(check)


def parts(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x * scale, x.sum()


def only_zeros(x: torch.Tensor) -> torch.Tensor:
    return Zeros.apply(x)


class Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return torch._efficientzerotensor((1000, 100), dtype=torch.float64)


def test_gradients_known_to_be_zero_are_not_sent(three_workers):
    """Gradients that repeat one number are not sent in full either, which would take 800,000 bytes."""

    def sent_by_worker1() -> int:
        return rpc.rpc_sync("worker1", rpc.debug_info)["bytes_sent"]

    def check() -> None:
        x = torch.randn(1000, 100, dtype=torch.float64, requires_grad=True)
        nbytes = x.numel() * 8
        cases = {
            "unused": (lambda y: y[1], lambda: torch.ones_like(x)),
            "zeros": (None, lambda: torch.zeros_like(x)),
            "expanded": (lambda y: y[1] * 3, lambda: torch.full_like(x, 3)),
        }
        for name, (loss_of, expected) in cases.items():
            with autograd.context() as context_id:
                if loss_of is None:
                    loss = rpc.rpc_sync("worker1", only_zeros, (x,))
                else:
                    loss = loss_of(rpc.rpc_sync("worker1", parts, (x, 2.0)))
                before = sent_by_worker1()
                mine = rpc.debug_info()["bytes_sent"]
                autograd.backward(context_id, [loss])
                assert sent_by_worker1() - before < nbytes / 10, name
                assert rpc.debug_info()["bytes_sent"] - mine < nbytes / 10, name
                assert torch.equal(autograd.get_gradients(context_id)[x], expected()), name
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", parts, (x, 2.0))[0].square().sum()
            before = sent_by_worker1()
            autograd.backward(context_id, [loss])
            assert sent_by_worker1() - before > nbytes

    three_workers[0].run(check)


def test_an_unused_tensor_has_no_gradient_of_zeros(three_workers):
    """A leaf that only an unused tensor of a message depends on has no gradient."""

    def check() -> None:
        x, y = leaf(), leaf()
        with autograd.context() as context_id:
            used, _ = rpc.rpc_sync("worker1", identity, ((x, y),))
            autograd.backward(context_id, [used.sum()])
            assert set(autograd.get_gradients(context_id)) == {x}

    three_workers[0].run(check)
