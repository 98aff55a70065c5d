"""Which of gradwire's objects stands for which of torch's names.

A table names each object once, in the module that defines it. Other modules that have it are found by identity.
"""

from collections.abc import Callable, Mapping

from . import autograd, nn, optim, rpc

__all__ = ["TABLES"]

TABLES: dict[str, Callable[[], Mapping[str, object]]] = {
    **rpc.TABLES,
    **autograd.TABLES,
    **optim.TABLES,
    **nn.TABLES,
}
"""By module, what makes its table: only when torch has imported the module."""
