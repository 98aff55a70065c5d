"""Which methods of a RemoteModule torch refuses, and gradwire has."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from ..nn.remote_module import SENT_ATTRIBUTES, RemoteModule, refuse_method

__all__ = ["METHODS", "PICKLED_ATTRIBUTES"]

PICKLED_ATTRIBUTES = (*vars(nn.Module()), *SENT_ATTRIBUTES)
"""What a RemoteModule that another worker sent has in its `__dict__`, before its two methods."""


def _named_modules(
    self: RemoteModule, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Continues a walk over the module that this one is part of. Raises ValueError: the walk begins here."""
    if memo is None:
        refuse_method("named_modules")(self)
    walk: Iterator[tuple[str, nn.Module]] = nn.Module.named_modules(self, memo, prefix, remove_duplicate)
    return walk


METHODS: Mapping[str, Callable[..., Any]] = {
    "children": refuse_method("children"),
    "modules": refuse_method("modules"),
    "named_children": refuse_method("named_children"),
    "named_modules": _named_modules,
}
"""By name."""
