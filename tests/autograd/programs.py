"""Random programs over several workers, which can also be run in one process.

A program is a tree: the body of `main`, on worker 0, calls bodies on other workers, and so on. A body computes on
registers: it appends what each of its steps gives and returns some of them. The steps are interpreted, so
that the same program runs with calls over RPC and, as what to compare with, with calls of plain functions
that copy what they pass.

All tensors are float64 of one shape, so that any of them go together.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gradwire import rpc

SHAPE = (3, 4)
LEAVES = 2
ROWS = 6
"""Of the embedding that each worker has besides its leaves."""


# What a program is made of.


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
    """Appends a tensor that takes no gradient."""

    seed: int


@dataclass(frozen=True)
class Operation:
    """Appends the result of a function of OPERATIONS."""

    name: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class InPlace:
    """Changes a register by a function of IN_PLACE."""

    name: str
    target: int
    other: int


@dataclass(frozen=True)
class Call:
    """Calls a body on a worker. Appends its results, or where `how` is not "sync" what `Take` gets them from."""

    worker: int
    how: str
    arguments: tuple[int, ...]
    container: str
    body: "Body"


@dataclass(frozen=True)
class Take:
    """Waits for a call, or fetches the value of a reference; appends the results."""

    register: int


Step = Leaf | Lookup | Constant | Operation | InPlace | Call | Take


@dataclass(frozen=True)
class Body:
    """What runs on one worker: the registers begin with the arguments."""

    steps: tuple[Step, ...]
    results: tuple[int, ...]
    container: str


@dataclass(frozen=True)
class Program:
    """A body for worker 0, whose results are summed up: the first to one root, the rest to another."""

    seed: int
    workers: int
    main: Body


@dataclass
class Box:
    """A container of the user's own."""

    content: list[Any] = field(default_factory=list)


class Doubles(torch.autograd.Function):
    """A custom function, whose unused gradients are zeros."""

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


# Making one up.


@dataclass(eq=False)
class _Tensor:
    """One tensor object of a run; registers that hold the same one have the same of these."""

    changeable: bool


@dataclass(eq=False)
class _Promise:
    """What `Take` gets results from."""

    owner: int | None
    """Of a reference."""
    results: Sequence[_Tensor]
    taken: dict[_Tensor, _Tensor] = field(default_factory=dict)
    """Of a future: what its results are here. They are the same each time."""


def generate(seed: int) -> Program:
    """The program of this number."""
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
        self._gather(steps, registers)
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

    def _gather(self, steps: list[Step], registers: list[_Tensor | _Promise]) -> None:
        """Adds up most of what has not been used; the rest stays unused."""
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
            registers.append(_Promise(to if how == "remote" else None, results))
            if how == "async" or self._random.random() < 0.5:
                for _ in range(self._random.randrange(3)):
                    self._step(worker, steps, registers, depth)
                index = max(i for i, register in enumerate(registers) if isinstance(register, _Promise))
                self._take(worker, index, steps, registers)

    def _take(self, worker: int, index: int, steps: list[Step], registers: list[_Tensor | _Promise]) -> None:
        promise = registers[index]
        assert isinstance(promise, _Promise)
        steps.append(Take(index))
        copies: dict[_Tensor, _Tensor] = {} if promise.owner is not None else promise.taken
        if promise.owner == worker:  # it gets the value itself, which others may fetch before or after a change
            for result in promise.results:
                result.changeable = False
            copies = {result: result for result in promise.results}
        registers.extend(_copy(result, copies) for result in promise.results)

    def _pick(self, registers: list[_Tensor | _Promise]) -> int:
        """A register with a tensor, rather a new one."""
        indices = [index for index, register in enumerate(registers) if isinstance(register, _Tensor)]
        return indices[-1 - min(int(self._random.expovariate(0.4)), len(indices) - 1)]

    @staticmethod
    def _tensor(registers: list[_Tensor | _Promise], index: int) -> _Tensor:
        tensor = registers[index]
        assert isinstance(tensor, _Tensor)
        return tensor


def _copy(register: Any, copies: dict[_Tensor, _Tensor]) -> Any:
    """What a register is after it was passed. What was one tensor stays one."""
    if isinstance(register, _Promise):
        return register
    return copies.setdefault(register, _Tensor(changeable=True))


# Running one.


