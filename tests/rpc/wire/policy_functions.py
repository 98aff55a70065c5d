"""What workers expose to each other in the tests of policies, and what they do not."""

import enum
import os
from dataclasses import dataclass
from os import path as imported_path  # noqa: F401 - what a pattern must not reach
from typing import NamedTuple

import torch
from gradwire import rpc


class Attack:
    """Makes a folder when it is unpickled in another process than this one, or than the one that is given."""

    def __init__(self, folder: str, process: int | None = None) -> None:
        self.folder = folder
        self.process = process

    def __reduce__(self):
        return attack_others, ("Attack", self.folder, os.getpid() if self.process is None else self.process)


class AttackingError(Exception):
    """An exception that does so."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.folder = folder

    def __reduce__(self):
        return attack_others, ("AttackingError", self.folder, os.getpid())


def attack_others(kind: str, folder: str, process: int) -> object:
    if os.getpid() != process:
        os.mkdir(folder)
    return globals()[kind](folder)


def load() -> None:
    """Has a worker import this module, and so expose what is exposed in it."""


def make_attack(folder: str) -> Attack:
    return Attack(folder)


def raise_attack(folder: str) -> None:
    raise AttackingError(folder)


def yield_attack(folder: str):
    yield 1
    yield Attack(folder)


def yield_then_raise_attack(folder: str):
    yield 1
    raise AttackingError(folder)


@rpc.expose
def echo(*args, **kwargs):
    return (args, kwargs) if kwargs else args[0] if len(args) == 1 else args


@rpc.expose
def call(function, *args):
    return function(*args)


@rpc.expose
def count_up(limit: int):
    yield from range(limit)


@rpc.expose
@rpc.functions.async_execution
def echo_later(value):
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return future


@rpc.expose
@torch.jit.script
def doubled(x):
    return x + x


@torch.jit.script
def tripled(x):
    return 3 * x


@rpc.expose
def raise_error(text: str) -> None:
    raise ValueError(text)


@rpc.expose
def value_of(rref):
    return rref.to_here()


def listed(value):
    return value


LOOKED_AT: list[str] = []
"""What has run."""


class RunsWhenLookedAt:
    """A value whose attributes are made by code."""

    def __getattr__(self, name):
        LOOKED_AT.append(name)
        raise AttributeError(name)


class RunsOnAccess:
    """A descriptor that runs when it is read from a class."""

    def __get__(self, instance, owner):
        LOOKED_AT.append("descriptor")
        return self


class WithDescriptor:
    described = RunsOnAccess()


runs_when_looked_at = RunsWhenLookedAt()


def unlisted(value):
    return value


def _private(value):
    return value


class Decorated:
    """A class with one exposed method."""

    @staticmethod
    @rpc.expose
    def exposed_static(value):
        return value

    @rpc.expose
    def exposed_method(self):
        return "exposed"

    def other_method(self):
        return "other"


@rpc.expose
class Counter:
    """An exposed class."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    @rpc.functions.async_execution
    def later(self, value):
        return echo_later(value)

    def __call__(self, number: int) -> int:
        return self.count + number

    def _reset(self) -> None:
        self.count = 0

    @classmethod
    def starting_at(cls, start: int) -> "Counter":
        return cls(start)


@rpc.expose
@dataclass
class Point:
    """An exposed dataclass."""

    x: int
    y: int


@rpc.expose
@dataclass(frozen=True, slots=True)
class FrozenPoint:
    """Another, with slots."""

    x: int
    y: int


@rpc.expose
class Color(enum.Enum):
    """An exposed enum."""

    RED = 1


@rpc.expose
class Mode(enum.IntFlag):
    READ = 1
    WRITE = 2


@rpc.expose
class DecodingError(UnicodeDecodeError):
    """An exception with numbers that Python uses as indices."""


@rpc.expose
class Colliding:
    """A key whose hash is that of all others."""

    compared = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        Colliding.compared += 1
        return isinstance(other, Colliding) and other.number == self.number


@rpc.expose
class Pair(NamedTuple):
    """An exposed named tuple."""

    first: object
    second: object


@rpc.expose
class Names(list):
    """An exposed list."""


@rpc.expose
class CodedError(Exception):
    """An exposed exception."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class UnexposedError(Exception):
    """One that is not exposed."""


@rpc.expose
def raise_coded() -> None:
    raise CodedError(7)


@rpc.expose
def raise_unexposed() -> None:
    raise UnexposedError("as text only")


@rpc.expose
def make_point() -> Point:
    return Point(1, 2)


@rpc.expose
class Layer(torch.nn.Linear):
    """An exposed module."""


@rpc.expose
def make_weight():
    return torch.nn.Parameter(torch.ones(2))


@rpc.expose
def multiply_by(weight, x, total=False):
    product = weight.local_value() * x
    return product.sum() if total else product


@rpc.expose
def twice(x):
    return 2 * x


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _gradient):
        raise RuntimeError("no gradient here")


@rpc.expose
def failing_backward(x):
    return _FailingBackward.apply(x)


@rpc.expose
def run_module(module, x):
    return module(x)


@rpc.expose
def make_decorated():
    return Decorated()
