"""The replacements for torch's names, by module of torch.

Each replaced object is listed once, in the module that defines it. `Patches.patch_importers` finds the other
modules that refer to it.
"""

from collections.abc import Callable, Mapping

from . import autograd, nn, optim, rpc

__all__ = ["REPLACEMENTS"]

REPLACEMENTS: dict[str, Callable[[], Mapping[str, object]]] = {
    **rpc.REPLACEMENTS,
    **autograd.REPLACEMENTS,
    **optim.REPLACEMENTS,
    **nn.REPLACEMENTS,
}
"""By the name of a torch module, a function that returns its replacements. Called once the module is imported."""
