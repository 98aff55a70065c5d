"""Gradients across workers equal those in one process."""

import gc
import threading
from unittest.mock import patch

import torch
from gradwire import autograd, rpc
from gradwire.autograd import graph
from gradwire.autograd.contexts import Context
from gradwire.optim import DistributedOptimizer  # noqa: F401 - imported by workers
from torch import nn

from tests import remote_functions
from tests.remote_functions import add, assert_clean, identity, multiply, wait_until

TOLERANCE = 1e-6


class Runs(torch.autograd.Function):
    """Squares, and counts how often its backward runs."""

    count = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        Runs.count += 1
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Layer(nn.Module):
    """A layer of a model that is spread over workers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8).double()

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(sum(inputs)))

    def gradients(self, context_id: int) -> list[torch.Tensor]:
        found = autograd.get_gradients(context_id)
        assert all(parameter.grad is None for parameter in self.parameters())
        return [found[parameter] for parameter in self.parameters()]


def via_c_to_a(x: torch.Tensor) -> torch.Tensor:
    """Runs on b: is called by a, and calls c, which calls a."""
    h = (x * 2).sin()
    return rpc.rpc_sync("worker2", via_a, (h,)) * h


def via_a(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker0", multiply, (x.exp(), Runs.apply(x)))


def a_b_c_a(h: torch.Tensor) -> torch.Tensor:
    """Computes what the calls of `via_c_to_a` compute from the sine."""
    return h.exp() * h * h * h


def split(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    return x * 2, {"sin": x.sin(), "constant": torch.ones(3)}, torch.arange(3)


def in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(3)
    y[1:].add_(x[1:])
    y.view(3, 1).sin_()
    return y


def in_place_without_grad(x: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
    constant[:2].copy_(x[1:])
    constant.mul_(3)
    return constant


def embed(table: rpc.RRef, indices: torch.Tensor) -> torch.Tensor:
    return table.local_value()(indices)


def gradient_of(module: rpc.RRef, context_id: int) -> torch.Tensor:
    (parameter,) = module.local_value().parameters()
    return autograd.get_gradients(context_id)[parameter]


def leaf() -> torch.Tensor:
    return torch.randn(3, dtype=torch.float64).requires_grad_()


def check_against_one_process(distributed, local, leaves) -> None:
    """Checks that `distributed(*leaves)` has the gradients of `local(*leaves)`."""
    expected = torch.autograd.grad(local(*leaves), leaves, allow_unused=True)
    with autograd.context() as context_id:
        loss = distributed(*leaves)
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)
    for x, gradient in zip(leaves, expected, strict=True):
        assert x.grad is None
        if gradient is None:
            assert x not in found
        else:
            assert (found[x] - gradient).abs().max() <= TOLERANCE


def test_a_model_spread_over_three_workers(three_workers):
    """The model sends a tensor to two workers, and has a call that nests a -> b -> c -> a."""

    def check() -> float:
        local = [Layer(seed) for seed in range(3)]
        x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
        # Made last: another thread of this process makes the first one, and seeds the generator.
        layers = [rpc.remote(f"worker{owner}", Layer, (owner,)) for owner in range(3)]

        h = local[0](x)
        nested = (h * 2).sin()
        loss = (local[1](h) + local[2](h, local[1](h)) + (nested.exp() * nested * nested) * nested).square().sum()
        parameters = [p for layer in local for p in layer.parameters()]
        expected = torch.autograd.grad(loss, [x, *parameters])

        with autograd.context() as context_id:
            h = layers[0].rpc_sync().forward(x)
            to_b = layers[1].rpc_async().forward(h)
            to_c = layers[2].rpc_sync().forward(h, to_b.wait())
            nested = rpc.rpc_sync("worker1", nested_call, (h,))
            loss = (to_b.wait() + to_c + nested).square().sum()
            unused = layers[1].rpc_sync().forward(h)  # takes no part
            autograd.backward(context_id, [loss])
            found = [autograd.get_gradients(context_id)[x]]
            for layer in layers:
                found += layer.rpc_sync().gradients(context_id)
            assert unused.requires_grad
        worst = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
        assert worst <= TOLERANCE
        return worst

    print(f"largest difference {three_workers[0].run(check):.1e}")


def nested_call(h: torch.Tensor) -> torch.Tensor:
    nested = (h * 2).sin()
    return rpc.rpc_sync("worker2", nested_call_on_c, (nested,)) * nested


def nested_call_on_c(h: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker0", multiply, (h.exp(), h)) * h


def test_shapes_of_graphs(three_workers):
    def check() -> None:
        b, c, me = "worker1", "worker2", "worker0"
        call = rpc.rpc_sync
        cases = {
            "there and back": (
                lambda x, y: call(b, multiply, (x * 2, y)).sum(),
                lambda x, y: (x * 2 * y).sum(),
            ),
            "leaves sent directly": (
                lambda x, y: call(b, multiply, (x, y)).sum(),
                lambda x, y: (x * y).sum(),
            ),
            "twice to one, once to another": (
                lambda x, y: (call(b, multiply, (x, y)) * call(b, multiply, (x, x)) * call(c, add, (x, y))).sum(),
                lambda x, y: (x * y * x * x * (x + y)).sum(),
            ),
            "a -> b -> c -> a": (
                lambda x, y: (call(b, via_c_to_a, (x * y,)) * y).sum(),
                lambda x, y: (a_b_c_a((x * y * 2).sin()) * y).sum(),
            ),
            "to itself": (lambda x, y: call(me, multiply, (x, y)).sum(), lambda x, y: (x * y).sum()),
            "a result passed on": (
                lambda x, y: call(c, multiply, (call(b, multiply, (x, y)), y)).sum(),
                lambda x, y: (x * y * y).sum(),
            ),
            "the result is the loss": (
                lambda x, y: call(b, identity, ((x * y).sum(),)),
                lambda x, y: (x * y).sum(),
            ),
            "used here and there": (
                lambda x, y: (call(b, multiply, (x, y)) * x).sum() + y.sum(),
                lambda x, y: (x * y * x).sum() + y.sum(),
            ),
            "complex": (
                lambda x, y: call(b, identity, (torch.complex(x, y),)).abs().sum(),
                lambda x, y: torch.complex(x, y).abs().sum(),
            ),
            "one leaf unused": (lambda x, y: call(b, identity, ((x, y),))[0].sum(), lambda x, y: x.sum()),
            "in place": (
                lambda x, y: call(b, in_place, (x * 2, y * 1)).mul_(2).sum(),
                lambda x, y: in_place(x * 2, y * 1).mul(2).sum(),
            ),
            "in place, into what took no gradient": (
                lambda x, y: call(b, in_place_without_grad, (x, y.detach())).sum(),
                lambda x, y: 3 * x[1:].sum(),
            ),
            "local only": (lambda x, y: (x * y).sum(), lambda x, y: (x * y).sum()),
            "a leaf as root": (
                lambda x, y: call(b, identity, (x,)).sum() + 0 * y.sum(),
                lambda x, y: x.sum() + 0 * y.sum(),
            ),
        }
        for name, (distributed, local) in cases.items():
            print(name)
            check_against_one_process(distributed, local, [leaf(), leaf()])

    three_workers[0].run(check)


def test_a_long_chain_back_and_forth(three_workers):
    def check() -> None:
        def chain(hop):
            def run(x, y):
                for _ in range(20):
                    x = hop(x, y).sin()
                return x.sum()

            return run

        check_against_one_process(
            chain(lambda x, y: rpc.rpc_sync("worker1", multiply, (x, y))), chain(multiply), [leaf(), leaf()]
        )

    three_workers[0].run(check)


def test_every_node_runs_once(three_workers):
    def check() -> int:
        x = leaf()
        with autograd.context() as context_id:
            h = Runs.apply(x)
            loss = (rpc.rpc_sync("worker1", multiply, (h, h)) * rpc.rpc_sync("worker2", add, (h, x)) * h).sum()
            autograd.backward(context_id, [loss])
        return Runs.count

    assert three_workers[0].run(check) == 1


def test_messages_that_the_loss_does_not_depend_on_do_not_hang(three_workers):
    def check() -> None:
        x, y = leaf(), leaf()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", multiply, (x, y)).sum()
            unused = rpc.rpc_sync("worker2", via_a, (x * 2,))
            rpc.rpc_sync("worker1", process, (y * 2,))
            autograd.backward(context_id, [loss])
            assert torch.equal(autograd.get_gradients(context_id)[x], y)
            assert unused.requires_grad

    three_workers[0].run(check)


def process(x: torch.Tensor) -> int:
    """Takes a tensor and returns none."""
    return x.numel()


def test_containers_and_tensors_without_grad(three_workers):
    def check() -> None:
        x = leaf()
        with autograd.context() as context_id:
            doubled, more, indices = rpc.rpc_sync("worker1", split, (x,))
            assert doubled.requires_grad
            assert not more["constant"].requires_grad
            assert not indices.requires_grad
            autograd.backward(context_id, [(doubled * more["sin"] * more["constant"]).sum()])
            expected = 2 * x.sin() + 2 * x * x.cos()
            assert torch.allclose(autograd.get_gradients(context_id)[x], expected)

    three_workers[0].run(check)


def test_values_behind_references(three_workers):
    def check() -> None:
        x = leaf()
        with autograd.context() as context_id:
            rref = rpc.remote("worker1", multiply, (x, x))
            loss = rpc.rpc_sync("worker2", fetch_and_sum, (rref,)) + rref.to_here().sum()
            autograd.backward(context_id, [loss])
            assert torch.allclose(autograd.get_gradients(context_id)[x], 4 * x)

    three_workers[0].run(check)


def fetch_and_sum(rref: rpc.RRef) -> torch.Tensor:
    return rref.to_here().sum()


def test_parameters_and_modules_as_arguments(three_workers):
    def check() -> None:
        layer = nn.Linear(3, 2).double()
        x = leaf()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", nn.functional.linear, (x, layer.weight, layer.bias)).sum()
            autograd.backward(context_id, [loss])
            found = autograd.get_gradients(context_id)
        expected = torch.autograd.grad(layer(x).sum(), [x, layer.weight, layer.bias])
        for variable, gradient in zip((x, layer.weight, layer.bias), expected, strict=True):
            assert torch.allclose(found[variable], gradient)

    three_workers[0].run(check)


def test_sparse_gradients(three_workers):
    def check() -> None:
        table = rpc.remote("worker1", nn.Embedding, (10, 4), {"sparse": True})
        weight = table.to_here().weight.detach().clone()
        indices = torch.tensor([1, 3, 3])
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", embed, (table, indices)).square().sum()
            autograd.backward(context_id, [loss])
            gradient = rpc.rpc_sync("worker1", gradient_of, (table, context_id))
        assert gradient.is_sparse
        expected = torch.zeros(10, 4).index_add(0, indices, 2 * weight[indices])
        assert torch.allclose(gradient.to_dense(), expected)

    three_workers[0].run(check)


def test_a_function_that_keeps_a_variable_is_no_leaf(three_workers):
    def check() -> None:
        x = leaf()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", identity, (Keeps.apply(x),)).sum()
            autograd.backward(context_id, [loss])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full_like(x, 2))

    three_workers[0].run(check)


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.variable = x.detach()
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def scale(x: torch.Tensor) -> torch.Tensor:
    """Uses a parameter of this worker, so that the graph has a node that is needed here."""
    if not remote_functions.kept:
        remote_functions.keep(torch.ones(3, dtype=torch.float64, requires_grad=True))
    return (x * remote_functions.kept[0]).tanh()


def live_contexts() -> int:
    gc.collect()
    return sum(isinstance(each, Context) for each in gc.get_objects())


def wait_for_contexts() -> None:
    """Waits until this thread's context is the last one: other threads may be about to drop theirs."""
    wait_until(lambda: live_contexts() <= 1)


