"""Random programs: gradients across workers equal those in one process. `make graphs` runs 2,000 programs."""

import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.autograd.backward_pass import BackwardPass
from gradwire.autograd.engine import PassCoordinator
from gradwire.autograd.extension import Autograd
from gradwire.autograd.gradient_sender import AnsweringSender
from gradwire.autograd.graph import MAX_HEADER_SENDS, Graph, SendId, start_node
from gradwire.rpc.contracts.agent import current_agent

from tests.autograd.program_runs import Distributed, gradients_in_one_process, roots, run_body
from tests.autograd.programs import Program, generate
from tests.autograd.test_modes import send_at_most
from tests.remote_functions import assert_clean

PROGRAMS = int(os.environ.get("GRADWIRE_GRAPHS", "80"))
HALF = PROGRAMS // 2
TIMEOUT_S = max(120, PROGRAMS // 8)
"""Seconds that a test may take before it fails, and the stacks of all workers are printed."""

MAX_CONCURRENT = 3
TOLERANCE = 1e-9


class Watch:
    """Observes the backward passes of one context on one worker. A process has one for each context."""

    of_context: dict[int, "Watch"] = {}  # noqa: RUF012 - shared by the process

    def __init__(self, context_id: int, starts: Iterable[torch.Tensor] = ()) -> None:
        """Counts the runs of each node that gets a gradient from the context's gates or from other starts."""
        self.sent: list[SendId] = []
        self.arrived: list[int] = []
        self.runs: Counter[Any] = Counter()
        self.starts = [start_node(tensor) for tensor in starts]
        context = current_agent().extension(Autograd).contexts.find(context_id)
        self.gates = {number: gate.grad_fn for number, gate in context._gates.items()} if context else {}
        for node in Graph([*self.starts, *self.gates.values()]).nodes:
            node.register_hook(self._count(node))
        Watch.of_context[context_id] = self

    def _count(self, node: Any) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.runs[node] += 1

        return hook

    def receives_above(self) -> tuple[dict[int, list[SendId]], list[SendId]]:
        """Returns the received messages that each sent message depends on, and those that the other starts do."""
        above = {number: _received(Graph([gate])) for number, gate in self.gates.items()}
        return above, _received(Graph(self.starts))

    def wrong_runs(self, taking_part: Iterable[int], passes: int) -> list[str]:
        """Returns the nodes that did not run once in each pass, or ran without taking part.

        Gates, and the nodes of leaves, need not run.
        """
        if current_agent().extension(Autograd).engine.one_root_at_a_time:
            return []
        graph = Graph([*self.starts, *(self.gates[number] for number in taking_part)])
        gates = set(self.gates.values())
        expected = dict.fromkeys(graph.nodes - set(graph.leaves) - gates, passes)
        wrong = [
            f"{node} ran {self.runs[node]} times, not {expected.get(node, 0)}"
            for node in self.runs.keys() | expected.keys()
            if self.runs[node] != expected.get(node, 0) and node not in graph.leaves and node not in gates
        ]
        return wrong + [f"{gate} ran {self.runs[gate]} times" for gate in gates if self.runs[gate] > passes]


def _received(graph: Any) -> list[SendId]:
    return [(node.sender, node.message_id) for node in graph.receives]


def trace_messages() -> None:
    """Has the watches of this process record which gradients are sent and received."""
    arrive = BackwardPass.set_gradients

    def trace_sends(kind: Any) -> None:
        send = kind.send

        def traced_send(self: Any, message: SendId, gradients: Any, **others: Any) -> None:
            context_id = self._context.id if kind is PassCoordinator else self._context_id
            Watch.of_context[context_id].sent.append(message)
            send(self, message, gradients, **others)

        kind.send = traced_send

    def traced_arrive(running: BackwardPass, message_id: int, gradients: Any) -> None:
        Watch.of_context[running._context_id].arrived.append(message_id)
        arrive(running, message_id, gradients)

    BackwardPass.set_gradients = traced_arrive
    trace_sends(PassCoordinator)
    trace_sends(AnsweringSender)


def run_one_root_at_a_time() -> None:
    current_agent().extension(Autograd).engine.one_root_at_a_time = True


def watch(context_id: int) -> tuple[dict[int, list[SendId]], list[SendId]]:
    return Watch(context_id).receives_above()


def outcome(seed: int, context_id: int, taking_part: list[int], passes: int) -> tuple[Any, ...]:
    """Returns this worker's gradients and what its watch recorded. Forgets the program."""
    seen = Watch.of_context.pop(context_id)
    context = current_agent().extension(Autograd).contexts.find(context_id)
    found = context.gradients.get() if context else {}
    leaves = Distributed(seed, current_agent().info.id).leaves().all()
    del Distributed.of_program[seed]
    assert all(leaf.grad is None for leaf in leaves)
    return [found.get(leaf) for leaf in leaves], seen.sent, seen.arrived, seen.wrong_runs(taking_part, passes)


def ancestors(starts: Iterable[SendId], above: dict[SendId, list[SendId]]) -> set[SendId]:
    found: set[SendId] = set()
    stack = list(starts)
    while stack:
        message = stack.pop()
        if message not in found:
            found.add(message)
            stack.extend(above[message])
    return found


def check(program: Program) -> int:
    """Runs a program on worker 0 and compares; returns the number of messages that took part."""
    choice = random.Random(program.seed)
    passes = choice.choice([1, 1, 2])
    expected = gradients_in_one_process(program)
    with autograd.context() as context_id:
        result = run_body(Distributed(program.seed, 0), program.main, [])
        losses = roots(result, program.main.container)
        above: dict[SendId, list[SendId]] = {}
        of_roots: list[SendId] = []
        for worker in range(program.workers):
            if worker:
                of_sends, _ = rpc.rpc_sync(f"worker{worker}", watch, (context_id,))
            else:
                of_sends, of_roots = Watch(context_id, losses).receives_above()
            above |= {(worker, number): received for number, received in of_sends.items()}
        taking_part = ancestors(of_roots, above)
        # A call by `remote` whose value nobody fetches may still be sending messages that take no part.
        settled = "how='remote'" not in repr(program)
        mode = "fast" if settled and taking_part == above.keys() else "smart"
        for number in range(passes if losses else 0):
            autograd.backward(context_id, losses, retain_graph=number < passes - 1, mode=mode, timeout=60)
        all_sent: Counter[SendId] = Counter()
        arrived: Counter[SendId] = Counter()
        for worker in range(program.workers):
            mine = [number for sender, number in taking_part if sender == worker]
            value = (program.seed, context_id, mine, passes if losses else 0)
            gradients, sent, received, wrong = rpc.rpc_sync(f"worker{worker}", outcome, value)
            assert not wrong, wrong
            all_sent.update(sent)
            arrived.update((worker, number) for number in received)
            for index, (found, wanted) in enumerate(zip(gradients, expected[worker], strict=True)):
                compare(found, wanted, passes, f"leaf {index} of worker {worker}")
    assert all_sent == arrived == Counter(dict.fromkeys(taking_part, passes))
    return len(taking_part)


def compare(found: torch.Tensor | None, wanted: torch.Tensor | None, passes: int, what: str) -> None:
    """Unused tensors of a message take part in a pass with no gradient, so leaves above may get zeros."""
    if wanted is None:
        assert found is None or not found.to_dense().any(), f"{what}: {found}, not None"
        return
    assert found is not None or not wanted.to_dense().any(), f"{what}: None, not {wanted}"
    if found is not None:
        assert found.is_sparse == wanted.is_sparse, what
        difference = (found.to_dense() - passes * wanted.to_dense()).abs()
        assert (difference <= TOLERANCE * (1 + wanted.to_dense().abs())).all(), f"{what}: {found}, not {wanted}"


def check_many(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()

    def one(seed: int) -> None:
        program = generate(seed)
        try:
            messages = check(program)
        except Exception as error:
            error.add_note(f"program {seed}: {program}")
            traceback.print_exception(error)  # at once, for other programs may have to fail before it is raised
            raise
        counts.update(programs=1, messages=messages)

    with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
        list(pool.map(one, seeds))
    return counts


@pytest.mark.timeout(TIMEOUT_S)
def test_random_programs_one_root_at_a_time(workers):
    """As for graphs on several devices; the gradients of each message are still sent once."""
    started = workers.rpc(5, num_worker_threads=4)
    workers.each(started, trace_messages)
    workers.each(started, run_one_root_at_a_time)
    counts = started[0].start(check_many, range(HALF)).result(TIMEOUT_S - 10)
    assert counts["programs"] == HALF
    workers.each(started, assert_clean)


@pytest.mark.parametrize(("largest", "seeds"), [(MAX_HEADER_SENDS, range(HALF)), (2, range(HALF, 2 * HALF))])
@pytest.mark.timeout(TIMEOUT_S)
def test_random_programs(workers, capsys, largest, seeds):
    """Each node runs once in each pass, the gradients of each message are sent once, and all are right.

    In the second half most closures are omitted from the headers, so that workers have to ask for them.
    """
    started = workers.rpc(5, num_worker_threads=4)
    workers.each(started, trace_messages)
    workers.each(started, send_at_most, largest)
    began = time.monotonic()
    counts = started[0].start(check_many, seeds).result(TIMEOUT_S - 10)
    with capsys.disabled():
        seconds = time.monotonic() - began
        print(f"\n{dict(counts)}, {counts['programs'] / seconds:.0f} programs/s")
    assert counts["programs"] == len(seeds)
    assert counts["messages"] > 5 * len(seeds)
    workers.each(started, assert_clean)
