"""Models that the optimizer tests train, in this process and on other workers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from gradwire import autograd, rpc
from torch import nn

ROWS = 6
"""The number of rows of a Table."""


class Model(nn.Module):
    """A model with the methods that tests call on its worker."""

    def initialize(self, seed: int) -> None:
        """Initializes the weights from a generator of its own: threads may make several models at once."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator)

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def weights(self) -> list[torch.Tensor]:
        assert all(parameter.grad is None for parameter in self.parameters())
        return [parameter.detach() for parameter in self.parameters()]

    def saved(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}

    def resume(self, saved: dict[str, torch.Tensor]) -> None:
        self.load_state_dict(saved)

    def relocate(self) -> None:
        """Replaces the memory of the parameters, as `module.to(...)` does."""
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()

    def gradients(self, context_id: int) -> list[torch.Tensor | None]:
        found = autograd.get_gradients(context_id)
        return [found.get(parameter) for parameter in self.parameters()]


class Layer(Model):
    """A dense layer."""

    def __init__(self, seed: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=bias)
        self.initialize(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Matrix(Layer):
    """A dense layer without bias, for Muon, which accepts only matrices."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, bias=False)


class Table(Model):
    """An embedding with sparse gradients; adds some of its rows to the input."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, 4, sparse=True)
        self.initialize(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows(torch.arange(len(x)) * 5 % ROWS // 2)  # some rows twice, some never


def batch(step: int) -> torch.Tensor:
    return torch.linspace(-1, 1 + step, 16).reshape(4, 4)


def loss_of(forwards: Iterable[Callable[[torch.Tensor], torch.Tensor]], step: int) -> torch.Tensor:
    x = batch(step)
    for forward in forwards:
        x = forward(x)
    return (x - 0.5).square().sum()


def remote_forwards(models: Sequence[rpc.RRef]) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    return [model.rpc_sync().forward for model in models]


def spread(kind: type[Model], *names: str) -> list[rpc.RRef]:
    """Makes one model on each worker, with the seeds 0, 1, …"""
    return [rpc.remote(name, kind, (seed,)) for seed, name in enumerate(names)]


def parameters_of(models: Sequence[rpc.RRef]) -> list[rpc.RRef]:
    return [parameter for model in models for parameter in model.rpc_sync().parameter_rrefs()]


def train_step(models: Sequence[rpc.RRef], optimizer: Any, step: int) -> float:
    """Makes one step of a distributed optimizer; returns the loss before it."""
    with autograd.context() as context_id:
        loss = loss_of(remote_forwards(models), step)
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss.item()


def local_step(models: Sequence[Model], optimizer: torch.optim.Optimizer, step: int) -> float:
    """Makes the same step in this process."""
    optimizer.zero_grad()
    loss = loss_of(models, step)
    loss.backward()
    optimizer.step()
    return loss.item()


def assert_same_weights(models: Sequence[rpc.RRef], local: Sequence[Model]) -> None:
    found = [weight for model in models for weight in model.rpc_sync().weights()]
    expected = [parameter.detach() for model in local for parameter in model.parameters()]
    torch.testing.assert_close(found, expected)
