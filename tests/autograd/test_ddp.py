"""DistributedDataParallel in a context: two trainers with replicas and a server compute what one process does."""

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gradwire import autograd, rpc
from gradwire.errors import AutogradError
from gradwire.optim import DistributedOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SERVER = "worker2"
ROWS, WIDTH = 6, 4
INPUTS = torch.tensor([[0, 1, 1], [2, 4, 5]])  # one row for each trainer
PLAIN = {}
AS_VIEW = {"gradient_as_bucket_view": True}


def make_embedding() -> nn.Module:
    rows = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.double).view(ROWS, WIDTH)
    return nn.Embedding(ROWS, WIDTH, sparse=True, _weight=rows)  # both trainers may make one on the server at once


def make_dense(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


class Server:
    """The part of the model that is not replicated."""

    def __init__(self) -> None:
        self.embedding = make_embedding()

    def embed(self, indices: torch.Tensor) -> torch.Tensor:
        return self.embedding(indices)

    def square(self, x: torch.Tensor) -> torch.Tensor:
        return x * x

    def weight(self) -> rpc.RRef:
        return rpc.RRef(self.embedding.weight)

    def gradient(self, context_id: int) -> torch.Tensor:
        return autograd.get_gradients(context_id)[self.embedding.weight]


servers: list[rpc.RRef] = []


def shared_server(rank: int) -> rpc.RRef:
    """Returns a reference to the same server on both trainers."""
    if rank == 0:
        servers.append(rpc.remote(SERVER, Server))
    dist.barrier()
    return rpc.rpc_sync("worker0", first_server)


def first_server() -> rpc.RRef:
    return servers[0]


class Branches(nn.Module):
    """Rank r uses layer r only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make_dense(5), make_dense(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[dist.get_rank()](x)


@pytest.fixture
def trainers(workers, tmp_path):
    """Two workers of a process group; a third, the server, is in the RPC group only."""
    first, second, _ = workers.rpc(3)

    def join(rank):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=rank, world_size=2)

    for pending in [first.start(join, 0), second.start(join, 1)]:
        pending.result()
    yield first, second
    for pending in [worker.start(dist.destroy_process_group) for worker in (first, second)]:
        pending.result()


def on_both(trainers, function):
    """Calls a function with its rank on each trainer at once; returns the results."""
    pending = [worker.start(function, rank) for rank, worker in enumerate(trainers)]
    return [p.result() for p in pending]


def in_one_process(inputs=INPUTS):
    """Returns the modules of the model, and a function of its loss: the mean of the trainers' losses."""
    embedding, before, after = make_embedding(), make_dense(2), make_dense(3)
    return (embedding, before, after), lambda: after(before(embedding(inputs)) ** 2).sum() / len(inputs)


def gradients_of(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("options", [PLAIN, AS_VIEW])
def test_gradients_are_averaged_and_no_grad_is_touched(trainers, options):
    def gradients(rank):
        server = rpc.remote(SERVER, Server)
        before, after = (DistributedDataParallel(make_dense(seed), **options) for seed in (2, 3))
        with autograd.context() as context_id:
            h = before(server.rpc_sync().embed(INPUTS[rank]))
            autograd.backward(context_id, [after(server.rpc_sync().square(h)).sum()])
            found = autograd.get_gradients(context_id)
            parameters = [*before.parameters(), *after.parameters()]
            assert set(found) == set(parameters)
            assert all(parameter.grad is None for parameter in parameters)
            return server.rpc_sync().gradient(context_id).to_dense(), [found[p] for p in parameters]

    (embedding, before, after), loss = in_one_process()
    loss().backward()
    (rows_0, dense_0), (rows_1, dense_1) = on_both(trainers, gradients)
    torch.testing.assert_close(dense_0, gradients_of(before) + gradients_of(after))
    torch.testing.assert_close(dense_1, dense_0)
    torch.testing.assert_close((rows_0 + rows_1) / 2, embedding.weight.grad.to_dense())


def test_training_ends_with_the_weights_of_one_process(trainers):
    steps, rate = 5, 0.1

    def train(rank):
        server = shared_server(rank)
        before, after = (DistributedDataParallel(make_dense(seed)) for seed in (2, 3))
        dense = [rpc.RRef(parameter) for parameter in [*before.parameters(), *after.parameters()]]
        optimizers = [
            DistributedOptimizer(torch.optim.SGD, dense, lr=rate),
            DistributedOptimizer(torch.optim.SGD, [server.rpc_sync().weight()], lr=rate / 2),  # both trainers step
        ]
        for _ in range(steps):
            with autograd.context() as context_id:
                h = before(server.rpc_sync().embed(INPUTS[rank]))
                autograd.backward(context_id, [after(server.rpc_sync().square(h)).sum()])
                dist.barrier()
                for optimizer in optimizers:
                    optimizer.step(context_id)
                dist.barrier()
        return server.rpc_sync().weight().to_here().detach(), [rref.to_here().detach() for rref in dense]

    modules, loss = in_one_process()
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    for rows, dense in on_both(trainers, train):
        torch.testing.assert_close(rows, modules[0].weight.detach())
        torch.testing.assert_close(dense, [p.detach() for module in modules[1:] for p in module.parameters()])


def test_passes_without_averaging_add_up_until_one_with_it(trainers):
    def gradients(rank):
        server = rpc.remote(SERVER, Server)
        module = DistributedDataParallel(make_dense(2))
        with autograd.context() as context_id:
            for step, part in enumerate(INPUTS[rank].split(1)):
                with module.no_sync() if step < 2 else nullcontext():
                    loss = module(server.rpc_sync().embed(part)).square().sum()
                    autograd.backward(context_id, [loss])
            found = autograd.get_gradients(context_id)
            return [found[p] for p in module.parameters()]

    embedding, module = make_embedding(), make_dense(2)
    (module(embedding(INPUTS)).square().sum() / 2).backward()
    for found in on_both(trainers, gradients):
        torch.testing.assert_close(found, gradients_of(module))


def test_parameters_that_only_another_replica_uses(trainers):
    def gradients(rank):
        server = rpc.remote(SERVER, Server)
        module = DistributedDataParallel(Branches(), find_unused_parameters=True)
        with autograd.context() as context_id:
            loss = module(server.rpc_sync().embed(INPUTS[rank])).square().sum()
            autograd.backward(context_id, [loss])
            found = autograd.get_gradients(context_id)
            return [found[p] for p in module.parameters()]

    embedding, layers = make_embedding(), (make_dense(5), make_dense(6))
    for layer, row in zip(layers, INPUTS, strict=True):
        (layer(embedding(row)).square().sum() / 2).backward()
    for found in on_both(trainers, gradients):
        torch.testing.assert_close(found, gradients_of(layers[0]) + gradients_of(layers[1]))


@pytest.mark.parametrize("options", [PLAIN, AS_VIEW])
def test_hooks_run_once_and_grad_keeps_what_it_had(trainers, options):
    def look(rank):
        module = DistributedDataParallel(make_dense(2), **options)
        x = torch.ones(WIDTH).double() * (rank + 1)
        module(x).sum().backward()
        before = [p.grad.clone() for p in module.parameters()]
        bias = list(module.parameters())[-1]
        ran = []
        bias.register_hook(lambda gradient: ran.append("tensor") or gradient * 2)
        bias.register_post_accumulate_grad_hook(lambda _: ran.append("accumulated"))
        with autograd.context() as context_id:
            autograd.backward(context_id, [module(x).sum() * 3])
            found = autograd.get_gradients(context_id)
            assert ran == ["tensor", "accumulated"]
            torch.testing.assert_close(found[bias], torch.full((WIDTH,), 6.0).double())
        torch.testing.assert_close(gradients_of(module), before)
        module.zero_grad()
        module(x).sum().backward()  # hooks that were disabled are enabled again
        assert ran == ["tensor", "accumulated"] * 2

    on_both(trainers, look)


def test_a_static_graph_is_refused(trainers):
    def refuse(rank):
        module = DistributedDataParallel(make_dense(2), static_graph=True)
        with autograd.context() as context_id, pytest.raises(AutogradError, match="leave static_graph out"):
            autograd.backward(context_id, [module(torch.ones(WIDTH).double()).sum()])

    on_both(trainers, refuse)


def test_a_module_that_is_wrapped_again(trainers):
    def gradient(rank):
        inner = make_dense(2)
        before, module = DistributedDataParallel(inner), DistributedDataParallel(inner)
        with autograd.context() as context_id:
            autograd.backward(context_id, [module(torch.ones(WIDTH).double()).sum() * (rank + 1)])
            bias = list(before.parameters())[-1]
            return autograd.get_gradients(context_id)[bias]

    for found in on_both(trainers, gradient):
        torch.testing.assert_close(found, torch.full((WIDTH,), 1.5).double())


def test_gradients_of_a_context_stay_when_ddp_averages_again(trainers):
    def gradients(rank):
        inner = make_dense(2)
        modules = [DistributedDataParallel(inner), DistributedDataParallel(inner, **AS_VIEW)]
        with autograd.context() as first, autograd.context() as second:
            for context_id, factor in (
                (first, 0),
                (first, 1),
                (second, 10),
            ):  # DDP moves buckets after one
                loss = modules[-1](torch.ones(WIDTH).double()).sum() * (rank + 1) * factor
                autograd.backward(context_id, [loss])
            bias = list(inner.parameters())[-1]
            return [autograd.get_gradients(context_id)[bias] for context_id in (first, second)]

    for found in on_both(trainers, gradients):
        torch.testing.assert_close(found, [torch.full((WIDTH,), each).double() for each in (1.5, 15.0)])


def test_a_module_that_is_made_again(trainers):
    def gradient(rank):
        inner = make_dense(2)
        for _ in range(2):
            module = DistributedDataParallel(inner)
            with autograd.context() as context_id:
                autograd.backward(context_id, [module(torch.ones(WIDTH).double()).sum() * (rank + 1)])
                found = autograd.get_gradients(context_id)[list(inner.parameters())[-1]]
            torch.testing.assert_close(found, torch.full((WIDTH,), 1.5).double())
            del module
            gc.collect()
        with autograd.context() as context_id:  # not wrapped any more
            autograd.backward(context_id, [inner(torch.ones(WIDTH).double()).sum() * (rank + 1)])
            return autograd.get_gradients(context_id)[list(inner.parameters())[-1]]

    for rank, found in enumerate(on_both(trainers, gradient)):
        torch.testing.assert_close(found, torch.full((WIDTH,), rank + 1.0).double())


def test_a_module_that_could_not_be_wrapped(trainers):
    def gradient(rank):
        inner = make_dense(2)
        with pytest.raises(ValueError, match="NaN") as failed:
            DistributedDataParallel(inner, bucket_cap_mb=float("nan"))
        with autograd.context() as context_id:
            autograd.backward(context_id, [inner(torch.ones(WIDTH).double()).sum() * (rank + 1)])
            assert failed.tb  # refers to the incomplete module
            return autograd.get_gradients(context_id)[list(inner.parameters())[-1]]

    for rank, found in enumerate(on_both(trainers, gradient)):
        torch.testing.assert_close(found, torch.full((WIDTH,), rank + 1.0).double())


def test_two_contexts_with_the_same_parameter(trainers):
    """While a module averages, a pass on another thread waits until `.grad` is what it was."""

    def gradients(rank):
        inner = make_dense(2)
        module = DistributedDataParallel(inner)
        weight, bias = list(inner.parameters())[-2:]
        started = threading.Event()

        def other():
            with autograd.context() as context_id:
                loss = (bias * 7).sum()
                started.set()
                autograd.backward(context_id, [loss])
                return autograd.get_gradients(context_id)

        def while_averaging(_):
            passes.append(thread.submit(other))
            started.wait()

        passes = []
        hook = weight.register_post_accumulate_grad_hook(while_averaging)
        with ThreadPoolExecutor(1) as thread, autograd.context() as context_id:
            autograd.backward(context_id, [module(torch.ones(WIDTH).double()).sum() * (rank + 1)])
            hook.remove()
            torch.testing.assert_close(
                autograd.get_gradients(context_id)[bias], torch.full((WIDTH,), 1.5).double()
            )
            found = passes[0].result()
        assert set(found) == {bias}
        assert all(parameter.grad is None for parameter in inner.parameters())
        return found[bias]

    for found in on_both(trainers, gradients):
        torch.testing.assert_close(found, torch.full((WIDTH,), 7.0).double())


def test_other_replicas_wait_for_one_whose_pass_fails_until_the_groups_timeout(trainers):
    def fail(gradient):
        raise LookupError("no gradient today")

    def run(rank):
        group = dist.new_group([0, 1])
        module = DistributedDataParallel(make_dense(2), process_group=group)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)  # which making the module may exceed
        with autograd.context() as context_id:
            y = module(torch.ones(WIDTH).double())
            if rank == 0:
                with pytest.raises(RuntimeError, match="Timed out") as failed:
                    autograd.backward(context_id, [y.sum()])
                assert "averaged the gradients of Sequential" in failed.value.__notes__[0]
            else:
                y.register_hook(fail)
                with pytest.raises(LookupError, match="no gradient today"):
                    autograd.backward(context_id, [y.sum()])
            assert autograd.get_gradients(context_id) == {}
            assert all(parameter.grad is None for parameter in module.parameters())
        dist.barrier()

    on_both(trainers, run)


def test_averaging_begins_when_the_trainers_part_of_the_pass_is_done(trainers):
    def look(rank):
        server = rpc.remote(SERVER, Server)
        module = DistributedDataParallel(make_dense(2))
        order = []

        def average(state, bucket):
            order.append("averaged")
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0] / 2)

        module.register_comm_hook(None, average)
        with autograd.context() as context_id:
            x = torch.ones(WIDTH, requires_grad=True, dtype=torch.double)
            h = server.rpc_sync().square(x)
            x.register_hook(lambda _: order.append("the graph's other end"))
            autograd.backward(context_id, [module(h).sum()])
        assert order == ["the graph's other end", "averaged"]

    on_both(trainers, look)


BEFORE_THE_IMPORT = """
import torch.distributed as dist
from torch import nn, ones
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
early = DistributedDataParallel(nn.Linear(2, 2))
from gradwire import autograd, rpc

rpc.init_rpc("alone", rank=0, world_size=1, store=dist.HashStore())
for module in (DistributedDataParallel(nn.Linear(2, 2)), early):
    with autograd.context() as context_id:
        autograd.backward(context_id, [module(ones(2)).sum()])
        print(len(autograd.get_gradients(context_id)))
"""


def test_a_module_that_was_wrapped_before_gradwire_was_imported_is_refused():
    command = [sys.executable, "-c", BEFORE_THE_IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2"]
    assert "AutogradError: a DistributedDataParallel module was made before gradwire was imported" in done.stderr
