"""A module with all kinds of tensors, for tests of what arrives of it."""

import torch
from torch import Tensor, nn

__all__ = ["Mixed"]


class Mixed(nn.Module):
    """Has whatever tensors a module can have; two of its layers share a weight."""

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
