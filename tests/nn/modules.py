"""Modules that tests make on other workers."""

import torch
from gradwire.nn import RemoteModule
from torch import Tensor, nn


class Reverse(nn.Module):
    """Returns its arguments in reverse order."""

    def __init__(self, first: int, *, second: int = -1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([float(first), float(second)]))

    def forward(self, tensor: Tensor, number: int, word: str = "default") -> tuple[str, int, Tensor]:
        return word, number, tensor


class Mlp(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.bias = nn.Parameter(torch.rand(4))
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.bias


def attributes(module: RemoteModule) -> dict[str, object]:
    return vars(module)
