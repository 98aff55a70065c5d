"""A module with every kind of tensor that a module can have, for tests that send modules to other workers."""

import torch
from torch import Tensor, nn

__all__ = ["Mixed"]


class Mixed(nn.Module):
    """Has parameters, a frozen parameter, a buffer, and a plain tensor; two of its layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("offset", torch.ones(2))
        self.scale = torch.ones(2, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale + self.offset + self.frozen
