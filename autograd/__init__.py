"""Distributed autograd: the names of `torch.distributed.autograd`."""

from .api import backward, context, get_gradients

__all__ = ["backward", "context", "get_gradients"]
