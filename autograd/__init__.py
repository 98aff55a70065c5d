"""Distributed autograd, with the API of `torch.distributed.autograd`."""

from .extension import backward, context, get_gradients

__all__ = ["backward", "context", "get_gradients"]


def __dir__() -> list[str]:
    return sorted(__all__)
