"""Methods that torch's RemoteModule refuses and gradwire's supports."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from ..nn.remote_module import SENT_ATTRIBUTES, RemoteModule, refuse_method

__all__ = ["METHODS", "PICKLED_ATTRIBUTES"]

PICKLED_ATTRIBUTES = (*vars(nn.Module()), *SENT_ATTRIBUTES)
"""The first keys in the `__dict__` of a RemoteModule received from another worker; its two methods follow."""


def _named_modules(
    self: RemoteModule, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yields this module in a traversal of a parent module; raises ValueError if the traversal begins here."""
    if memo is None:
        refuse_method("named_modules")(self)
    modules: Iterator[tuple[str, nn.Module]] = nn.Module.named_modules(self, memo, prefix, remove_duplicate)
    return modules


METHODS: Mapping[str, Callable[..., Any]] = {
    "children": refuse_method("children"),
    "modules": refuse_method("modules"),
    "named_children": refuse_method("named_children"),
    "named_modules": _named_modules,
}
"""Replacements of the methods, by name."""
