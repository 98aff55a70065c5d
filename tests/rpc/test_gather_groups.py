"""Gatherings that go through a process group of the workers."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gradwire import rpc
from gradwire.c10d import HashStore
from gradwire.c10d.engines.gloo import GlooEngine
from gradwire.errors import ProcessGroupError, RpcTimeoutError, SerializationError
from gradwire.rpc import gather_group, meeting
from gradwire.rpc.agent import current_agent
from gradwire.rpc.gather_paths import NO_PLAN, NO_STANDING, GatherPaths, Plan, Standing, make_plan

from tests.remote_functions import set_event, wait_for, wait_until

MIB = 2**20
AT_ONCE = rpc.GatheringOptions(after=1)
"""Groups form after the first gathering."""


def groups() -> int:
    return rpc.debug_info()["gather_groups"]


def went_through_group() -> bool:
    """Did the last gathering of all workers?"""
    finished = current_agent()._gatherings._finished
    return finished["user", tuple(range(len(current_agent().workers())))][1].flat


def form(names: list[str] | None = None) -> None:
    """Gathers until all have a group, and know that all have. All call it at once."""
    here = len(names or rpc.debug_info()["transports"])
    deadline = time.monotonic() + 30
    while sum(bool(count) for count in rpc.all_gather(groups_of(names), names).values()) < here:
        assert time.monotonic() < deadline, "no group has formed"


def groups_of(names: list[str] | None) -> bool:
    """Has the group of these workers come together?"""
    ids = tuple(sorted(rpc.get_worker_info(name).id for name in names or rpc.debug_info()["transports"]))
    return current_agent()._gatherings.paths.standing(ids).formed


def grouped(workers, count: int, **options) -> list:
    """Workers that have a group."""
    started = workers.rpc(count, gatherings=options.pop("gatherings", AT_ONCE), **options)
    workers.each(started, form)
    assert workers.each(started, groups) == [1] * count
    return started


def make_values(rank: int) -> dict[str, object]:
    torch.manual_seed(rank)
    whole = torch.randn(64, 64)
    return {
        "none": None,
        "text": "x" * (rank * 5000),
        "bytes": bytes(rank * 3 * MIB),
        "nested": {"rank": rank, "tuple": (1, [whole, whole])},
        "view": whole[rank:],
        "transposed": whole.t(),
        "empty": torch.empty(0, rank),
        "large": torch.randn(MIB if rank == 1 else 7),
        "half": whole.bfloat16(),
        "complex": torch.randn(5, dtype=torch.complex64).conj(),
        "sparse": torch.randn(5, 5).relu().to_sparse(),
        "leaf": torch.randn(3, requires_grad=True),
        "inner": torch.randn(3, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.randn(3), requires_grad=bool(rank % 2)),
        "array": np.arange(rank * 10),
        "class": rpc.WorkerInfo,
    }


def same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        about = [(t.dtype, t.shape, t.layout, t.requires_grad, t.is_leaf) for t in (one, other)]
        dense = [t.detach().to_dense() if t.is_sparse else t.detach() for t in (one, other)]
        return about[0] == about[1] and torch.equal(*dense)
    return one == other


def test_results_are_those_by_messages(workers):
    started = grouped(workers, 3)

    def compare() -> None:
        agent = current_agent()
        for name, value in make_values(agent.info.id).items():
            fast = rpc.all_gather(value)
            assert went_through_group(), name
            slow = agent.all_gather("test", value, agent.workers(), 30.0)
            assert list(fast) == ["worker0", "worker1", "worker2"]
            assert same(list(fast.values()), [slow[i] for i in range(3)]), name
        for _ in range(20):
            rpc.barrier()
            assert went_through_group()

    workers.each(started, compare)


def test_what_is_gathered_is_ones_own(workers):
    """Whatever a worker does with its result, others that ask it for the result get what was gathered."""
    a, b, c = grouped(workers, 3)
    b.run(fail_once, "after")

    def change() -> list[list[object]]:
        gathered = rpc.all_gather([torch.zeros(2), []], timeout=30)
        text = str(sorted(gathered.items()))
        for tensor, items in gathered.values():
            tensor += 1
            items.append(lambda: 0)
        return text

    first, *others = workers.each([a, b, c], change)
    assert others == [first] * 2


def test_who_could_not_send_its_value_is_still_in_the_same_round(workers):
    started = grouped(workers, 3)

    def fail_then_gather(fails: bool) -> dict[str, object]:
        if fails:
            with pytest.raises(SerializationError, match=r"the value\[1\]"):
                rpc.all_gather((1, lambda: 0))
        gathered = rpc.all_gather(current_agent().info.id)
        assert went_through_group()
        return gathered

    pending = [worker.start(fail_then_gather, worker is started[1]) for worker in started]
    assert [p.result() for p in pending] == [{"worker0": 0, "worker1": 1, "worker2": 2}] * 3


class Unreadable:
    """Cannot be unpickled on worker 2."""

    def __reduce__(self):
        return read, ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unreadable)


def read() -> Unreadable:
    if current_agent().info.id == 2:
        raise ValueError("not here")
    return Unreadable()


@pytest.mark.parametrize("through_group", [True, False])
def test_a_value_that_one_worker_cannot_read(workers, through_group):
    started = workers.rpc(3, gatherings=rpc.GatheringOptions(enabled=through_group, after=1))
    if through_group:
        workers.each(started, form)

    def gather() -> object:
        me = current_agent().info.id
        value = Unreadable() if me == 1 else me
        if me == 2:
            with pytest.raises(ValueError, match="not here"):
                rpc.all_gather(value)
        else:
            assert rpc.all_gather(value) == {"worker0": 0, "worker1": Unreadable(), "worker2": 2}
        return rpc.all_gather(me)

    assert workers.each(started, gather) == [{"worker0": 0, "worker1": 1, "worker2": 2}] * 3


def test_a_value_that_must_go_by_messages(workers):
    started = grouped(workers, 3)

    def gather() -> list[bool]:
        agent = current_agent()
        if agent.info.id == 1:
            flatten, values = agent._messaging.flatten, iter([False, True, False])
            agent._messaging.flatten = lambda *args: None if next(values) else flatten(*args)
        went = []
        for number in range(3):
            value = number * "x"
            assert rpc.all_gather(value) == dict.fromkeys(["worker0", "worker1", "worker2"], value)
            went.append(went_through_group())
        return went

    assert workers.each(started, gather) == [[True, False, True]] * 3
    assert workers.each(started, groups) == [1] * 3


# Faults.


def fail_once(when: str) -> None:
    """Has this worker not get the next result, although the others may."""
    exchange = gather_group._exchange

    def failing(*args: object) -> None:
        gather_group._exchange = exchange
        if when == "after":
            exchange(*args)
        raise ProcessGroupError("on purpose")

    gather_group._exchange = failing


def die_once(when: str) -> None:
    """Has this worker die in the next round."""
    exchange = gather_group._exchange

    def dying(*args: object) -> None:
        if when == "after":
            exchange(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    gather_group._exchange = dying


def rounds(count: int, timeout: float = 30) -> list[dict[str, int]]:
    return [rpc.all_gather(number, timeout=timeout) for number in range(count)]


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_does_not_get_what_the_others_may_have(workers, who, when):
    started = grouped(workers, 4)
    started[who].run(fail_once, when)
    expected = [dict.fromkeys([worker.name for worker in started], number) for number in range(4)]
    assert workers.each(started, rounds, 4) == [expected] * 4
    workers.each(started, form)  # another group
    assert workers.each(started, groups) == [1] * 4


def test_who_has_the_result_need_not_come_again(workers):
    """The others get it from those who have it, although these gather no more."""
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


@pytest.mark.parametrize("seed", range(int(os.environ.get("GRADWIRE_GATHERINGS", "3"))))
def test_members_die_and_are_late_at_random(workers, seed):
    """Whatever happens, those that live get the same values in the same rounds."""
    chance = random.Random(seed)
    started = workers.rpc(5, gatherings=rpc.GatheringOptions(after=chance.choice([1, 3])))
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
            on = time.monotonic() - begun < 1.5 or seconds is not None
            if chance.random() < 0.01:
                time.sleep(late[number % 6] / 100)
            gathered = rpc.all_gather((number, on, bytes(chance.choice([0, 10, 9000]))), timeout=30)
            assert gathered[me][0] == number
            seen.append({name: (n, on, len(more)) for name, (n, on, more) in gathered.items()})
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
        assert gathered.keys() <= before  # nobody comes back
        before = set(gathered)
    assert before == {f"worker{rank}" for rank in range(5) if rank not in victims}


def test_a_member_that_comes_later_than_half_of_the_timeout(workers):
    a, b, c = grouped(workers, 3)
    pending = [worker.start(rounds, 3, 6.0) for worker in (a, b)]

    def come_late() -> list[dict[str, int]]:
        # The others have given the group up, and wait by messages.
        wait_until(lambda: rpc.rpc_sync("worker0", groups) == rpc.rpc_sync("worker1", groups) == 0)
        return rounds(3, 6.0)

    expected = [{"worker0": number, "worker1": number, "worker2": number} for number in range(3)]
    assert c.run(come_late) == expected
    assert [p.result() for p in pending] == [expected] * 2


def test_a_timeout_says_who_is_missing(workers):
    a, b, c = grouped(workers, 3)

    def time_out() -> None:
        with pytest.raises(RpcTimeoutError, match="which awaits 'worker2'") as caught:
            rpc.all_gather("in time", timeout=1.0)
        assert caught.value.seconds == 1.0
        assert caught.value.worker == "worker2"

    workers.each([a, b], time_out)
    assert c.run(rpc.all_gather, "late") == {"worker0": "in time", "worker1": "in time", "worker2": "late"}
    expected = [{"worker0": number, "worker1": number, "worker2": number} for number in range(3)]
    assert workers.each([a, b, c], rounds, 3) == [expected] * 3


def test_a_member_that_stands_still_when_the_others_have_its_value(workers):
    a, b, c = grouped(workers, 3)

    def stop_after_showing() -> None:
        exchange = gather_group._exchange

        def stopping(engine: object, outputs: object, *args: object) -> None:
            board = engine._board
            post = board.post

            def post_and_stop() -> None:
                post()
                board.post = post
                gather_group._exchange = exchange
                os.kill(os.getpid(), signal.SIGSTOP)

            board.post = post_and_stop
            exchange(engine, outputs, *args)

        gather_group._exchange = stopping

    c.run(stop_after_showing)
    pending = c.start(rounds, 2)
    assert workers.each([a, b], rounds, 1) == [[dict.fromkeys(["worker0", "worker1", "worker2"], 0)]] * 2
    os.kill(c.pid, signal.SIGCONT)
    workers.each([a, b], rpc.all_gather, 1)
    assert pending.result()[0] == dict.fromkeys(["worker0", "worker1", "worker2"], 0)


def use_gloo() -> None:
    meeting.best_engine = GlooEngine


@pytest.mark.parametrize("victim", [0, 3])
def test_workers_on_several_hosts(workers, victim):
    """They use Gloo; here, without need."""
    started = workers.rpc(4, gatherings=AT_ONCE)
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


# Several sets, several threads.


def test_threads_gather_on_different_sets(workers):
    started = workers.rpc(4, gatherings=AT_ONCE)
    sets = [
        ["worker0", "worker1", "worker2", "worker3"],
        ["worker0", "worker1"],
        ["worker1", "worker2", "worker3"],
    ]

    def gather_on(names: list[str], problems: list[Exception]) -> None:
        try:
            form(names)
            for number in range(100):
                value = (number, names, bytes(number * 100))
                assert rpc.all_gather(value, names) == dict.fromkeys(names, value)
        except Exception as error:
            problems.append(error)

    def gather() -> int:
        problems: list[Exception] = []
        mine = [names for names in sets if current_agent().info.name in names]
        threads = [threading.Thread(target=gather_on, args=(names, problems)) for names in mine]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        return groups()

    assert workers.each(started, gather) == [2, 3, 2, 2]
    workers.each(started, rpc.shutdown)


def test_threads_gather_on_the_same_set(workers):
    """They take turns, and all get the same."""
    started = grouped(workers, 3)

    def gather() -> list[str]:
        results: list[str] = []

        def gather_some(thread: int) -> None:
            for number in range(15):
                gathered = rpc.all_gather((current_agent().info.id, thread, number), timeout=30)
                results.append(str(sorted(gathered.items())))

        threads = [threading.Thread(target=gather_some, args=(thread,)) for thread in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(results)

    first, *others = workers.each(started, gather)
    assert len(first) == 45
    assert others == [first] * 2
    assert workers.each(started, groups) == [1] * 3


def test_a_thread_that_waits_for_its_turn_times_out(workers):
    a, b = workers.rpc(2)

    def gather() -> tuple[dict[str, object], dict[str, object]]:
        results: list[dict[str, object]] = []
        first = threading.Thread(target=lambda: results.append(rpc.all_gather(1)))
        first.start()
        wait_until(lambda: current_agent()._gatherings._rounds)
        with pytest.raises(RpcTimeoutError, match="an earlier round of the same workers is not over on 'worker0'"):
            rpc.all_gather(2, timeout=0.1)
        rpc.rpc_sync("worker1", set_event, ("go",))
        first.join()
        return results[0], rpc.all_gather(3)

    def wait_and_gather() -> tuple[dict[str, object], dict[str, object]]:
        wait_for("go")
        return rpc.all_gather("one"), rpc.all_gather("three")

    pending = [a.start(gather), b.start(wait_and_gather)]
    expected = {"worker0": 1, "worker1": "one"}, {"worker0": 3, "worker1": "three"}
    assert [p.result() for p in pending] == [expected] * 2


def test_groups_that_are_not_used_are_given_up(workers):
    started = workers.rpc(3, gatherings=rpc.GatheringOptions(after=1, max_groups=1))
    pairs = [["worker0", "worker1"], ["worker1", "worker2"], ["worker0", "worker2"]]

    def gather() -> None:
        for _ in range(2):
            for names in pairs:
                if current_agent().info.name in names:
                    form(names)
                    assert rpc.all_gather(1, names) == dict.fromkeys(names, 1)
                    assert groups() == 1
        rpc.barrier()

    workers.each(started, gather)
    workers.each(started, rpc.shutdown)


# Where there are no groups.


def test_few_gatherings_do_not_make_a_group(workers):
    started = workers.rpc(2, gatherings=rpc.GatheringOptions(after=5))

    def gather() -> None:
        for _ in range(4):
            rpc.barrier()
        assert not gather_threads()
        assert groups() == 0

    workers.each(started, gather)
    workers.each(started, form)
    workers.each(started, rpc.shutdown)


def gather_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "gather-" in thread.name]


def mappings() -> list[str]:
    """Memory that this process shares with others of a group."""
    with open("/proc/self/maps") as file:
        return [line for line in file if "gradwire" in line and "memfd" in line]


def test_shutdown_gives_everything_back(workers):
    started = grouped(workers, 3)
    assert all(workers.each(started, mappings))
    workers.each(started, rpc.shutdown)
    for worker in started:
        assert worker.run(gather_threads) == []
        assert worker.run(mappings) == []
    assert not [name for name in os.listdir("/dev/shm") if "gradwire" in name]


def test_shutdown_while_a_group_forms(workers):
    started = workers.rpc(3, gatherings=AT_ONCE)

    def gather_and_leave() -> list[str]:
        rpc.barrier()
        rpc.shutdown()
        return gather_threads()

    assert workers.each(started, gather_and_leave) == [[]] * 3


def test_one_leaves_without_a_word(workers):
    a, b, c = grouped(workers, 3)
    pending = [worker.start(rounds, 2) for worker in (a, b)]
    c.run(rpc.shutdown, graceful=False)
    expected = [{"worker0": number, "worker1": number} for number in range(2)]
    assert [p.result() for p in pending] == [expected] * 2


tries: list[object] = []


def no_engine(setup: object) -> None:
    tries.append(setup)
    raise RuntimeError("there is no memory to share")


def count_tries() -> int:
    return len(tries)


@pytest.mark.parametrize("who", [0, 2])
def test_workers_that_cannot_form_a_group(workers, who):
    started = workers.rpc(3, gatherings=AT_ONCE)

    def break_engine() -> None:
        meeting.PATIENCE = 0.3
        if current_agent().info.id == who:
            meeting.best_engine = no_engine

    workers.each(started, break_engine)
    expected = [{"worker0": number, "worker1": number, "worker2": number} for number in range(30)]
    assert workers.each(started, rounds, 30) == [expected] * 3
    for worker in started:
        worker.run(lambda: wait_until(lambda: not gather_threads()))
    assert workers.each(started, rounds, 30) == [expected] * 3
    assert started[who].run(count_tries) == 1
    workers.each(started, rpc.shutdown)


def test_switched_off_and_dynamic(workers, tmp_path):
    started = workers(3)

    def join(rank: int) -> None:
        options = rpc.GatheringOptions(enabled=rank != 1, after=1)
        url = f"file://{tmp_path}/static"
        options = rpc.RpcBackendOptions(init_method=url, gatherings=options)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
        for _ in range(5):
            rpc.barrier()
            assert not gather_threads()
        rpc.shutdown()

    for pending in [worker.start(join, rank) for rank, worker in enumerate(started)]:
        pending.result()

    def join_dynamic(rank: int) -> None:
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/dynamic", gatherings=AT_ONCE)
        rpc.init_rpc(f"worker{rank}", rpc_backend_options=options)

    for rank, worker in enumerate(started):
        worker.run(join_dynamic, rank)
    for _ in range(5):
        assert workers.each(started, rpc.all_gather, 1) == [{"worker0": 1, "worker1": 1, "worker2": 1}] * 3
        assert workers.each(started, gather_threads) == [[]] * 3


def test_options():
    assert rpc.RpcBackendOptions().gatherings == rpc.GatheringOptions(enabled=True, after=4, max_groups=8)
    for wrong in ({"after": 0}, {"after": 1.5}, {"max_groups": 0}, {"max_groups": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            rpc.GatheringOptions(**wrong)
    with pytest.raises(TypeError, match="enabled"):
        rpc.GatheringOptions(enabled="yes")
    with pytest.raises(TypeError, match="unexpected"):
        rpc.GatheringOptions(always=True)
    with pytest.raises(TypeError, match="gatherings"):
        rpc.RpcBackendOptions(gatherings=True)


@pytest.fixture
def paths() -> Iterator[list[GatherPaths]]:
    """Those of two workers, whose group was formed after round 0 and has been used in round 2."""
    store = HashStore()
    both = [GatherPaths(me, AT_ONCE, MIB) for me in (0, 1)]
    for each in both:
        each.open(store)
    for each in both:
        assert each.begin((0, 1), 0) is None
        assert each.standing((0, 1)) == Standing(-1, formed=False, ready=True)
        each.learn((0, 1), 0, (0, 1), Plan(0, formed=False))
    for each in both:
        wait_until(lambda each=each: each.standing((0, 1)).formed)
        assert each.begin((0, 1), 1) is None
        each.learn((0, 1), 1, (0, 1), Plan(0, formed=True))
    results = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: gather_in(both[i], 2)})) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {me: {0: b"0", 1: b"1"} for me in (0, 1)}
    yield both
    for each in both:
        each.close()


def gather_in(paths: GatherPaths, number: int) -> dict[int, bytes] | None:
    group = paths.begin((0, 1), number)
    assert group is not None
    values = group.all_gather(number, memoryview(b"%d" % paths._me), 10.0)
    paths.learn((0, 1), number, (0, 1), Plan(0, formed=True))
    return values


def assert_given_up(paths: list[GatherPaths], number: int) -> None:
    """The first one's group has ended; the second one notices."""
    first, second = paths
    assert first.standing((0, 1)).generation == NO_STANDING.generation
    assert first.formed == 0
    group = second.begin((0, 1), number)
    assert group is not None
    with pytest.raises(ProcessGroupError):
        group.all_gather(number, memoryview(b"1"), 10.0)
    assert not group.formed


