"""Random programs on a simulated network: they make, pass on, fetch and drop references, fail and die.

The invariants are checked against what the simulation knows. When a value is freed on its owner, no worker may
hold a reference to it or be about to get one; every fetch must return the value; and when all references have been
dropped and nothing is left to happen, no worker may keep anything.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from gradwire import rpc
from gradwire.errors import (
    AnswerFailedError,
    Outcome,
    RpcCancelledError,
    RpcTimeoutError,
    RRefError,
    SendFailedError,
    WorkerLostError,
    WorkerSuspectError,
)
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.agent import current_agent, holder
from gradwire.rpc.contracts.messages import MessageType, Request
from gradwire.rpc.execution.futures import Future, error_of
from gradwire.rref.forks import References
from gradwire.rref.handles import OwnerHandle
from gradwire.rref.owner_table import GlobalId, name_needed

from tests.rref.chance import Chance
from tests.rref.simulation import Machine, World

MAX_ACTIONS = 60
"""Of one program."""


class RefusedToMakeError(Exception):
    """Raised by remote functions that fail."""


class Value:
    """The value of a reference. It may itself hold references."""

    def __init__(self, number: int, references: Sequence[rpc.RRef]) -> None:
        self.number = number
        self.references = references

    def check(self, number: int) -> int:
        return self.number


class Bomb:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return explode, ()


def explode() -> None:
    raise RefusedToMakeError("a bomb")


_current: "Schedule"
"""The running schedule, for remote functions."""


def make(number: int, references: Sequence[rpc.RRef]) -> Value:
    return _current.made(Value(number, references))


def fail_to_make(number: int, references: Sequence[rpc.RRef]) -> Value:
    raise RefusedToMakeError(number)


def receive(references: list[rpc.RRef], how: int) -> Any:
    """Keeps, drops, returns or passes on references."""
    machine = _current.here()
    if how % 2 == 0:
        machine.held.extend(references)
    if how in (2, 3):
        return references
    if how == 4:
        _current.call(machine, receive, (references, _current.world.chance.pick(4)))
    return None


def give(count: int) -> list[rpc.RRef]:
    return _current.some_held(_current.here(), count)


class Schedule(World):
    """One random program on one simulated network."""

    def __init__(self, size: int, chance: Chance) -> None:
        global _current
        _current = self
        super().__init__(size, chance)
        self.world = self
        self.errors: list[str] = []
        self.numbers: dict[GlobalId, int] = {}
        """The number of the value of each reference."""
        self.values: dict[int, weakref.ref[Value]] = {}
        self.doomed: set[int] = set()
        """The numbers of the values that need not be created."""
        self.requests: weakref.WeakKeyDictionary[Future, Machine] = weakref.WeakKeyDictionary()
        """The worker that made each call or fetch. Agents keep the futures of those in flight."""

    def run(self) -> None:
        """Runs the program; then drops all references and checks what is left."""
        for _ in range(MAX_ACTIONS):
            if not self.chance:
                break
            for _ in range(self.chance.pick(8)):
                self.step()
            machine = self.alive[self.chance.pick(len(self.alive))]
            machine.run(partial(self._act, machine))
            self._check()
        self.settle()
        self._fetch_everything()
        for machine in self.machines:
            machine.held.clear()
        self.settle()
        self.errors += self._left_over()
        self._check()

    def _check(self) -> None:
        assert not self.errors, self.errors

    # The actions of programs.

    def here(self) -> Machine:
        return self.machines[current_agent().info.id]

    def _act(self, machine: Machine) -> None:
        chance = self.chance
        what = chance.pick(24)
        if what in (0, 1, 2) or not machine.held:
            self._make(machine, fail_to_make if chance.happens(8) else make)
        elif what == 3:
            rref = rpc.RRef(self.made(Value(len(self.numbers), self.some_held(machine, chance.pick(2)))))
            self.numbers[identify(rref)] = len(self.numbers)
            machine.held.append(rref)
        elif what in (4, 5, 6, 7, 8):
            references = self.some_held(machine, 1 + chance.pick(3))
            extra = [Bomb()] if chance.happens(8) else []
            self.call(machine, receive, (references, chance.pick(5), *extra))
        elif what in (9, 10):
            self.call(machine, give, (1 + chance.pick(2),))
        elif what in (11, 12, 13):
            self.fetch(machine, machine.held[chance.pick(len(machine.held))], (0.0, 1.0, 60.0)[chance.pick(3)])
        elif what == 14:
            rref = machine.held[chance.pick(len(machine.held))]
            number = self.numbers[identify(rref)]
            if not failed(rref) and number in self.values:  # else the call would wait, and everything with it
                proxy = rref.rpc_async(timeout=(0.0, 1.0)[chance.pick(2)])
                self._watch(machine, proxy.check(number), number, 1.0)
        elif what == 15 and len(self.alive) > 2 and chance.happens(30):
            self.kill(self.alive[chance.pick(len(self.alive))])
            self.counts["killed"] += 1
        elif what == 16:
            self._cancel(machine)
        elif what == 17:
            self.break_connection(machine, self.machines[chance.pick(len(self.machines))])
        else:
            del machine.held[chance.pick(len(machine.held))]

    def _cancel(self, machine: Machine) -> None:
        mine = [request for request, sender in self.requests.items() if sender is machine and not request.done()]
        if mine:
            self.counts["cancelled"] += mine[self.chance.pick(len(mine))].cancel()

    def _make(self, machine: Machine, function: Any) -> None:
        number = len(self.numbers)
        owner = self.machines[self.chance.pick(len(self.machines))].info
        arguments: list[Any] = [number, self.some_held(machine, self.chance.pick(2))]
        if function is fail_to_make:
            self.doomed.add(number)
        if self.chance.happens(5):
            self.doomed.add(number)
            arguments.append(Bomb())
        timeout = (0.0, 1.0, 60.0)[self.chance.pick(3)]
        try:
            rref = rpc.remote(owner, function, tuple(arguments), timeout=timeout)
        except Exception as error:
            self._unless_one_failed(arguments[1], error)
            return
        self.numbers[identify(rref)] = number
        if failed(rref):
            self.doomed.add(number)
        else:
            is_owner = rref.is_owner()  # whose timeout is the value's too

            def done(creation: torch.futures.Future[Any]) -> None:
                error = error_of(creation)
                if error is not None and (is_owner or getattr(error, "outcome", None) is Outcome.NOT_SENT):
                    self.doomed.add(number)

            rref._handle.creation.add_done_callback(done)
        machine.held.append(rref)

    def some_held(self, machine: Machine, count: int) -> list[rpc.RRef]:
        usable = [rref for rref in machine.held if not failed(rref)]
        return [usable[self.chance.pick(len(usable))] for _ in range(count if usable else 0)]

    def call(self, machine: Machine, function: Any, arguments: tuple[Any, ...], to: Machine | None = None) -> None:
        """Calls a function on a worker, and keeps the references in the result."""
        target = (to or self.machines[self.chance.pick(len(self.machines))]).info
        try:
            with holder.using(machine.agent):
                future = rpc.rpc_async(target, function, arguments, timeout=(0.0, 1.0, 60.0)[self.chance.pick(3)])
        except Exception as error:
            self._unless_one_failed(arguments[0], error)
            return
        self.requests[future] = machine

        def done(future: torch.futures.Future[Any]) -> None:
            if error_of(future) is None and machine.alive:
                machine.held.extend(future.value() or [])

        future.add_done_callback(done)

    def fetch(self, machine: Machine, rref: rpc.RRef, timeout: float) -> None:
        """Does what `to_here` does, without waiting."""
        number = self.numbers[identify(rref)]
        if rref.is_owner():
            entry = rref._handle.entry
            if entry.future.done() and entry.future.exception() is None:
                self._expect(rref.to_here(), number)
        elif not failed(rref):
            handle = rref._handle
            future = handle.agent.request(
                handle.fork.owner,
                fetch_request(rref, timeout, keep=handle.keep_alive),
            )
            self._watch(machine, future, number, timeout)

    def _watch(self, machine: Machine, future: Future, number: int, timeout: float) -> None:
        self.counts["fetches"] += 1
        self.requests[future] = machine

        def done(future: torch.futures.Future[Any]) -> None:
            error = error_of(future)
            if error is None:
                self._expect(future.value(), number)
            elif self._cannot_be_sent(number):
                pass
            elif isinstance(error, RpcTimeoutError):
                self.counts["timeouts"] += 1
                if not timeout and number not in self.doomed:
                    self.errors.append(f"a fetch without a timeout timed out: {error}")
            elif isinstance(error, RRefError):
                if number not in self.doomed:
                    self._unless_somebody_died(error)
            elif isinstance(error, WorkerSuspectError):
                if not self.counts["broken"]:
                    self.errors.append(f"no connection broke: {error}")
            elif isinstance(error, WorkerLostError):
                if not self.killed:
                    self.errors.append(f"nobody died: {error}")
            elif (
                not isinstance(error, SendFailedError | AnswerFailedError | RpcCancelledError | ValueError)
                and number not in self.doomed
            ):
                self.errors.append(f"a fetch of {number}: {error!r}")

        future.add_done_callback(done)

    def _cannot_be_sent(self, number: int) -> bool:
        """Returns whether a value holds a reference that cannot be passed on, because its creation has failed."""
        value = self.values[number]() if number in self.values else None
        return value is not None and any(map(failed, value.references))

    def _expect(self, value: Any, number: int) -> None:
        found = value.number if isinstance(value, Value) else value
        if found != number:
            self.errors.append(f"a fetch of {number} gave {found}")
        self.counts["values fetched"] += 1

    def _unless_somebody_died(self, error: Exception) -> None:
        """Records an error, unless a worker died, with which references are lost that it has just passed on."""
        if not self.killed:
            self.errors.append(f"nobody died, but {error!r}")

    def _unless_one_failed(self, references: Any, error: Exception) -> None:
        """Records an error, unless a reference cannot be passed on because its creation has failed."""
        if not (isinstance(references, list | tuple) and any(map(failed, references))):
            self._unless_somebody_died(error)

    def dropped(self, envelope: agent_pb2.Envelope) -> None:
        if envelope.type == MessageType.RREF_CREATE:
            self.doomed.add(self.numbers[GlobalId.from_proto(envelope.created)])

    # Early deletes.

    def made(self, value: Value) -> Value:
        """Notes that a value has been created on its owner."""
        owner = self.here()
        self.values[value.number] = weakref.ref(value, lambda _: self._freed(owner, value_number))
        value_number = value.number
        return value

    def _freed(self, owner: Machine, number: int) -> None:
        """Checks that no worker has a reference to a value that is freed, or is about to get one."""
        if not owner.alive or number in self.doomed:
            return
        self.counts["values freed"] += 1
        for machine in self.alive:
            for rref in machine.held:
                if self.numbers[identify(rref)] == number and self._counts_for(rref):
                    self.errors.append(f"{number} was freed while {machine.info.name} held {rref!r}")
        if not self.killed:
            for envelope in self._envelopes():
                for reference in envelope.references:
                    if self.numbers[GlobalId.from_proto(reference)] == number:
                        self.errors.append(f"{number} was freed while a reference to it was in flight")

    def _counts_for(self, rref: rpc.RRef) -> bool:
        handle = rref._handle
        if isinstance(handle, OwnerHandle):
            return not self.killed and not failed(rref)
        return handle.fork.is_confirmed or (handle.fork.error is None and not self.killed)

    def _envelopes(self) -> list[agent_pb2.Envelope]:
        """Returns the envelopes that programs have yet to get, those that have arrived included."""
        waiting = [part for machine in self.alive for task in machine.tasks for part in task.args]
        unwanted = set(map(id, self.unwanted))
        return [
            *(flight.envelope for flight in self.flights),
            *(part for part in waiting if isinstance(part, agent_pb2.Envelope) and id(part) not in unwanted),
        ]

    # The end of the program.

    def _fetch_everything(self) -> None:
        for machine in self.alive:
            for rref in list(machine.held):
                before = self.counts["values fetched"]
                number = self.numbers[identify(rref)]
                machine.run(partial(self.fetch, machine, rref, 0.0))
                self.settle()
                if not (failed(rref) or number in self.doomed or self.killed or self._cannot_be_sent(number)):
                    fetched = self.counts["values fetched"] - before
                    if (
                        not fetched
                        and not self.counts["not sent"] + self.counts["refused"] + self.counts["broken"]
                    ):
                        self.errors.append(f"{machine.info.name} could not fetch {number} in the end")
        self._check()

    def _left_over(self) -> list[str]:
        found = []
        for machine in self.alive:
            agent = machine.agent
            references = agent.extension(References)
            counts: dict[str, int] = {
                **references.live_objects(),
                "entries": len(references.table._entries()),
                "control messages": agent.control.pending(),
                "pending requests": len(agent._caller.in_flight),
                "kept by requests": len(agent._caller.kept),
                "waiting threads": len(machine.waiting),
                "running calls": agent._calls.in_flight,
            }
            found += [f"{machine.info.name} still has {n} {what}" for what, n in counts.items() if n]
        return found


def identify(rref: rpc.RRef) -> GlobalId:
    return rref._handle.id


def fetch_request(rref: rpc.RRef, timeout: float, keep: object = None) -> Request:
    """Returns the request that `to_here` sends."""
    header = partial(name_needed, [identify(rref)])
    return Request(MessageType.RREF_FETCH, None, timeout=timeout, header=header, keep=keep)


def failed(rref: rpc.RRef) -> bool:
    """Returns whether the worker of a reference knows that it cannot be used."""
    handle = rref._handle
    if isinstance(handle, OwnerHandle):
        future = handle.entry.future
        known = future.exception() if future.done() else None
    else:
        known = handle.fork.error
    creation = handle.creation
    return known is not None or (creation is not None and creation.done() and error_of(creation) is not None)


def run_schedule(size: int, data: bytes) -> Counter[str]:
    """Runs one schedule; returns counts of what happened. Raises AssertionError if an invariant does not hold."""
    callbacks = gc.callbacks[:]
    try:
        schedule = Schedule(size, Chance(data))
        schedule.run()
        return schedule.counts
    finally:
        gc.callbacks[:] = callbacks  # each agent adds one until it shuts down, and these do not
