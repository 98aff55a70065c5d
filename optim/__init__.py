"""Optimizers whose parameters live on other workers."""

from .distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
