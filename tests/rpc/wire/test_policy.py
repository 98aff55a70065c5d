"""What works under a policy: everything that the API offers, with what is exposed."""

import asyncio

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import PolicyError, RemoteError, RemoteUnpicklableError
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer, clip_grad_norm_

from tests.rpc.wire import policy_functions as functions
from tests.rpc.wire.policy_functions import Counter, Point, echo

LISTED = ("torch.add", "torch.optim.sgd.SGD", "tests.rpc.wire.policy_functions.l*")


@pytest.fixture(params=["exposed", "plain"])
def restricted(workers, request):
    """Two workers, each of which accepts this from the other."""
    policy = rpc.Policy(accepts=request.param, exposed=LISTED)
    pair = workers.rpc(2, policy=policy)
    workers.each(pair, functions.load)
    yield pair
    assert workers.each(pair, lambda: dict(rpc.debug_info()["refused_messages"])) == [{}, {}]
    workers.each(pair, rpc.shutdown)


@pytest.fixture
def exposed(workers):
    """Two workers that accept what is exposed."""
    pair = workers.rpc(2, policy=rpc.Policy(accepts="exposed", exposed=LISTED))
    workers.each(pair, functions.load)
    return pair


def test_calls(restricted):
    def check() -> None:
        assert rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
        assert rpc.rpc_sync("worker1", functions.listed, ({"a": (1, {2.5}, None)},)) == {"a": (1, {2.5}, None)}
        assert rpc.rpc_async("worker1", echo, (1,), {"x": b"2"}).wait() == ((1,), {"x": b"2"})
        assert rpc.rpc_sync("worker1", functions.Decorated.exposed_static, (3,)) == 3
        assert rpc.rpc_sync("worker1", functions.call, (functions.listed, 4)) == 4
        assert rpc.rpc_sync("worker1", functions.echo_later, (5,)) == 5
        assert rpc.rpc_sync("worker1", functions.doubled, (torch.ones(1),)) == 2
        assert rpc.rpc_sync("worker0", functions.unlisted, (Point(1, 2),)) == Point(1, 2)  # a call to itself
        large = torch.randn(500, 500)
        assert torch.equal(rpc.rpc_sync("worker1", echo, (large,)), large)
        echoed = [future.wait() for future in rpc.broadcast_call(["worker0", "worker1"], echo, (large,))]
        assert all(torch.equal(each, large) for each in echoed)
        assert rpc.rpc_sync("worker1", echo, (rpc.get_worker_info("worker1"),)).name == "worker1"

        async def call() -> int:
            return await rpc.aio.call("worker1", echo, (6,))

        assert asyncio.run(call()) == 6

    restricted[0].run(check)


def test_errors(restricted):
    def check() -> None:
        with pytest.raises(ValueError, match="three") as caught:
            rpc.rpc_sync("worker1", functions.raise_error, ("three",))
        assert isinstance(caught.value.__cause__, RemoteError)
        with pytest.raises(TypeError):
            rpc.rpc_sync("worker1", functions.raise_error)
        with pytest.raises(ValueError, match="four"):
            rpc.remote("worker1", functions.raise_error, ("four",)).to_here()

    restricted[0].run(check)


def test_references(restricted):
    def check() -> None:
        rref = rpc.remote("worker1", echo, ([1, torch.ones(2)],))
        assert rref.to_here()[0] == 1
        assert rpc.rpc_sync("worker1", functions.value_of, (rref,))[0] == 1
        assert rpc.rpc_sync("worker1", functions.value_of, (rpc.RRef("mine"),)) == "mine"
        assert rpc.rpc_sync("worker1", echo, (rref,)).to_here()[0] == 1
        counter = rpc.remote("worker1", Counter, (1,))
        assert counter.rpc_sync().add(2) == 3
        assert counter.rpc_async().add(2).wait() == 5
        assert counter.remote().add(2).to_here() == 7
        assert counter.rpc_sync().later("later") == "later"
        assert rpc.remote("worker1", Counter.starting_at, (4,)).rpc_sync().count() == 4
        decorated = rpc.remote("worker1", functions.call, (functions.Decorated.exposed_static, 8))
        assert decorated.to_here() == 8
        decorated._get_future().wait()

    restricted[0].run(check)


def test_streams_and_collectives(restricted, workers):
    def check() -> None:
        assert list(rpc.rpc_stream("worker1", functions.count_up, (2000,), window_items=16)) == list(range(2000))
        with rpc.rpc_stream("worker1", functions.count_up, (10_000,)) as items:
            assert next(items) == 0

    restricted[0].run(check)

    def gather() -> None:
        for number in range(12):
            value = (rpc.get_worker_info().id, number, torch.ones(2))
            assert {worker: each[:2] for worker, each in rpc.all_gather(value).items()} == {
                "worker0": (0, number),
                "worker1": (1, number),
            }
        rpc.barrier()

    workers.each(restricted, gather)