def test_who_has_not_got_a_result_gives_its_group_up(paths):
    assert paths[0].begin((0, 1), 4) is None
    assert_given_up(paths, 3)


@pytest.mark.parametrize(
    ("present", "plan"), [((0, 1), NO_PLAN), ((0, 1), Plan(7, formed=True)), ((0,), Plan(0, formed=True))]
)
def test_who_learns_that_the_others_have_another_group_gives_its_own_up(paths, present, plan):
    paths[0].begin((0, 1), 3)
    paths[0].learn((0, 1), 3, present, plan)
    assert_given_up(paths, 3)


def test_another_group_takes_twice_as_many_rounds(paths):
    first = paths[0]
    first.worker_lost(1)
    ready = []
    for number in range(3, 7):
        ready.append(first.standing((0, 1)).ready)
        first.learn((0, 1), number, (0, 1), NO_PLAN)
    assert ready == [False, True, True, True]


def test_plans():
    ready = Standing(-1, formed=False, ready=True)
    forming, formed = Standing(7, formed=False, ready=False), Standing(7, formed=True, ready=False)
    assert make_plan(9, [ready, ready]) == Plan(9, formed=False)
    assert make_plan(9, [ready, NO_STANDING]) == NO_PLAN
    assert make_plan(9, [forming, formed]) == Plan(7, formed=False)
    assert make_plan(9, [formed, formed]) == Plan(7, formed=True)
    assert make_plan(9, [formed, ready]) == NO_PLAN
    assert make_plan(9, [formed, formed._replace(generation=8)]) == NO_PLAN
