"""Parameters that are sent inside autograd contexts: in modules, and by themselves."""

import pytest
import torch
from gradwire import autograd, rpc
from torch import Tensor, nn

from tests import remote_functions
from tests.nn.mixed_module import Mixed
from tests.remote_functions import identity


class Tied(Mixed):
    """Has an embedding with sparse gradients as well."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.rows.weight.sum()


def assert_whole(model: Tied) -> None:
    assert all(type(parameter) is nn.Parameter and parameter.is_leaf for parameter in model.parameters())
    assert model.second.weight is model.first.weight
    assert not model.frozen.requires_grad
    assert not model.offset.requires_grad
    torch.optim.SGD(model.parameters(), lr=0.1)


def check_here(value: object) -> None:
    for model in value if isinstance(value, list) else [value]:
        assert_whole(model["model"] if isinstance(model, dict) else model)


def make_and_keep() -> Tied:
    model = Tied()
    remote_functions.kept.append(model)
    return model


def loss_of(model: Tied) -> Tensor:
    return model(torch.ones(1, 2)).sum()


def names_with_gradients(context_id: int, model: Tied | None = None) -> set[str]:
    model = model or remote_functions.kept[-1]
    gradients = autograd.get_gradients(context_id)
    named = {**dict(model.named_parameters()), "scale": model.scale}
    return {name for name, parameter in named.items() if parameter in gradients}


def is_same(first: Tensor, model: Tied, second: Tensor) -> bool:
    return first is model.first.weight is second and first.is_leaf


def marked() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.mark = torch.full((1,), 3.0)
    parameter.itself = parameter
    return parameter


def mark_of(parameter: nn.Parameter) -> float:
    assert parameter.itself is parameter
    return parameter.mark.item()


def doubled(parameter: Tensor) -> Tensor:
    return (parameter * 2).sum()


def same_parameters(model: Tied, optimizer: torch.optim.Optimizer) -> bool:
    return [id(p) for p in model.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]


def are_leaves(value: nn.Module | torch.optim.Optimizer) -> bool:
    parameters = value.parameters() if isinstance(value, nn.Module) else value.param_groups[0]["params"]
    return all(type(parameter) is nn.Parameter and parameter.is_leaf for parameter in parameters)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_a_module_arrives_with_its_parameters(two_workers, inside):
    def check() -> None:
        for to in ("worker0", "worker1"):
            rpc.rpc_sync(to, check_here, (Tied(),))
            rpc.rpc_sync(to, check_here, kwargs={"value": [Tied(), {"model": Tied()}]})
            assert_whole(rpc.rpc_sync(to, make_and_keep))
            assert_whole(rpc.remote(to, make_and_keep).to_here())
            assert_whole(rpc.rpc_sync(to, identity, ([{"model": Tied()}],))[0]["model"])
        assert_whole(rpc.broadcast_call(["worker0", "worker1"], make_and_keep)[1].wait())

    def check_inside() -> None:
        with autograd.context():
            check()

    two_workers[0].run(check_inside if inside else check)


def test_gradients_stay_with_the_copy_of_a_module_but_flow_through_its_other_tensors(two_workers):
    def check() -> None:
        trained = {"first.weight", "rows.weight"}
        with autograd.context() as context_id:
            model = rpc.rpc_sync("worker1", make_and_keep)
            autograd.backward(context_id, [loss_of(model)])
            assert names_with_gradients(context_id, model) == trained
            assert rpc.rpc_sync("worker1", names_with_gradients, (context_id,)) == {"scale"}
        with autograd.context() as context_id:
            model = Tied()
            autograd.backward(context_id, [rpc.rpc_sync("worker1", loss_of, (model,))])
            assert names_with_gradients(context_id, model) == {"scale"}

    two_workers[0].run(check)


def test_training_a_fetched_model_equals_training_it_here(two_workers):
    def check() -> None:
        losses = []
        for fetch in (Tied, rpc.remote("worker1", Tied).to_here):
            with autograd.context() as context_id:
                model = fetch()
                optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
                for step in range(3):
                    loss = loss_of(model)
                    autograd.backward(context_id, [loss])
                    for parameter, gradient in autograd.get_gradients(context_id).items():
                        if parameter.is_leaf and isinstance(parameter, nn.Parameter):
                            parameter.grad = gradient.clone()
                    optimizer.step()
                    losses.append((step, loss.item()))
        assert losses[:3] == losses[3:]
        assert losses[0] != losses[2]

    two_workers[0].run(check)


def test_a_parameter_beside_its_module_is_that_of_the_module(two_workers):
    def check() -> None:
        with autograd.context():
            model = Tied()
            assert rpc.rpc_sync("worker1", is_same, (model.first.weight, model, model.second.weight))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            assert rpc.rpc_sync("worker1", same_parameters, (model, optimizer))
            assert rpc.rpc_sync("worker1", are_leaves, (optimizer,))

    two_workers[0].run(check)


def test_modules_of_torch_arrive_whole(two_workers):
    def check() -> None:
        with autograd.context():
            for model in (
                nn.LSTM(2, 2),
                nn.ParameterList([torch.ones(1)]),
                nn.ParameterDict({"a": torch.ones(1)}),
                nn.MultiheadAttention(2, 1),
                nn.LazyLinear(2),
                torch.fx.symbolic_trace(nn.Linear(2, 2)),
            ):
                if not isinstance(model, nn.LazyLinear):
                    assert rpc.rpc_sync("worker1", are_leaves, (model,))
                back = rpc.rpc_sync("worker1", identity, (model,))
                assert [type(p) for p in back.parameters()] == [type(p) for p in model.parameters()]
            assert rpc.rpc_sync("worker1", identity, (nn.LSTM(2, 2),))(torch.ones(1, 2))[0].shape == (1, 2)

    two_workers[0].run(check)


def test_gradients_flow_through_a_parameter_by_itself(two_workers):
    def check() -> None:
        with autograd.context() as context_id:
            parameter = nn.Parameter(torch.ones(2))
            autograd.backward(context_id, [rpc.rpc_sync("worker1", doubled, (parameter,))])
            assert autograd.get_gradients(context_id)[parameter].tolist() == [2, 2]
            (back,) = rpc.rpc_sync("worker1", identity, ([parameter],))
            assert not back.is_leaf
        assert rpc.rpc_sync("worker1", are_leaves, (nn.ParameterList([parameter]),))
        assert type(rpc.rpc_sync("worker1", identity, (parameter,))) is nn.Parameter

    two_workers[0].run(check)


def test_attributes_of_parameters_travel(two_workers):
    def check() -> None:
        module = nn.Module()
        module.weight = marked()
        assert mark_of(rpc.rpc_sync("worker1", marked)) == 3
        assert rpc.rpc_sync("worker1", mark_of, (marked(),)) == 3
        with autograd.context():
            assert mark_of(rpc.rpc_sync("worker1", marked)) == 3
            assert mark_of(rpc.rpc_sync("worker1", identity, (module,)).weight) == 3

    two_workers[0].run(check)
