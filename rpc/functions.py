"""`async_execution`: remote functions that return a future instead of blocking a thread."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

__all__ = ["ASYNC_MARK", "async_execution"]

P = ParamSpec("P")
R = TypeVar("R")

ASYNC_MARK = "_wrapped_async_rpc_function"
"""The attribute of marked functions, and of their methods: torch's name, so that its functions are known, too."""


def async_execution(fn: Callable[P, torch.futures.Future[R]]) -> Callable[P, R]:
    """Marks a function that returns a `torch.futures.Future` of its result.

    A remote call of the function is answered with the value of the future, once it has one; no thread of the
    called worker waits for it. This applies to `rpc_sync`, `rpc_async`, `remote` and the proxies of an RRef.
    Combined with `staticmethod` or `classmethod`, this decorator is the inner one:

        @staticmethod
        @rpc.functions.async_execution
        def add_twice(to, x, y):
            return rpc.rpc_async(to, torch.add, (x, y)).then(lambda sum: sum.wait() + y)

    A direct call is unchanged and returns the future. For type checkers the function returns the value, as remote
    calls do.

    Raises:
        TypeError: the function cannot be marked because it is not written in Python.
    """
    try:
        setattr(fn, ASYNC_MARK, fn)
    except AttributeError:
        raise TypeError(f"{fn!r} cannot be marked: give a function that is written in Python") from None
    return cast(Callable[P, R], fn)
