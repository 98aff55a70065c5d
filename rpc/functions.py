"""Remote functions that answer later."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

__all__ = ["async_execution", "is_async_execution"]

P = ParamSpec("P")
R = TypeVar("R")

_MARK = "_wrapped_async_rpc_function"


def async_execution(fn: Callable[P, torch.futures.Future[R]]) -> Callable[P, R]:
    """Marks a function that returns a `torch.futures.Future` of its result.

    When such a function is called remotely, the caller gets the value of the future when there is one, and no
    thread of the called worker waits for it. Works with `rpc_sync`, `rpc_async`, `remote` and the methods that
    an RRef's proxies call. Combined with `staticmethod` or `classmethod`, this decorator is the inner one:

        @staticmethod
        @rpc.functions.async_execution
        def add_twice(to, x, y):
            return rpc.rpc_async(to, torch.add, (x, y)).then(lambda sum: sum.wait() + y)

    Called directly, the function is what it was, and returns the future. For a type checker it returns the value,
    as it does for those who call it remotely.
    """
    try:
        setattr(fn, _MARK, fn)
    except AttributeError:
        raise TypeError(f"{fn!r} cannot be marked: give a function that is written in Python") from None
    return cast(Callable[P, R], fn)


def is_async_execution(fn: object) -> bool:
    """Is this function, or the function of this method, marked so?"""
    return hasattr(fn, _MARK)
