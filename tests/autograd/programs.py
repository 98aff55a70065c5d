"""Random programs over several workers. `program_runs` interprets them.

A program is a tree: the body of `main`, on worker 0, calls bodies on other workers, and so on. A body computes on
registers: it appends the results of each of its steps, and returns some of them.

All tensors are float64 of one shape, so that every operation takes any of them.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

SHAPE = (3, 4)
LEAVES = 2
"""The number of leaves of each worker."""
ROWS = 6
"""The number of rows of the embedding that each worker has besides its leaves."""


# The parts of a program.


@dataclass(frozen=True)
class Leaf:
    """Appends a leaf of this worker."""

    index: int


@dataclass(frozen=True)
class Lookup:
    """Appends rows of this worker's embedding, whose gradient is sparse."""

    rows: tuple[int, ...]


@dataclass(frozen=True)
class Constant:
    """Appends a tensor that does not require grad."""

    seed: int


@dataclass(frozen=True)
class Operation:
    """Appends the result of a function of OPERATIONS."""

    name: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class InPlace:
    """Changes a register in place, by a function of IN_PLACE."""

    name: str
    target: int
    other: int


@dataclass(frozen=True)
class Call:
    """Calls a body on a worker. Appends its results if `how` is "sync", else what `Take` gets them from."""

    worker: int
    how: str
    arguments: tuple[int, ...]
    container: str
    body: "Body"


@dataclass(frozen=True)
class Take:
    """Waits for a call, or fetches the value of a reference, and appends the results."""

    register: int


Step = Leaf | Lookup | Constant | Operation | InPlace | Call | Take


@dataclass(frozen=True)
class Body:
    """Runs on one worker. Its registers begin with the arguments."""

    steps: tuple[Step, ...]
    results: tuple[int, ...]
    container: str


@dataclass(frozen=True)
class Program:
    """A body for worker 0, of whose results one root is the sum of the first, another one of the rest."""

    seed: int
    workers: int
    main: Body


@dataclass
class Box:
    """A container class of the program."""

    content: list[Any] = field(default_factory=list)


