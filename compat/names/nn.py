"""Replacements for `torch.distributed.nn`."""

from collections.abc import Callable, Mapping

from ... import nn
from ..remote_module import PICKLED_ATTRIBUTES

__all__ = ["REPLACEMENTS"]


def _remote_module() -> Mapping[str, object]:
    return {
        "RemoteModule": nn.RemoteModule,
        "_REMOTE_MODULE_PICKLED_ATTRIBUTES": PICKLED_ATTRIBUTES,
        "_RemoteModule": nn.RemoteModule,
    }


REPLACEMENTS: dict[str, Callable[[], Mapping[str, object]]] = {
    "torch.distributed.nn.api.remote_module": _remote_module
}
