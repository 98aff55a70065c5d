"""What workers run for each other under chaos. A numbered call is written down before anything else is done."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from gradwire import rpc
from gradwire.errors import RpcError

from tests.chaos.records import Record

if TYPE_CHECKING:
    from tests.chaos.load import Load

__all__ = [
    "ExpectedError",
    "add",
    "count_up",
    "double",
    "fail",
    "make",
    "nest",
    "own_incarnation",
    "pause",
    "read",
    "scale",
    "set_up",
]


class ExpectedError(ValueError):
    """What `fail` raises."""


class _Callee:
    """This worker as a callee: where it writes down what it runs, and its own load for calls of calls."""

    record: Record
    load: "Load"


def set_up(record: Record, load: "Load") -> None:
    """Prepares this worker for calls."""
    _Callee.record, _Callee.load = record, load


def own_incarnation() -> str:
    return _Callee.load.incarnation


def add(number: str, a: int, b: int) -> tuple[str, int]:
    _Callee.record.write(number)
    return number, a + b


def double(number: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    _Callee.record.write(number)
    return number, tensor * 2


def scale(number: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _Callee.record.write(number)
    return a * b


def fail(number: str) -> None:
    _Callee.record.write(number)
    raise ExpectedError(number)


def pause(number: str, seconds: float) -> str:
    _Callee.record.write(number)
    time.sleep(seconds)
    return number


def nest(number: str, third: str) -> str:
    """Calls a third worker, whose answer is checked and written down here."""
    _Callee.record.write(number)
    _Callee.load.add(third)
    return number


def make(number: str) -> tuple[str, str]:
    """Makes the value of a reference, which tells who has made it."""
    _Callee.record.write(number)
    return number, _Callee.load.incarnation


def read(number: str, rref: "rpc.RRef[Any]", seconds: float) -> tuple[str, Any]:
    """Fetches the value of a reference that another worker owns; returns None if that cannot be reached."""
    _Callee.record.write(number)
    try:
        return number, rref.to_here(seconds)
    except RpcError:
        return number, None


def count_up(number: str, items: int) -> Iterator[tuple[str, int]]:
    _Callee.record.write(number)
    for item in range(items):
        yield number, item