def train() -> list[float]:
    weight = rpc.remote("worker1", functions.make_weight)
    optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5, momentum=0.9)
    losses = []
    for _ in range(3):
        with autograd.context() as context_id:
            product = rpc.rpc_sync("worker1", functions.multiply_by, (weight, torch.ones(2)))
            loss = product.sum()
            autograd.backward(context_id, [loss])
            clip_grad_norm_(context_id, [weight], 1.0)
            optimizer.step(context_id)
            losses.append(loss.item())
    optimizer.load_state_dict(optimizer.state_dict())
    with autograd.context() as context_id:
        total = rpc.remote("worker1", functions.multiply_by, (weight, torch.ones(1), True))
        total.backward(context_id)
    return losses


def test_training(restricted):
    losses = restricted[0].run(train)
    assert losses[0] > losses[1] > losses[2]


def test_anomaly_mode_and_failing_passes(restricted):
    def check() -> None:
        x = torch.ones(2, requires_grad=True)
        with torch.autograd.detect_anomaly(check_nan=False), autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", functions.twice, (x,)).sum()])
            assert autograd.get_gradients(context_id)[x].tolist() == [2, 2]
        with autograd.context() as context_id, pytest.raises(RuntimeError, match="no gradient here"):
            autograd.backward(context_id, [rpc.rpc_sync("worker1", functions.failing_backward, (x,)).sum()])

    restricted[0].run(check)


def test_remote_modules(restricted):
    def check() -> None:
        layer = RemoteModule("worker1/cpu", functions.Layer, (2, 3))
        assert layer(torch.ones(4, 2)).shape == (4, 3)
        assert len(layer.remote_parameters()) == 2
        assert layer.eval().training is False
        assert rpc.rpc_sync("worker1", functions.run_module, (layer, torch.ones(1, 2))).shape == (1, 3)

    restricted[0].run(check)


def test_profiles(restricted):
    def check() -> None:
        with torch.autograd.profiler.profile() as profile:
            rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))
        assert any("#remote_op: aten::add" in event.name for event in profile.function_events)

    restricted[0].run(check)


def test_instances_of_exposed_classes(exposed):
    def check() -> None:
        assert rpc.rpc_sync("worker1", functions.make_point) == Point(1, 2)
        assert rpc.rpc_sync("worker1", echo, ([Point(3, 4)],)) == [Point(3, 4)]
        with pytest.raises(functions.CodedError) as caught:
            rpc.rpc_sync("worker1", functions.raise_coded)
        assert caught.value.code == 7
        with pytest.raises(RemoteUnpicklableError, match="as text only"):
            rpc.rpc_sync("worker1", functions.raise_unexposed)
        assert rpc.remote("worker1", Counter, (3,)).to_here().count == 3

    exposed[0].run(check)


def test_what_a_reference_does_not_give_away(restricted):
    """A method by itself, without its class."""

    def check() -> None:
        rref = rpc.remote("worker1", functions.make_decorated)
        assert rref.rpc_sync().exposed_method() == "exposed"
        assert rref.remote().exposed_method().to_here() == "exposed"

    restricted[0].run(check)


def test_each_caller_has_its_policy(workers):
    policy = rpc.Policy(accepts="plain", callers={"worker1": rpc.Policy()})
    started = workers.rpc(3, policy=policy)
    workers.each(started, functions.load)
    assert started[1].run(rpc.rpc_sync, "worker0", functions.unlisted, ([1],)) == [1]
    with pytest.raises(PolicyError, match="'worker0' refuses a message of worker 'worker2'"):
        started[2].run(rpc.rpc_sync, "worker0", functions.unlisted, ([1],))
    with pytest.raises(PolicyError, match="'worker0' refuses a message of worker 'worker2'"):
        started[0].run(rpc.rpc_sync, "worker2", functions.make_point)
    assert started[0].run(lambda: rpc.debug_info()["refused_messages"]) == {"worker2": 2}


def test_workers_that_join_later(workers, tmp_path):
    def join(name: str) -> None:
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/meet", policy=rpc.Policy(accepts="plain"))
        rpc.init_rpc(name, rpc_backend_options=options)
        functions.load()

    a, b = workers(2)
    a.run(join, "a")
    b.run(join, "b")
    assert b.run(rpc.rpc_sync, "a", echo, ("hello",)) == "hello"
    workers.each([a, b], rpc.shutdown)
