"""Workers that die or arrive late in all_gathers through a process group."""

import os
import random
import signal
import threading
import time

import pytest
import torch
from gradwire import rpc
from gradwire.c10d import group_membership
from gradwire.c10d.engines.gloo.engine import GlooEngine
from gradwire.errors import RpcTimeoutError
from gradwire.rpc.collectives import all_gather_group
from gradwire.rpc.collectives.all_gather_group import AllGatherGroup
from gradwire.rpc.contracts.agent import current_agent

from tests import remote_functions
from tests.remote_functions import wait_until
from tests.rpc.all_gathers import AT_ONCE, fail_once, form, grouped, groups, rounds, same, went_through_group
from tests.stopped import has_stopped


def die_once(when: str) -> None:
    """Has this worker die in the next round through a group."""
    exchange = all_gather_group._exchange

    def dying(*args: object) -> None:
        if when == "after":
            exchange(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    all_gather_group._exchange = dying


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_member_fails_to_get_the_result_of_the_group(workers, who, when):
    started = grouped(workers, 4)
    started[who].run(fail_once, when)
    expected = [dict.fromkeys([worker.name for worker in started], number) for number in range(4)]
    assert workers.each(started, rounds, 4) == [expected] * 4
    workers.each(started, form)  # another group
    assert workers.each(started, groups) == [1] * 4


def test_members_with_the_result_need_not_call_again(workers):
    """The others get the result from them."""
    started = grouped(workers, 4)
    started[0].run(fail_once, "after")
    assert workers.each(started, rounds, 1) == [[dict.fromkeys([worker.name for worker in started], 0)]] * 4
    workers.each(started, rpc.shutdown)


@pytest.mark.parametrize("victims", [{0}, {3}, {0, 1}, {0, 2, 3}])
@pytest.mark.parametrize("when", ["before", "after"])
def test_members_die_in_the_same_round(workers, victims, when):
    started = grouped(workers, 5)
    for victim in victims:
        started[victim].run(die_once, when)
    survivors = [worker for rank, worker in enumerate(started) if rank not in victims]
    survivors[-1].run(fail_once, "after")
    for victim in victims:
        started[victim].start(rounds, 5)
    first, *others = workers.each(survivors, rounds, 5)
    assert others == [first] * len(others)
    alive = {worker.name for worker in survivors}
    assert alive <= first[0].keys()
    for number, gathered in enumerate(first):
        assert set(gathered.values()) == {number}
        assert number == 0 or gathered.keys() == alive
    if len(survivors) > 1:
        names = sorted(alive)
        workers.each(survivors, form, names)  # a group of their own


@pytest.mark.parametrize("seed", range(int(os.environ.get("GRADWIRE_ALL_GATHERS", "3"))))
def test_members_die_and_arrive_late_at_random(workers, seed):
    """In any case, the living members get the same values in the same rounds."""
    chance = random.Random(seed)
    started = workers.rpc(5, all_gather=rpc.AllGatherOptions(after=chance.choice([1, 3])))
    victims = chance.sample(range(5), chance.choice([1, 2, 3]))
    deaths = {victim: chance.uniform(0.1, 0.7) for victim in victims}
    late = {rank: [chance.random() for _ in range(6)] for rank in range(5)}

    def live(seconds: float | None, late: list[float], seed: int) -> list[dict[str, object]]:
        chance = random.Random(seed)
        if seconds is not None:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        failing = threading.Timer(late[0] * 0.5, fail_once, ("after",))
        failing.start()
        begun = time.monotonic()
        seen = []
        number = 0
        me = current_agent().info.name
        while True:
            goes_on = time.monotonic() - begun < 1.5 or seconds is not None
            if chance.random() < 0.01:
                time.sleep(late[number % 6] / 100)
            gathered = rpc.all_gather((number, goes_on, bytes(chance.choice([0, 10, 9000]))), timeout=30)
            assert gathered[me][0] == number
            seen.append({name: (n, on, len(rest)) for name, (n, on, rest) in gathered.items()})
            number += 1
            if not any(on for _, on, _ in gathered.values()):
                failing.join()
                return seen

    pending = [worker.start(live, deaths.get(rank), late[rank], rank) for rank, worker in enumerate(started)]
    results = [pending[rank].result() for rank in range(5) if rank not in victims]
    for result in results[1:]:
        assert result == results[0]
    before = set(results[0][0])
    for number, gathered in enumerate(results[0]):
        assert {n for n, _, _ in gathered.values()} == {number}
        assert gathered.keys() <= before  # no member comes back
        before = set(gathered)
    assert before == {f"worker{rank}" for rank in range(5) if rank not in victims}


def hurry_in_groups() -> None:
    """Has this worker wait for others in a group for a tenth of what it is given, which it keeps."""
    gather = AllGatherGroup.all_gather

    def hurried(group: AllGatherGroup, number: int, value: object, seconds: float) -> object:
        remote_functions.kept.append(seconds)
        return gather(group, number, value, seconds / 10)

    AllGatherGroup.all_gather = hurried


def test_a_member_that_arrives_after_half_of_the_timeout(workers):
    a, b, c = grouped(workers, 3)
    workers.each([a, b], hurry_in_groups)
    pending = [worker.start(rounds, 3, 30.0) for worker in (a, b)]

    def arrive_late() -> list[dict[str, int]]:
        # The others have abandoned the group, and wait by messages.
        wait_until(lambda: rpc.rpc_sync("worker0", groups) == rpc.rpc_sync("worker1", groups) == 0)
        return rounds(3, 30.0)

    expected = [{"worker0": number, "worker1": number, "worker2": number} for number in range(3)]
    assert c.run(arrive_late) == expected
    assert [p.result() for p in pending] == [expected] * 2
    assert 10 < a.run(lambda: remote_functions.kept[0]) <= 15


def test_a_timeout_names_the_missing_member(workers):
    a, b, c = grouped(workers, 3)
    workers.each([a, b], hurry_in_groups)

    def time_out() -> None:
        with pytest.raises(RpcTimeoutError, match="all_gather waits for 'worker2'") as caught:
            rpc.all_gather("in time", timeout=4.0)
        assert caught.value.seconds == 4.0
        assert caught.value.worker == "worker2"

    workers.each([a, b], time_out)
    assert c.run(rpc.all_gather, "late") == {"worker0": "in time", "worker1": "in time", "worker2": "late"}
    expected = [{"worker0": number, "worker1": number, "worker2": number} for number in range(3)]
    assert workers.each([a, b, c], rounds, 3) == [expected] * 3


def test_a_member_that_hangs_after_the_others_have_its_value(workers):
    a, b, c = grouped(workers, 3)

    def stop_after_posting() -> None:
        exchange = all_gather_group._exchange

        def stopping(engine: object, outputs: object, *args: object) -> None:
            slots = engine._slots
            post = slots.post_filled

            def post_and_stop() -> None:
                post()
                slots.post_filled = post
                all_gather_group._exchange = exchange
                os.kill(os.getpid(), signal.SIGSTOP)

            slots.post_filled = post_and_stop
            exchange(engine, outputs, *args)

        all_gather_group._exchange = stopping

    c.run(stop_after_posting)
    pending = c.start(rounds, 2)
    assert workers.each([a, b], rounds, 1) == [[dict.fromkeys(["worker0", "worker1", "worker2"], 0)]] * 2
    wait_until(lambda: has_stopped(c.pid))  # else it would stop after it was to go on
    os.kill(c.pid, signal.SIGCONT)
    workers.each([a, b], rpc.all_gather, 1)
    assert pending.result()[0] == dict.fromkeys(["worker0", "worker1", "worker2"], 0)


def use_gloo() -> None:
    group_membership.best_engine = GlooEngine


@pytest.mark.parametrize("victim", [0, 3])
def test_workers_on_several_hosts(workers, victim):
    """They use Gloo; here it is forced on workers of one host."""
    started = workers.rpc(4, all_gather=AT_ONCE)
    workers.each(started, use_gloo)
    workers.each(started, form)

    def gather() -> None:
        for size in (0, 10, 100_000):
            value = (bytes(size), torch.ones(size))
            gathered = rpc.all_gather(value)
            assert went_through_group()
            assert same(gathered, {f"worker{rank}": value for rank in range(4)})

    workers.each(started, gather)
    started[victim].run(die_once, "after")
    survivors = [worker for rank, worker in enumerate(started) if rank != victim]
    started[victim].start(rounds, 5)
    first, *others = workers.each(survivors, rounds, 5)
    assert others == [first] * 2
    assert [set(gathered.values()) for gathered in first] == [{number} for number in range(5)]
    assert first[-1].keys() == {worker.name for worker in survivors}
    workers.each(survivors, rpc.shutdown)