class Doubles(torch.autograd.Function):
    """A custom function, which gets zeros as gradients of unused outputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * x, x - y

    @staticmethod
    def backward(ctx: Any, doubled: torch.Tensor, difference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * doubled + difference, -difference


def without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * 0.5


def checkpointed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.utils.checkpoint.checkpoint(lambda a, b: (a * b).sin(), x, y, use_reentrant=False)
    return result


NOTHING_SAVED: Mapping[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "flip": lambda x: x.flip(0),
    "cumsum": lambda x: 0.3 * x.cumsum(1),
    "rows of both": lambda x, y: torch.cat([x[:1], y[1:]]),
    "custom": lambda x, y: Doubles.apply(x, y)[0] + 1,
    "other custom": lambda x, y: Doubles.apply(x, y)[1] + 1,
    "no_grad": without_grad,
}
"""Operations whose operands and result may be changed in place before the backward pass."""

OPERATIONS: Mapping[str, Callable[..., torch.Tensor]] = NOTHING_SAVED | {
    "multiply": torch.mul,
    "sine": torch.sin,
    "tanh": torch.tanh,
    "matmul": lambda x, y: 0.2 * x @ y.T @ x,
    "complex": lambda x, y: torch.complex(x + 2, y).abs(),
    "checkpoint": checkpointed,
    "thrice": lambda x: torch.stack([x, x.detach(), x * x]).mean(0),
}
UNARY = {"flip", "cumsum", "no_grad", "sine", "tanh", "thrice"}

IN_PLACE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add": lambda x, y: x.add_(y),
    "scale": lambda x, _: x.mul_(0.7),
    "rows": lambda x, y: x[1:].sub_(y[1:]),
    "transposed": lambda x, _: x.t().mul_(-1.1),
    "sine of a view": lambda x, _: x.view(-1)[2:7].sin_(),
    "copy": lambda x, y: x[0].copy_(y[2]),
}

CONTAINERS: Mapping[str, tuple[Callable[[list[Any]], Any], Callable[[Any], list[Any]]]] = {
    "list": (list, list),
    "tuple": (tuple, list),
    "dict": (lambda items: dict(enumerate(items)), lambda packed: list(packed.values())),
    "nested": (lambda items: {"rest": (items[1:],), "first": items[:1]}, lambda p: [*p["first"], *p["rest"][0]]),
    "dataclass": (Box, lambda box: list(box.content)),
}


# Generating one.


@dataclass(eq=False)
class _Tensor:
    """Stands for one tensor object of a run; registers that hold the same object share it."""

    changeable: bool


@dataclass(eq=False)
class _Promise:
    """Stands for a future or a reference, from which `Take` gets results."""

    owner: int | None
    """The owner of a reference; None for a future."""
    results: Sequence[_Tensor]
    taken: dict[_Tensor, _Tensor] = field(default_factory=dict)
    """The results of a future on this worker, which are the same objects each time."""


def generate(seed: int) -> Program:
    """Returns the program of this number."""
    return _Generator(seed).program()


class _Generator:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._seed = seed
        self._workers = self._random.randint(2, 5)
        self._calls_left = self._random.randint(1, 10)
        self._leaves = {
            (worker, index): _Tensor(changeable=False)
            for worker in range(self._workers)
            for index in range(LEAVES)
        }

    def program(self) -> Program:
        body, _ = self._body(0, [], 0)
        return Program(self._seed, self._workers, body)

    def _body(
        self, worker: int, arguments: Sequence[_Tensor | _Promise], depth: int
    ) -> tuple[Body, list[_Tensor]]:
        steps: list[Step] = []
        registers = list(arguments)
        if not any(isinstance(register, _Tensor) for register in registers):
            steps.append(Leaf(0))
            registers.append(self._leaves[worker, 0])
        for _ in range(self._random.randint(6, 16) if depth == 0 else self._random.randint(2, 7)):
            self._step(worker, steps, registers, depth)
        self._add_up(steps, registers)
        chosen = [len(registers) - 1, *(self._pick(registers) for _ in range(self._random.randrange(3)))]
        body = Body(tuple(steps), tuple(chosen), self._random.choice(list(CONTAINERS)))
        return body, [self._tensor(registers, index) for index in chosen]

    def _step(self, worker: int, steps: list[Step], registers: list[_Tensor | _Promise], depth: int) -> None:
        choice = self._random.random()
        promises = [index for index, register in enumerate(registers) if isinstance(register, _Promise)]
        if choice < 0.1:
            index = self._random.randrange(LEAVES)
            steps.append(Leaf(index))
            registers.append(self._leaves[worker, index])
        elif choice < 0.15:
            steps.append(Lookup(tuple(self._random.randrange(ROWS) for _ in range(SHAPE[0]))))
            registers.append(_Tensor(changeable=True))
        elif choice < 0.2:
            steps.append(Constant(self._random.randrange(1000)))
            registers.append(_Tensor(changeable=True))
        elif choice < 0.32 and promises:
            self._take(worker, self._random.choice(promises), steps, registers)
        elif choice < 0.48:
            self._in_place(steps, registers)
        elif choice < 0.7 and self._calls_left and depth < 4:
            self._call(worker, steps, registers, depth)
        else:
            name = self._random.choice(list(OPERATIONS))
            operands = tuple(self._pick(registers) for _ in range(1 if name in UNARY else 2))
            steps.append(Operation(name, operands))
            if name not in NOTHING_SAVED:
                for operand in operands:
                    self._tensor(registers, operand).changeable = False
            registers.append(_Tensor(changeable=name in NOTHING_SAVED))

    def _add_up(self, steps: list[Step], registers: list[_Tensor | _Promise]) -> None:
        """Adds up most of the registers that have not been used; the others stay unused."""
        used = {index for step in steps if isinstance(step, Operation) for index in step.operands}
        used |= {index for step in steps if isinstance(step, Call) for index in step.arguments}
        last = self._pick(registers)
        for index in range(len(registers)):
            if (
                isinstance(registers[index], _Tensor)
                and index not in {*used, last}
                and self._random.random() < 0.7
            ):
                steps.append(Operation("add", (last, index)))
                last = len(registers)
                registers.append(_Tensor(changeable=True))
        if last != len(registers) - 1:
            steps.append(Operation("flip", (last,)))
            registers.append(_Tensor(changeable=True))

    def _in_place(self, steps: list[Step], registers: list[_Tensor | _Promise]) -> None:
        targets = [
            index
            for index, register in enumerate(registers)
            if isinstance(register, _Tensor) and register.changeable
        ]
        if targets:
            target, other = self._random.choice(targets), self._pick(registers)
            if registers[target] is not registers[other]:
                steps.append(InPlace(self._random.choice(list(IN_PLACE)), target, other))

    def _call(self, worker: int, steps: list[Step], registers: list[_Tensor | _Promise], depth: int) -> None:
        self._calls_left -= 1
        to = self._random.randrange(self._workers)
        arguments = [self._pick(registers) for _ in range(self._random.randint(1, 3))]
        references = [
            index
            for index, register in enumerate(registers)
            if isinstance(register, _Promise) and register.owner is not None
        ]
        if references and self._random.random() < 0.6:
            arguments.append(self._random.choice(references))
        copies: dict[_Tensor, _Tensor] = {}
        passed = [_copy(registers[index], copies) for index in arguments]
        body, results = self._body(to, passed, depth + 1)
        how = self._random.choice(["sync", "sync", "async", "remote"])
        container = self._random.choice(list(CONTAINERS))
        steps.append(Call(to, how, tuple(arguments), container, body))
        if how == "sync":
            back: dict[_Tensor, _Tensor] = {}
            registers.extend(_copy(result, back) for result in results)
        else:
            promise = len(registers)
            registers.append(_Promise(to if how == "remote" else None, results))
            if how == "async" or self._random.random() < 0.5:
                for _ in range(self._random.randrange(3)):
                    self._step(worker, steps, registers, depth)
                self._take(worker, promise, steps, registers)

    def _take(self, worker: int, index: int, steps: list[Step], registers: list[_Tensor | _Promise]) -> None:
        promise = registers[index]
        assert isinstance(promise, _Promise)
        steps.append(Take(index))
        copies: dict[_Tensor, _Tensor] = {} if promise.owner is not None else promise.taken
        if promise.owner == worker:  # gets the value itself, which others may fetch before or after a change
            for result in promise.results:
                result.changeable = False
            copies = {result: result for result in promise.results}
        registers.extend(_copy(result, copies) for result in promise.results)

    def _pick(self, registers: list[_Tensor | _Promise]) -> int:
        """Returns the index of a register with a tensor, more likely a recent one."""
        indices = [index for index, register in enumerate(registers) if isinstance(register, _Tensor)]
        return indices[-1 - min(int(self._random.expovariate(0.4)), len(indices) - 1)]

    @staticmethod
    def _tensor(registers: list[_Tensor | _Promise], index: int) -> _Tensor:
        tensor = registers[index]
        assert isinstance(tensor, _Tensor)
        return tensor


def _copy(register: Any, copies: dict[_Tensor, _Tensor]) -> Any:
    """Returns what a register becomes when it is passed to a worker. What was one tensor stays one."""
    if isinstance(register, _Promise):
        return register
    return copies.setdefault(register, _Tensor(changeable=True))
