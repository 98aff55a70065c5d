"""Runs random programs (see `programs`): over RPC, and in one process to compare with.

The steps are interpreted, so that the same program runs with calls over RPC, and with calls of plain functions
that copy what is passed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gradwire import rpc
from gradwire.autograd.graph import follower_of

from tests.autograd.programs import (
    CONTAINERS,
    IN_PLACE,
    LEAVES,
    OPERATIONS,
    ROWS,
    SHAPE,
    Body,
    Box,
    Call,
    Constant,
    InPlace,
    Leaf,
    Lookup,
    Operation,
    Program,
    Take,
)


class Leaves:
    """The leaves of one worker."""

    def __init__(self, seed: int, worker: int) -> None:
        generator = torch.Generator().manual_seed(1000 * seed + worker)

        def random_leaf(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

        self.leaves = [random_leaf(*SHAPE) for _ in range(LEAVES)]
        self.embedding = random_leaf(ROWS, SHAPE[1])
        self.followers = [follower_of(leaf) for leaf in self.all()]
        """Without them torch could deadlock when two threads use a leaf, as in `leaf * 2` and `leaf[:1]`."""

    def all(self) -> list[torch.Tensor]:
        return [*self.leaves, self.embedding]


class Runtime:
    """Gives a body access to the leaves of its worker and to other workers."""

    def leaves(self) -> Leaves:
        raise NotImplementedError

    def call(self, call: Call, arguments: Any) -> Any:
        """Starts a call; returns its results, or what `take` gets them from."""
        raise NotImplementedError

    def take(self, promise: Any) -> Any:
        raise NotImplementedError


def run_body(runtime: Runtime, body: Body, arguments: Sequence[Any]) -> Any:
    """Runs a body; returns its results."""
    registers = list(arguments)
    for step in body.steps:
        match step:
            case Leaf(index):
                registers.append(runtime.leaves().leaves[index])
            case Lookup(rows):
                embedding = runtime.leaves().embedding
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
                answer = runtime.call(step, packed)
                registers.extend(_unpacked(step, answer) if step.how == "sync" else [(step, answer)])
            case Take(index):
                call, promise = registers[index]
                registers.extend(_unpacked(call, runtime.take(promise)))
    return CONTAINERS[body.container][0]([registers[index] for index in body.results])


def _unpacked(call: Call, answer: Any) -> list[Any]:
    return CONTAINERS[call.body.container][1](answer)


def roots(packed: Any, container: str) -> list[torch.Tensor]:
    """Returns the roots of a program's backward pass: those of the sums that require grad."""
    first, *rest = CONTAINERS[container][1](packed)
    sums = [first.sum()] + ([torch.stack(rest).square().mean()] if rest else [])
    return [each for each in sums if each.requires_grad]


class Distributed(Runtime):
    """Runs a body on a worker of a group in which worker n is called worker<n>."""

    of_program: dict[int, Leaves] = {}  # noqa: RUF012 - of the process
    """By the seed of each program that runs."""

    def __init__(self, seed: int, worker: int) -> None:
        self._seed = seed
        self._worker = worker

    def leaves(self) -> Leaves:
        found = self.of_program.get(self._seed)
        # Two threads that ask first must get the same leaves.
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
    """Runs the body of a call on the called worker."""
    return run_body(Distributed(seed, call.worker), call.body, CONTAINERS[call.container][1](arguments))


@dataclass
class Held:
    """Stands for a reference in one process."""

    owner: int
    value: Any


class OneProcess(Runtime):
    """Runs a body on a worker of a group that is simulated in one process."""

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
    """Returns a value with a copy of every tensor, connected to it in the graph."""
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
    """Runs a program in one process; returns the gradients of all leaves of each worker."""
    all_leaves = [Leaves(program.seed, worker) for worker in range(program.workers)]
    result = run_body(OneProcess(all_leaves, 0), program.main, [])
    if found := roots(result, program.main.container):
        torch.autograd.backward(found)
    return [[leaf.grad for leaf in leaves.all()] for leaves in all_leaves]