def test_an_ended_context_frees_its_graph(three_workers):
    def check() -> None:
        for _ in range(10):
            with autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", scale, (leaf(),)).sum()
                autograd.backward(context_id, [loss])
        del loss
        assert_clean()
        wait_for_contexts()
        rpc.rpc_sync("worker1", wait_for_contexts)

    three_workers[0].run(check)


def test_several_passes_in_one_context(three_workers):
    def check() -> None:
        x, y = leaf(), leaf()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", multiply, (x, y)).sum()
            autograd.backward(context_id, [loss], retain_graph=True)
            autograd.backward(context_id, [loss])
            other = rpc.rpc_sync("worker2", multiply, (x, x)).sum()
            autograd.backward(context_id, [other])
            assert torch.allclose(autograd.get_gradients(context_id)[x], 2 * y + 2 * x)
        with autograd.context() as context_id:
            roots = [rpc.rpc_sync(to, multiply, (x, y)).sum() for to in ("worker1", "worker2")]
            autograd.backward(context_id, roots)
            assert torch.allclose(autograd.get_gradients(context_id)[x], 2 * y)

    three_workers[0].run(check)


def test_no_grad_is_respected(three_workers):
    def check() -> None:
        x = leaf()
        with autograd.context() as context_id:
            with torch.no_grad():
                cut = rpc.rpc_sync("worker1", multiply, (x, x)).detach()
            loss = (rpc.rpc_sync("worker1", multiply, (x, cut))).sum()
            autograd.backward(context_id, [loss])
            assert torch.allclose(autograd.get_gradients(context_id)[x], cut)

    three_workers[0].run(check)


