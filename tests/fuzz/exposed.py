"""What the worker that is fuzzed exposes to others."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradwire import rpc

__all__ = ["CodedError", "Color", "FrozenPoint", "Pair", "Point", "count_to", "echo", "unexposed"]


@rpc.expose
def echo(*args: Any, **kwargs: Any) -> Any:
    """Returns its arguments."""
    return args, kwargs


@rpc.expose
def count_to(stop: int) -> Iterator[int]:
    """Yields some numbers."""
    yield from range(min(stop, 3))


@rpc.expose
@dataclass
class Point:
    """An exposed dataclass."""

    x: Any
    y: Any


@rpc.expose
@dataclass(frozen=True, slots=True)
class FrozenPoint:
    """Another, with slots."""

    x: Any
    y: Any


@rpc.expose
class Pair(NamedTuple):
    """An exposed named tuple."""

    first: Any
    second: Any


@rpc.expose
class Color(enum.Enum):
    """An exposed enum."""

    RED = 1


@rpc.expose
class CodedError(Exception):
    """An exposed exception."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code!r:.20}")
        self.code = code


def unexposed() -> None:
    """Must not run."""
    raise SystemExit("what is not exposed has run")
