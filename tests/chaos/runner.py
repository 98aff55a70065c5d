"""Workers under load while everything fails: `make chaos`, or `python -m tests.chaos --seed 7 --minutes 2`.

Six workers on three simulated hosts, and a store process on a fourth, call each other, pass references on, stream,
run backward passes and collectives. Meanwhile faults begin and are healed, in a sequence that depends on the seed
alone, or, with `--every`, one after another. In the end every call must have had one outcome, the right one, and
nothing may be left of any of it.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.chaos import faults, member, report
from tests.chaos.cluster import Cluster
from tests.chaos.judgement import Verdict, compare_gathers, find_leaks
from tests.chaos.plan import KINDS, Fault, make_plan, make_regular_plan
from tests.chaos.records import judge, read_lines
from tests.chaos.samples import Samples
from tests.hosts import why_unavailable
from tests.workers import WorkerDiedError, Workers

__all__ = ["main", "run"]

HOSTS = 3
DEFAULT_WORKERS = 6

DEFAULT_MINUTES = 10.0
MAX_MINUTES = 12.0
"""Of faults; with what comes before and after, a run takes three minutes more at most."""

TICK_S = 0.1

JOIN_S = 150.0
CONVERGE_S = 15.0
STOP_S = 100.0
CLEAN_S = 40.0
"""Seconds that the phases of a run may take: until all have joined, until each reaches all others after the last
fault (for each worker), until all operations have ended, and until nothing is left of them."""

WARM_UP = 120
"""Operations of each worker before the first fault: as many with each other one."""

AGAIN = 5
"""Operations with each other worker that have to succeed after the last fault."""


class Stuck(Exception):
    """A phase of the run did not end in time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the suite as the command line says. Returns the exit code: 1 if anything was lost, doubled, or left."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="decides about the faults; random by default")
    parser.add_argument("--minutes", type=float, default=DEFAULT_MINUTES, help="of faults (default %(default)g)")
    parser.add_argument("--faults", default="", metavar="A,B", help=f"by default all: {', '.join(KINDS)}")
    parser.add_argument(
        "--workers", type=int, default=DEFAULT_WORKERS, help="a multiple of 3 (default %(default)d)"
    )
    parser.add_argument("--every", type=float, default=0.0, metavar="S", help="seconds from one fault to the next")
    parser.add_argument("--spared", type=int, default=0, metavar="N", help="workers without faults, with --every")
    parser.add_argument("--group", choices=["static", "dynamic"], default="dynamic", help="(default %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the logs and records also if all is well")
    parser.add_argument("--plan", action="store_true", help="only show the faults")
    options = parser.parse_args(arguments)
    kinds = [kind for kind in options.faults.split(",") if kind]
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"there is no fault {', '.join(sorted(unknown))}: choose from {', '.join(KINDS)}")
    if not 0 < options.minutes <= MAX_MINUTES:
        parser.error(f"--minutes is {options.minutes:g}: give more than 0, and {MAX_MINUTES:g} at most")
    if options.workers < DEFAULT_WORKERS or options.workers % HOSTS:
        parser.error(f"--workers is {options.workers}: give a multiple of {HOSTS}, at least {DEFAULT_WORKERS}")
    if options.every < 0 or not 0 <= options.spared < options.workers or (options.spared and not options.every):
        parser.error("--every is at least 0, and with it --spared is less than --workers")
    if options.every and {KINDS[kind].scope for kind in kinds} != {"worker"}:
        parser.error("with --every, give --faults of workers")
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    seconds, per_host = options.minutes * 60, options.workers // HOSTS
    if options.every:
        plan = make_regular_plan(seed, seconds, options.every, range(options.spared, options.workers), kinds)
    else:
        plan = make_plan(seed, seconds, HOSTS, per_host, kinds)
    if options.plan:
        print(report.describe_plan(plan))
        return 0
    if reason := why_unavailable():
        print(reason)
        return 2
    print(f"{len(plan)} faults in {options.minutes:g} minutes, seed {seed}, a {options.group} group", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    verdict = run(folder, seed, plan, per_host, options.spared, is_static=options.group == "static")
    print(report.describe(plan, verdict), flush=True)
    if verdict.is_good and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"logs and records: {folder}")
    return 0 if verdict.is_good else 1


def run(folder: Path, seed: int, plan: Sequence[Fault], per_host: int, spared: int, *, is_static: bool) -> Verdict:
    """Runs a plan; returns what came of it.

    Args:
        folder: for logs and records.
        seed: of the load's choices.
        plan: the faults.
        per_host: the number of workers on each host.
        spared: how many workers, from the first on, have no faults.
        is_static: whether the group has a fixed size.
    """
    verdict = Verdict()
    with _cluster(folder, seed, per_host, is_static) as cluster:
        verdict.deaths = cluster.deaths
        samples = Samples(cluster.members[:spared])
        try:
            _run_phases(cluster, plan, samples, verdict)
        except Stuck as stuck:
            verdict.stuck = str(stuck)
            for each in cluster.members:
                if each.worker is not None:
                    (folder / f"{each.worker.name}.stacks").write_text(each.worker.describe())
        verdict.growth, verdict.thirds = samples.growth(), samples.thirds()
    verdict.findings = judge(
        read_lines(sorted(cluster.records.glob("*.called"))), read_lines(sorted(cluster.records.glob("*.ran")))
    )
    verdict.gathers = compare_gathers(read_lines(sorted(cluster.records.glob("*.gathered"))))
    return verdict


