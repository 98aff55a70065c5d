"""Stands in for names of torch that gradwire has no equivalent of."""

from collections.abc import Callable
from typing import NoReturn

from ...errors import RpcError

__all__ = ["unavailable"]


def unavailable(name: str, instead: str) -> Callable[..., NoReturn]:
    """Returns a function that raises RpcError when it is called, naming what to use instead."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:  # noqa: ARG001
        raise RpcError(f"{name} is a part of torch's own agent, and this program runs on gradwire: use {instead}")

    refuse.__name__ = name
    return refuse
