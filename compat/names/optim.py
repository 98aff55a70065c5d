"""Replacements for `torch.distributed.optim`."""

from collections.abc import Callable, Mapping

from ... import optim

__all__ = ["REPLACEMENTS"]

REPLACEMENTS: dict[str, Callable[[], Mapping[str, object]]] = {
    "torch.distributed.optim.optimizer": lambda: {"DistributedOptimizer": optim.DistributedOptimizer}
}