@contextmanager
def _cluster(folder: Path, seed: int, per_host: int, is_static: bool) -> Iterator[Cluster]:
    workers = Workers(folder)
    try:
        cluster = Cluster(workers, folder, seed, HOSTS, per_host, is_static=is_static)
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        workers.stop()


def _run_phases(cluster: Cluster, plan: Sequence[Fault], samples: Samples, verdict: Verdict) -> None:
    shared_before = _shared_memory(cluster)
    cluster.start_store()
    _wait(cluster, JOIN_S, "all workers have joined", lambda: all(each.has_joined for each in cluster.members))
    _wait_for_successes(cluster, WARM_UP // len(cluster.members), "the load runs")
    cluster.on_all(member.connect, [each.name for each in cluster.members])
    before = _settle(cluster, verdict, {})
    cluster.on_all(member.resume)
    _do(cluster, plan, samples)
    _wait(cluster, JOIN_S, "all workers are back", lambda: all(each.has_joined for each in cluster.members))
    _wait_for_successes(cluster, AGAIN, "each worker reaches all others again")
    _settle(cluster, verdict, before)
    verdict.threads_left = [each for left in cluster.on_all(member.leave, seconds=JOIN_S) for each in left]
    names = [each.worker.name for each in cluster.members if each.worker is not None]
    verdict.left = [f"process {name}" for name in names if not _exits(cluster, name)]
    verdict.left += [f"/dev/shm: {name}" for name in _shared_memory(cluster) - shared_before]


def _do(cluster: Cluster, plan: Sequence[Fault], samples: Samples) -> None:
    """Does the faults and heals them, in the order of the plan, however busy the machine is."""
    began = time.monotonic()
    events = [(fault.start, 0, number, fault) for number, fault in enumerate(plan)]
    events += [(fault.end, 1, number, fault) for number, fault in enumerate(plan)]
    heals: dict[int, Callable[[], None]] = {}
    for due, is_end, number, fault in sorted(events, key=lambda event: event[:3]):
        while time.monotonic() - began < due:
            cluster.supervise()
            samples.take()
            time.sleep(TICK_S)
        print(
            f"{time.monotonic() - began:7.1f} s  {report.describe_fault(fault, is_end=bool(is_end))}", flush=True
        )
        if is_end:
            heals.pop(number)()
        else:
            heals[number] = faults.begin(cluster, fault)


def _wait(cluster: Cluster, seconds: float, what: str, condition: Callable[[], Any]) -> None:
    """Waits until a condition is true, and supervises meanwhile. Raises Stuck."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Stuck(f"not within {seconds:g} s: {what}")
        cluster.supervise()
        time.sleep(TICK_S)


def _wait_for_successes(cluster: Cluster, count: int, what: str) -> None:
    """Waits until each worker has done so many more operations with each other one."""
    names = {each.name for each in cluster.members}
    before: dict[str, Counter[str]] = {}
    missing: list[str] = []

    def are_there() -> bool:
        missing.clear()
        for each in cluster.members:
            if each.worker is None or not each.has_joined:
                missing.append(f"{each.name} is not there")
                continue
            try:
                done = each.worker.run(member.progress)
            except WorkerDiedError:  # it has learned just now that it was evicted: `supervise` knows
                missing.append(f"{each.name} has died")
                continue
            since = before.setdefault(each.worker.name, done)
            missing.extend(
                f"{each.worker.name} to {name}" for name in names - {each.name} if done[name] < since[name] + count
            )
            if since["all_gather"] == done["all_gather"] and each.number in cluster.collective_members:
                missing.append(f"{each.worker.name}: no all_gather")
        return not missing

    try:
        _wait(cluster, CONVERGE_S * len(names), what, are_there)
    except Stuck as stuck:
        raise Stuck(f"{stuck}: {', '.join(sorted(missing))}") from None


def _settle(cluster: Cluster, verdict: Verdict, before: dict[str, int]) -> dict[str, int]:
    """Stops the load, and waits until nothing is left of it.

    Returns:
        The most that any worker has, by kind.
    """
    cluster.on_all(member.stop)
    _wait(
        cluster,
        STOP_S,
        "all operations have ended",
        lambda: all(cluster.on_all(member.is_stopped, seconds=STOP_S)),
    )
    figures: list[member.Figures] = []
    verdict.leaks = ["?"]

    def is_clean() -> bool:
        figures[:] = cluster.on_all(member.measure)
        names = [each.worker.name for each in cluster.members if each.worker is not None]
        verdict.leaks = find_leaks(dict(zip(names, figures, strict=True)), before)
        return not verdict.leaks

    with suppress(Stuck):
        _wait(cluster, CLEAN_S, "nothing is left", is_clean)
    most: dict[str, int] = {}
    for each in figures:
        for kind, count in each.items():
            most[kind] = max(most.get(kind, 0), count)
    verdict.figures.append(most)
    return most


def _exits(cluster: Cluster, name: str) -> bool:
    each = next(each for each in cluster.members if each.worker is not None and each.worker.name == name)
    assert each.worker is not None
    each.worker.ask_to_exit()
    each.worker.process.join(30)
    return each.worker.process.exitcode == 0


def _shared_memory(cluster: Cluster) -> set[str]:
    """Returns the files in /dev/shm of all hosts."""
    found: set[str] = set()
    for number, (first, *_) in enumerate(cluster.net.hosts):
        found |= {f"host{number}/{path.name}" for path in Path(f"/proc/{first.pid}/root/dev/shm").iterdir()}
    return found
