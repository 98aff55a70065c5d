"""Names that gradwire has nothing for."""

from collections.abc import Callable
from typing import NoReturn

from ...errors import RpcError

__all__ = ["missing"]


def missing(name: str, instead: str) -> Callable[..., NoReturn]:
    """A function that says so when it is called."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:  # noqa: ARG001
        raise RpcError(f"{name} is a part of torch's own agent, and this program runs on gradwire: use {instead}")

    refuse.__name__ = name
    return refuse
