"""What happens when: a sequence of faults that depends on the seed alone."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["KINDS", "Fault", "Kind", "make_plan", "make_regular_plan"]

Scope = Literal["worker", "host", "hosts", "store", "disk"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    scope: what it is done to.
    weight: how often it is chosen, in comparison with others.
    seconds: the shortest and the longest time until it is healed.
    text: what it is, in words.
    """

    scope: Scope
    weight: float
    seconds: tuple[float, float]
    text: str


KINDS = {
    "kill": Kind("worker", 4, (0.1, 2.0), "a worker is killed, and started again under its name"),
    "stop": Kind("worker", 2, (0.5, 2.0), "a worker is stopped, too shortly to be noticed"),
    "stop-suspect": Kind("worker", 2, (6.0, 8.0), "a worker is stopped until others suspect it"),
    "stop-lost": Kind("worker", 1, (20.0, 24.0), "a worker is stopped for longer than its lease"),
    "fds": Kind("worker", 1, (2.0, 5.0), "a worker can open no more file descriptors"),
    "memory": Kind("worker", 1, (1.0, 3.0), "a worker gets no more memory"),
    "unplug": Kind("host", 2, (4.0, 8.0), "a host is cut off"),
    "unplug-lost": Kind("host", 1, (20.0, 24.0), "a host is cut off for longer than a lease"),
    "flap": Kind("host", 1, (1.0, 3.0), "the link of a host goes down and up, ten times a second"),
    "delay": Kind("host", 1, (2.0, 6.0), "packets of a host take 100 ms longer"),
    "half-open": Kind(
        "host", 1, (4.0, 8.0), "a worker is killed while its host is cut off, so that nobody is told"
    ),
    "part": Kind("hosts", 2, (4.0, 8.0), "two hosts do not reach each other, while the third reaches both"),
    "one-way": Kind("hosts", 2, (4.0, 8.0), "packets from one host to another are lost, those back arrive"),
    "store-kill": Kind("store", 2, (0.5, 4.0), "the store process is killed, and started again with its log"),
    "store-stop": Kind("store", 1, (2.0, 6.0), "the store process is stopped"),
    "disk": Kind("disk", 2, (2.0, 6.0), "the disk of the store's log and of a FileStore is full"),
}

RECOVERY_S = 6.0
"""Seconds after a fault in which its target is left alone."""

AT_ONCE = 2
"""How many faults there are at a time."""

QUIET_S = 1.0
"""Seconds before the first fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    kind: its name in `KINDS`.
    start: when it begins, in seconds from the start of the run.
    seconds: how long it lasts.
    target: the number of the worker or host.
    other: of the second host, if the fault is between two.
    """

    kind: str
    start: float
    seconds: float
    target: int
    other: int = -1

    @property
    def end(self) -> float:
        """When it is healed, in seconds from the start of the run."""
        return self.start + self.seconds


def make_plan(
    seed: int, seconds: float, hosts: int, workers_per_host: int, kinds: Sequence[str] = ()
) -> list[Fault]:
    """Returns the faults of a run, in the order in which they begin.

    Args:
        seed: decides about all of it.
        seconds: by when all are healed.
        hosts: the number of hosts with workers.
        workers_per_host: the number of workers on each. Worker `n` is on host `n // workers_per_host`.
        kinds: names in `KINDS`; by default all.
    """
    rng = random.Random(seed)
    chosen = sorted(kinds or KINDS)
    busy_until: dict[tuple[str, int], float] = {}
    plan: list[Fault] = []
    now = QUIET_S
    while now < seconds:
        kind = rng.choices(chosen, [KINDS[name].weight for name in chosen])[0]
        target, other = _targets(rng, KINDS[kind].scope, hosts, workers_per_host)
        fault = Fault(kind, round(now, 2), round(rng.uniform(*KINDS[kind].seconds), 2), target, other)
        touched = list(_touched(fault, workers_per_host))
        is_free = all(busy_until.get(each, 0.0) <= fault.start for each in touched)
        if is_free and fault.end <= seconds and sum(each.end > now for each in plan) < AT_ONCE:
            busy_until.update(dict.fromkeys(touched, fault.end + RECOVERY_S))
            plan.append(fault)
            now += rng.uniform(0.5, 3.0)
        else:
            now += 0.25
    return plan


def make_regular_plan(
    seed: int, seconds: float, every: float, workers: Sequence[int], kinds: Sequence[str]
) -> list[Fault]:
    """Returns one fault each `every` seconds, of one worker after another, in an order that changes.

    Args:
        seed: decides about the order.
        seconds: by when all are healed.
        every: seconds from one to the next.
        workers: the numbers of those that are to fail.
        kinds: names in `KINDS`, of faults of a worker.
    """
    rng = random.Random(seed)
    plan: list[Fault] = []
    waiting: list[int] = []
    for number in range(1, int(seconds / every) + 1):
        if not waiting:
            waiting = rng.sample(workers, len(workers))
        kind = rng.choice(sorted(kinds))
        fault = Fault(kind, number * every, round(rng.uniform(*KINDS[kind].seconds), 2), waiting.pop())
        if fault.end <= seconds:
            plan.append(fault)
    return plan


def _targets(rng: random.Random, scope: Scope, hosts: int, workers_per_host: int) -> tuple[int, int]:
    if scope == "hosts":
        first, second = rng.sample(range(hosts), 2)
        return first, second
    number = {"worker": hosts * workers_per_host, "host": hosts}.get(scope, 1)
    return rng.randrange(number), -1


def _touched(fault: Fault, workers_per_host: int) -> Iterator[tuple[str, int]]:
    """Yields what no other fault may touch at the same time.

    Two workers of one host may have faults at a time, and so may a worker of one host and another host.
    """
    scope = KINDS[fault.kind].scope
    match scope:
        case "worker":
            yield "worker", fault.target
            if fault.seconds > RECOVERY_S:
                yield "host", fault.target // workers_per_host
        case "host" | "hosts":
            for host in (fault.target, fault.other):
                if host >= 0:
                    yield "host", host
        case _:
            yield scope, 0
    if fault.kind == "half-open":
        yield "worker", fault.target * workers_per_host