class Leaves:
    """What one worker's gradients are of."""

    def __init__(self, seed: int, worker: int) -> None:
        generator = torch.Generator().manual_seed(1000 * seed + worker)

        def random_leaf(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

        self.leaves = [random_leaf(*SHAPE) for _ in range(LEAVES)]
        self.embedding = random_leaf(ROWS, SHAPE[1])

    def all(self) -> list[torch.Tensor]:
        return [*self.leaves, self.embedding]


class World:
    """Where a body runs: how it gets at leaves and at other workers."""

    def leaves(self) -> Leaves:
        raise NotImplementedError

    def call(self, call: Call, arguments: Any) -> Any:
        """Starts a call: its results, or what `take` takes."""
        raise NotImplementedError

    def take(self, promise: Any) -> Any:
        raise NotImplementedError


def run_body(world: World, body: Body, arguments: Sequence[Any]) -> Any:
    """What a body returns."""
    registers = list(arguments)
    for step in body.steps:
        match step:
            case Leaf(index):
                registers.append(world.leaves().leaves[index])
            case Lookup(rows):
                embedding = world.leaves().embedding
                registers.append(torch.nn.functional.embedding(torch.tensor(rows), embedding, sparse=True))
            case Constant(seed):
                generator = torch.Generator().manual_seed(seed)
                registers.append(torch.randn(SHAPE, dtype=torch.float64, generator=generator))
            case Operation(name, operands):
                registers.append(OPERATIONS[name](*(registers[index] for index in operands)))
            case InPlace(name, target, other):
                IN_PLACE[name](registers[target], registers[other])
            case Call():
                packed = CONTAINERS[step.container][0]([registers[index] for index in step.arguments])
                answer = world.call(step, packed)
                registers.extend(_opened(step, answer) if step.how == "sync" else [(step, answer)])
            case Take(index):
                call, promise = registers[index]
                registers.extend(_opened(call, world.take(promise)))
    return CONTAINERS[body.container][0]([registers[index] for index in body.results])


def _opened(call: Call, answer: Any) -> list[Any]:
    return CONTAINERS[call.body.container][1](answer)


def roots(packed: Any, container: str) -> list[torch.Tensor]:
    """The scalars to differentiate; those that can be."""
    first, *rest = CONTAINERS[container][1](packed)
    sums = [first.sum()] + ([torch.stack(rest).square().mean()] if rest else [])
    return [each for each in sums if each.requires_grad]


class Distributed(World):
    """A worker of a group, in which worker n is called worker<n>."""

    of_program: dict[int, Leaves] = {}  # noqa: RUF012 - of the process
    """The leaves of each program that runs."""

    def __init__(self, seed: int, worker: int) -> None:
        self._seed = seed
        self._worker = worker

    def leaves(self) -> Leaves:
        found = self.of_program.get(self._seed)
        # Two threads that come first must get the same.
        return (
            found
            if found is not None
            else self.of_program.setdefault(self._seed, Leaves(self._seed, self._worker))
        )

    def call(self, call: Call, arguments: Any) -> Any:
        to, value = f"worker{call.worker}", (self._seed, call, arguments)
        match call.how:
            case "sync":
                return rpc.rpc_sync(to, run_call, value)
            case "async":
                return rpc.rpc_async(to, run_call, value)
            case _:
                return rpc.remote(to, run_call, value)

    def take(self, promise: Any) -> Any:
        return promise.to_here() if isinstance(promise, rpc.RRef) else promise.wait()


def run_call(seed: int, call: Call, arguments: Any) -> Any:
    """What is called on other workers."""
    return run_body(Distributed(seed, call.worker), call.body, CONTAINERS[call.container][1](arguments))


@dataclass
class Held:
    """A reference, in one process."""

    owner: int
    value: Any


class OneProcess(World):
    """A worker of a group that is simulated in one process."""

    def __init__(self, all_leaves: Sequence[Leaves], worker: int) -> None:
        self._all_leaves = all_leaves
        self._worker = worker

    def leaves(self) -> Leaves:
        return self._all_leaves[self._worker]

    def call(self, call: Call, arguments: Any) -> Any:
        passed = CONTAINERS[call.container][1](passed_on(arguments, {}))
        result = run_body(OneProcess(self._all_leaves, call.worker), call.body, passed)
        return Held(call.worker, result) if call.how == "remote" else passed_on(result, {})

    def take(self, promise: Any) -> Any:
        if isinstance(promise, Held):
            return promise.value if promise.owner == self._worker else passed_on(promise.value, {})
        return promise


def passed_on(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """A copy of every tensor, with its gradient."""
    match value:
        case torch.Tensor():
            if id(value) not in copies:
                copies[id(value)] = value.clone()
            return copies[id(value)]
        case list() | tuple():
            return type(value)(passed_on(item, copies) for item in value)
        case dict():
            return {key: passed_on(item, copies) for key, item in value.items()}
        case Box():
            return Box(passed_on(value.content, copies))
        case _:
            return value


def gradients_in_one_process(program: Program) -> list[list[torch.Tensor | None]]:
    """The gradients of all leaves of each worker."""
    all_leaves = [Leaves(program.seed, worker) for worker in range(program.workers)]
    result = run_body(OneProcess(all_leaves, 0), program.main, [])
    if found := roots(result, program.main.container):
        torch.autograd.backward(found)
    return [[leaf.grad for leaf in leaves.all()] for leaves in all_leaves]
