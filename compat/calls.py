"""Calls as torch makes them: the arguments of its own operators are checked before anything is sent."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from .. import rpc

__all__ = ["remote", "rpc_async", "rpc_sync"]

P = ParamSpec("P")
R = TypeVar("R")

_builtins: Any = torch.jit._builtins


def _checked(call: Callable[P, R]) -> Callable[P, R]:
    @wraps(call)
    def checking(*args: P.args, **kwargs: P.kwargs) -> R:
        # The first parameters of all three are (to, func, args, kwargs).
        given: dict[str, Any] = {**dict(zip(("to", "func", "args", "kwargs"), args, strict=False)), **kwargs}
        _check_operator(given.get("func"), given.get("args") or (), given.get("kwargs") or {})
        return call(*args, **kwargs)

    return checking


def _check_operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises RuntimeError if a function is one of torch's operators and no overload of it takes the arguments."""
    name = _builtins._find_builtin(func)
    if name is not None:
        torch._C._jit_resolve_packet(name, *args, **kwargs)


remote = _checked(rpc.remote)
rpc_async = _checked(rpc.rpc_async)
rpc_sync = _checked(rpc.rpc_sync)
