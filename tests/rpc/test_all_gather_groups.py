"""all_gather through a process group of the workers."""

import os
import threading

import numpy as np
import pytest
import torch
from gradwire import rpc
from gradwire.c10d import group_membership
from gradwire.errors import RpcTimeoutError, SerializationError
from gradwire.rpc.contracts.agent import current_agent

from tests.remote_functions import set_event, wait_for, wait_until
from tests.rpc.all_gathers import AT_ONCE, MIB, fail_once, form, grouped, groups, rounds, same, went_through_group


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


def test_results_equal_those_by_messages(workers):
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


def test_each_worker_has_its_own_copy_of_the_result(workers):
    """A worker that changes its result still tells others, which ask for the result, what was gathered."""
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


def test_a_member_whose_value_does_not_pickle_repeats_the_round(workers):
    started = grouped(workers, 3)

    def fail_then_gather(fails: bool) -> dict[str, object]:
        if fails:
            with pytest.raises(SerializationError, match=r"obj\[1\]"):
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
def test_a_value_that_one_worker_cannot_unpickle(workers, through_group):
    started = workers.rpc(3, all_gather=rpc.AllGatherOptions(enabled=through_group, after=1))
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
            flatten, values = agent._codec.flatten, iter([False, True, False])
            agent._codec.flatten = lambda *args: None if next(values) else flatten(*args)
        went = []
        for number in range(3):
            value = number * "x"
            assert rpc.all_gather(value) == dict.fromkeys(["worker0", "worker1", "worker2"], value)
            went.append(went_through_group())
        return went

    assert workers.each(started, gather) == [[True, False, True]] * 3
    assert workers.each(started, groups) == [1] * 3


# Several sets, several threads.


def test_threads_gather_on_different_sets(workers):
    started = workers.rpc(4, all_gather=AT_ONCE)
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
    """Their rounds run one after another, and all workers get the same."""
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


def test_a_thread_that_waits_for_an_earlier_round_times_out(workers):
    a, b = workers.rpc(2)

    def gather() -> tuple[dict[str, object], dict[str, object]]:
        results: list[dict[str, object]] = []
        first = threading.Thread(target=lambda: results.append(rpc.all_gather(1)))
        first.start()
        wait_until(lambda: current_agent()._all_gather_service._round_counts)
        with pytest.raises(RpcTimeoutError, match="an earlier collective among the same workers .* 'worker0'"):
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


def test_the_group_used_least_recently_is_ended(workers):
    started = workers.rpc(3, all_gather=rpc.AllGatherOptions(after=1, max_groups=1))
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


# Without groups.


def test_few_rounds_do_not_form_a_group(workers):
    started = workers.rpc(2, all_gather=rpc.AllGatherOptions(after=5))

    def gather() -> None:
        for _ in range(4):
            rpc.barrier()
        assert not group_threads()
        assert groups() == 0

    workers.each(started, gather)
    workers.each(started, form)
    workers.each(started, rpc.shutdown)


def group_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "all_gather-" in thread.name]


def mappings() -> list[str]:
    """Returns the mappings of memory that this process shares with the other members of a group."""
    with open("/proc/self/maps") as file:
        return [line for line in file if "gradwire" in line and "memfd" in line]


def test_shutdown_releases_everything(workers):
    started = grouped(workers, 3)
    assert all(workers.each(started, mappings))
    workers.each(started, rpc.shutdown)
    for worker in started:
        assert worker.run(group_threads) == []
        assert worker.run(mappings) == []
    assert not [name for name in os.listdir("/dev/shm") if "gradwire" in name]


def test_shutdown_while_a_group_forms(workers):
    started = workers.rpc(3, all_gather=AT_ONCE)

    def gather_and_leave() -> None:
        rpc.barrier()
        rpc.shutdown()
        wait_until(lambda: not group_threads())  # it waits for them, but not for ever

    workers.each(started, gather_and_leave)


def test_a_member_that_leaves_at_once(workers):
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
    started = workers.rpc(3, all_gather=AT_ONCE)

    def break_engine() -> None:
        if current_agent().info.id == who:
            group_membership.best_engine = no_engine

    workers.each(started, break_engine)
    expected = [{"worker0": number, "worker1": number, "worker2": number} for number in range(30)]
    assert workers.each(started, rounds, 30) == [expected] * 3
    for worker in started:
        worker.run(lambda: wait_until(lambda: not group_threads()))
    assert workers.each(started, rounds, 30) == [expected] * 3
    assert started[who].run(count_tries) == 1
    workers.each(started, rpc.shutdown)


def test_disabled_and_dynamic_groups(workers, tmp_path):
    started = workers(3)

    def join(rank: int) -> None:
        options = rpc.AllGatherOptions(enabled=rank != 1, after=1)
        url = f"file://{tmp_path}/static"
        options = rpc.RpcBackendOptions(init_method=url, all_gather=options)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
        for _ in range(5):
            rpc.barrier()
            assert not group_threads()
        rpc.shutdown()

    for pending in [worker.start(join, rank) for rank, worker in enumerate(started)]:
        pending.result()

    def join_dynamic(rank: int) -> None:
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/dynamic", all_gather=AT_ONCE)
        rpc.init_rpc(f"worker{rank}", rpc_backend_options=options)

    for rank, worker in enumerate(started):
        worker.run(join_dynamic, rank)
    for _ in range(5):
        assert workers.each(started, rpc.all_gather, 1) == [{"worker0": 1, "worker1": 1, "worker2": 1}] * 3
        assert workers.each(started, group_threads) == [[]] * 3


def test_options():
    assert rpc.RpcBackendOptions().all_gather == rpc.AllGatherOptions(enabled=True, after=4, max_groups=8)
    for wrong in ({"after": 0}, {"after": 1.5}, {"max_groups": 0}, {"max_groups": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            rpc.AllGatherOptions(**wrong)
    with pytest.raises(TypeError, match="enabled"):
        rpc.AllGatherOptions(enabled="yes")
    with pytest.raises(TypeError, match="unexpected"):
        rpc.AllGatherOptions(always=True)
    with pytest.raises(TypeError, match="all_gather"):
        rpc.RpcBackendOptions(all_gather=True)
