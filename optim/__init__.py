"""Optimizers, learning rate schedules and gradient clipping for parameters on other workers."""

from .distributed_optimizer import DistributedOptimizer
from .grad_clip import clip_grad_norm_
from .lr_scheduler import DistributedLRScheduler

__all__ = ["DistributedLRScheduler", "DistributedOptimizer", "clip_grad_norm_"]


def __dir__() -> list[str]:
    return sorted(__all__)