def test_contexts_on_many_threads(three_workers):
    def check() -> None:
        from concurrent.futures import ThreadPoolExecutor

        def one(_: int) -> None:
            x, y = leaf(), leaf()
            for _ in range(5):
                with autograd.context() as context_id:
                    loss = (rpc.rpc_sync("worker1", multiply, (x, y)) * rpc.rpc_sync("worker2", add, (x, y))).sum()
                    autograd.backward(context_id, [loss])
                    assert torch.allclose(autograd.get_gradients(context_id)[x], y * (x + y) + x * y)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(16)))

    three_workers[0].run(check)


def test_a_sparse_leaf_that_is_sent_after_a_message_was_received(workers):
    a, _ = workers.rpc(2)

    def gradients():
        dense = torch.ones(3, 3, requires_grad=True)
        sparse = torch.eye(3).to_sparse().requires_grad_()
        with autograd.context() as context_id:
            h = rpc.rpc_sync("worker1", identity, (dense,))
            product = rpc.rpc_sync("worker1", torch.sparse.mm, (sparse, h))
            autograd.backward(context_id, [product.sum()])
            found = autograd.get_gradients(context_id)
            return found[dense], found[sparse].to_dense()

    torch.testing.assert_close(a.run(gradients), (torch.ones(3, 3), torch.eye(3) * 3))


