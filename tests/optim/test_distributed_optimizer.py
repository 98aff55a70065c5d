"""Optimizers over parameters on several workers."""

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import UnknownContextError
from gradwire.optim import DistributedOptimizer
from torch import nn

from tests.remote_functions import assert_clean


class Model(nn.Module):
    def __init__(self, seed: int, *, move: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 4)
        self.move = move

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def weights(self) -> list[torch.Tensor]:
        assert all(parameter.grad is None for parameter in self.parameters())
        return [parameter.detach() for parameter in self.parameters()]

    def relocate(self) -> None:
        """What `module.to(...)` does to parameters."""
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()


def train(names: list[str], steps: int) -> float:
    """A trainer of its own; the last loss."""
    models = [rpc.remote(name, Model, (seed,)) for seed, name in enumerate(names)]
    return run_steps(models, steps)


def run_steps(models: list[rpc.RRef], steps: int) -> float:
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [p for m in models for p in m.rpc_sync().parameter_rrefs()], lr=0.05, momentum=0.5
    )
    x = torch.ones(2, 4)
    for _ in range(steps):
        with autograd.context() as context_id:
            out = x
            for model in models:
                out = model.rpc_sync().forward(out)
            loss = (out - 0.5).square().sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    return loss.item()


@pytest.fixture
def trio(workers):
    """Three workers; the test runs on the first. Afterwards nothing is left."""
    started = workers.rpc(3)
    yield started[0]
    workers.each(started, assert_clean)


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.01}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Rprop, {"lr": 0.01}),
        (torch.optim.NAdam, {"lr": 0.01}),
    ],
)
def test_steps_equal_those_of_one_process(trio, optimizer_class, options):
    def check() -> None:
        local = [Model(0), Model(1)]
        models = [rpc.remote("worker1", Model, (0,)), rpc.remote("worker2", Model, (1,))]
        parameters = [p for model in local for p in model.parameters()]
        reference = optimizer_class(parameters, **options)
        optimizer = DistributedOptimizer(
            optimizer_class, [p for m in models for p in m.rpc_sync().parameter_rrefs()], **options
        )
        for step in range(4):
            x = torch.full((2, 4), 0.3 + step)
            reference.zero_grad()
            local[1](local[0](x)).square().sum().backward()
            reference.step()
            with autograd.context() as context_id:
                loss = models[1].rpc_sync().forward(models[0].rpc_sync().forward(x)).square().sum()
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            if step == 1:
                models[0].rpc_sync().relocate()
        weights = [w for model in models for w in model.rpc_sync().weights()]
        for found, expected in zip(weights, parameters, strict=True):
            assert torch.allclose(found, expected, atol=1e-6)

    trio.run(check)


def test_several_trainers_share_parameters(trio):
    def check() -> None:
        models = [rpc.remote("worker1", Model, (0,)), rpc.remote("worker2", Model, (1,))]
        trainers = [rpc.rpc_async(f"worker{i % 3}", run_steps, (models, 25)) for i in range(4)]
        losses = [trainer.wait() for trainer in trainers]
        print(losses)
        assert all(loss < 0.1 for loss in losses)

    trio.run(check)


def test_parameters_without_a_gradient_stay(trio):
    def check() -> None:
        used, unused = rpc.remote("worker1", Model, (0,)), rpc.remote("worker2", Model, (1,))
        optimizer = DistributedOptimizer(
            torch.optim.SGD,
            used.rpc_sync().parameter_rrefs() + unused.rpc_sync().parameter_rrefs(),
            lr=1.0,
            weight_decay=1.0,
        )
        before = unused.rpc_sync().weights()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker2", forward, (used, unused, torch.ones(1, 4)))
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        for a, b in zip(before, unused.rpc_sync().weights(), strict=True):
            assert torch.equal(a, b)

    trio.run(check)


def forward(used: rpc.RRef, unused: rpc.RRef, x: torch.Tensor) -> torch.Tensor:
    return used.rpc_sync().forward(x).sum()


def not_a_parameter() -> rpc.RRef:
    return rpc.RRef(torch.ones(3))


def test_bad_arguments(trio):
    def check() -> None:
        parameter = rpc.RRef(torch.ones(3, requires_grad=True))
        with pytest.raises(TypeError, match="optimizer_class"):
            DistributedOptimizer(nn.Linear, [parameter], lr=1)
        with pytest.raises(TypeError, match=r"params_rref\[1\] is of type Tensor"):
            DistributedOptimizer(torch.optim.SGD, [parameter, torch.ones(3)], lr=1)
        with pytest.raises(ValueError, match="params_rref is empty"):
            DistributedOptimizer(torch.optim.SGD, [], lr=1)
        with pytest.raises(ValueError, match="leaf tensor that requires grad"):
            DistributedOptimizer(torch.optim.SGD, [rpc.rpc_sync("worker1", not_a_parameter)], lr=1)
        with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
            DistributedOptimizer(torch.optim.SGD, [parameter], rate=1)
        with pytest.raises(ValueError, match="learning rate"):
            DistributedOptimizer(torch.optim.SGD, [rpc.remote("worker1", leaf)], lr=-1)
        with pytest.raises(UnknownContextError):
            DistributedOptimizer(torch.optim.SGD, [parameter], lr=1).step(99)

    trio.run(check)


def leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)
