"""Methods of torch's classes that gradwire's lack, or that torch's refuse and gradwire's support."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..autograd.graph import RecvRpc, SendRpc
from ..errors import RRefError
from ..nn.remote_module import SENT_ATTRIBUTES, RemoteModule, refuse_method
from ..rpc.contracts.agent import holder
from ..rref.rref import RRef
from .pickling import SentReference

__all__ = ["METHODS", "PICKLED_ATTRIBUTES"]

PICKLED_ATTRIBUTES = (*vars(nn.Module()), *SENT_ATTRIBUTES)
"""The first keys in the `__dict__` of a RemoteModule received from another worker; its two methods follow."""


def _serialize(self: RRef[Any]) -> SentReference:
    """Returns what stands for this reference in the pickle of a call, for a program's own pickler or reducer.

    torch returns the ids of a new fork; here, that is made when the message is sent.
    """
    handle = self._handle
    if handle.agent is not holder.get():
        raise RRefError(f"{self} was released at shutdown. Cannot call fork an UserRRef after deletion.")
    handle.check_usable(self, "fork an UserRRef")
    return SentReference(self)


def _deserialize(fork: object) -> RRef[Any]:
    """Returns the reference for what `_serialize` has returned. Raises RRefError if it is something else."""
    if not isinstance(fork, SentReference):
        raise RRefError(f"{fork!r} cannot be deserialized to an RRef: pass RRefs as arguments or results of calls")
    return fork.reference


def _get_profiling_future(self: RRef[Any]) -> torch.futures.Future[Any]:
    """Returns a future that is done when the call that creates the value, and its profiler event, have ended."""
    return self._get_future()


def _named_modules(
    self: RemoteModule, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yields this module in a traversal of a parent module; raises ValueError if the traversal begins here."""
    if memo is None:
        refuse_method("named_modules")(self)
    modules: Iterator[tuple[str, nn.Module]] = nn.Module.named_modules(self, memo, prefix, remove_duplicate)
    return modules


def _name_of_node(self: Any) -> str:
    return f"torch::distributed::autograd::{type(self).__name__}"


METHODS: Mapping[type, Mapping[str, object]] = {
    RRef: {
        "_deserialize": staticmethod(_deserialize),
        "_get_profiling_future": _get_profiling_future,
        "_serialize": _serialize,
    },
    RemoteModule: {
        "children": refuse_method("children"),
        "modules": refuse_method("modules"),
        "named_children": refuse_method("named_children"),
        "named_modules": _named_modules,
    },
    SendRpc._backward_cls: {"name": _name_of_node},
    RecvRpc._backward_cls: {"name": _name_of_node},
}
"""The methods of a class, by name; of nodes, those that `DistAutogradContext` returns."""
