"""Optimizers whose parameters live on other workers."""

from .distributed_optimizer import DistributedOptimizer
from .lr_scheduler import DistributedLRScheduler

__all__ = ["DistributedLRScheduler", "DistributedOptimizer"]