def test_the_nodes_of_leaves_are_made_before_a_message_gets_its_gate(workers):
    """If the gate made them, torch could deadlock with another thread that uses the leaf: see `follower_of`."""
    a, _ = workers.rpc(2)

    def references():
        at_the_gate = []

        def apply(function, *args):
            if function is graph.SendRpc:
                at_the_gate.extend(each._use_count() for each in args[2:])
            return graph.apply_with_grad(function, *args)

        leaves = [torch.ones(3, 3, requires_grad=True), torch.eye(3).to_sparse().requires_grad_()]
        before = [each._use_count() for each in leaves]  # type: ignore[attr-defined]
        with patch("gradwire.autograd.contexts.apply_with_grad", apply), autograd.context():
            rpc.rpc_sync("worker1", identity, (leaves,))
        return before, at_the_gate

    before, at_the_gate = a.run(references)
    assert at_the_gate == [before[0] + 2, before[1] + 1]  # a node refers to its leaf, and so does a view


def test_a_leaf_may_be_sent_while_another_thread_uses_it(workers):
    """torch deadlocked within 50 rounds when the gate made the node of the leaf, or kept it by Python alone."""
    a, _ = workers.rpc(2)

    def use_and_send() -> int:
        leaves = [torch.ones(3, 4, requires_grad=True) for _ in range(2000)]
        together = threading.Barrier(2)

        def use() -> None:
            for leaf in leaves:
                together.wait(60)
                leaf.cumsum(1)

        with autograd.context():
            context = Context.current()
            other = threading.Thread(target=use, daemon=True)
            other.start()
            for leaf in leaves:
                together.wait(60)
                context.add_send([leaf], 1)
            other.join()
            return len(context.exchanged()[0])

    assert a.start(use_and_send).result(60) == 2000
