"""all_gather by messages, through a leader."""

import os
import signal
import threading
from collections.abc import Mapping

import pytest
import torch
from gradwire import rpc
from gradwire.errors import RpcTimeoutError, SerializationError
from gradwire.rpc.collectives.rounds import ASK_RESULT, RoundLeader, RoundResult
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.contracts.messages import MessageType, Request

from tests.remote_functions import assert_clean, set_event, wait_for, wait_until


def gather(value: object) -> dict[int, object]:
    agent = current_agent()
    return agent.all_gather("test", value, agent.workers(), 30.0)


def test_every_member_gets_all_values(workers):
    started = workers.rpc(3)
    for _ in range(3):
        pending = [worker.start(gather, f"from {worker.name}") for worker in started]
        expected = {rank: f"from worker{rank}" for rank in range(3)}
        assert [p.result() for p in pending] == [expected] * 3


def test_members_that_die_drop_out(workers):
    a, b, c = workers.rpc(3)
    pending = [a.start(gather, "a"), c.start(gather, "c")]
    b.kill()
    assert [p.result() for p in pending] == [{0: "a", 2: "c"}] * 2


def test_the_leader_dies_after_it_has_answered_one_of_two(workers):
    """The member that was answered goes on to the next round; the other one still gets the result."""
    a, b, c = workers.rpc(3)

    def die_between_answers() -> None:
        def answer_one(self: RoundLeader) -> None:
            with self._lock:
                for open_round in self._open.values():
                    if not open_round.missing:
                        # Not the last one to arrive: its request is still being handled here.
                        member = next(m for m in open_round.values if m != 0)
                        open_round.answers[member].set_result(open_round.result())
                        wait_until(lambda member=member: rpc.rpc_sync(member, rounds_finished) == 1)
                        os.kill(os.getpid(), signal.SIGKILL)

        RoundLeader._finish_complete_rounds = answer_one

    a.run(die_between_answers)
    a.start(gather, "a")
    pending = [b.start(twice, "b"), c.start(twice, "c")]
    everything = {0: "a", 1: "b", 2: "c"}
    for p in pending:
        first, second = p.result()
        assert first == everything
        assert second == {1: "b", 2: "c"}


def test_the_leader_dies_after_it_has_answered_a_member_that_calls_no_more(workers):
    """The next leader asks that member for the result, which the member has not recorded by then, and gets it."""
    a, b, c, d = workers.rpc(4)

    def die_between_answers() -> None:
        def answer_one(self: RoundLeader) -> None:
            with self._lock:
                for open_round in self._open.values():
                    if not open_round.missing:
                        answer = open_round.answers[2]
                        answer.set_result(open_round.result())
                        rpc.rpc_sync("worker2", wait_for, ("about to finish",))
                        os.kill(os.getpid(), signal.SIGKILL)

        RoundLeader._finish_complete_rounds = answer_one

    def be_slow() -> None:
        leader, finish = current_agent()._all_gather_service._leader, RoundLeader.finish
        was_asked = threading.Event()

        def on_ask(other: rpc.WorkerInfo, key: tuple[object, ...]) -> None:
            leader._on_ask(other, key)
            was_asked.set()

        def finish_when_asked(self: RoundLeader, *args: object) -> None:
            set_event("about to finish")
            assert was_asked.wait(30)
            finish(self, *args)

        current_agent().control.on(ASK_RESULT, on_ask)
        RoundLeader.finish = finish_when_asked

    c.run(be_slow)
    a.run(die_between_answers)
    pending = [c.start(gather, c.name)]
    a.run(wait_until, has_value_of_worker2)  # not the last one to arrive: see above
    a.start(gather, "a")
    pending += [worker.start(gather, worker.name) for worker in (b, d)]
    expected = {0: "a", 1: "worker1", 2: "worker2", 3: "worker3"}
    assert [p.result() for p in pending] == [expected] * 3


def has_value_of_worker2() -> bool:
    return any(2 in each.values for each in list(current_agent()._all_gather_service._leader._open.values()))


def twice(value: str) -> tuple[dict[int, object], dict[int, object]]:
    return gather(value), gather(value)


def rounds_finished() -> int:
    return len(finished_rounds())


def finished_rounds() -> Mapping[object, tuple[int, RoundResult]]:
    return current_agent()._all_gather_service._leader._finished


def test_a_member_whose_value_does_not_pickle_repeats_the_round(workers):
    started = workers.rpc(2)

    def fail_then_gather() -> dict[int, object]:
        with pytest.raises(SerializationError):
            gather(lambda: 0)
        return gather("second try")

    pending = [started[0].start(gather, "first try"), started[1].start(fail_then_gather)]
    assert [p.result() for p in pending] == [{0: "first try", 1: "second try"}] * 2


def test_results_are_not_kept_for_members_that_are_gone(workers):
    """Each change of the members begins another series of rounds; only the last result of the last one is kept."""
    a, b, c = workers.rpc(3)
    workers.each([a, b, c], gather, "all three")
    c.kill()

    def gather_among_two() -> int:
        agent = current_agent()
        agent.connect(agent.worker(2))
        wait_until(lambda: agent.end_of(2) is not None)
        agent.all_gather("test", "two", agent.workers()[:2], 30.0)
        return rounds_finished()

    assert workers.each([a, b], gather_among_two) == [1, 1]


def test_rounds_of_one_topic_do_not_mix(workers):
    (a,) = workers.rpc(1)

    def check() -> None:
        results: list[object] = []
        threads = [threading.Thread(target=lambda i=i: results.append(gather(i)[0])) for i in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(results) == list(range(5))

    a.run(check)


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


def test_a_value_that_one_worker_cannot_unpickle(workers):
    started = workers.rpc(3)

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


def test_threads_gather_on_different_sets(workers):
    started = workers.rpc(4)
    sets = [
        ["worker0", "worker1", "worker2", "worker3"],
        ["worker0", "worker1"],
        ["worker1", "worker2", "worker3"],
    ]

    def gather_on(names: list[str], problems: list[Exception]) -> None:
        try:
            for number in range(30):
                value = (number, names, bytes(number * 100))
                assert rpc.all_gather(value, names) == dict.fromkeys(names, value)
        except Exception as error:
            problems.append(error)

    def gather() -> None:
        problems: list[Exception] = []
        mine = [names for names in sets if current_agent().info.name in names]
        threads = [threading.Thread(target=gather_on, args=(names, problems)) for names in mine]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    workers.each(started, gather)
    workers.each(started, rpc.shutdown)


def test_threads_gather_on_the_same_set(workers):
    """Their rounds run one after another, and all workers get the same."""
    started = workers.rpc(3)

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


def test_references_are_gathered(workers):
    def check(rank: int) -> list[object]:
        gathered = rpc.all_gather({"mine": [rpc.RRef(rank)]})
        values = [gathered[name]["mine"][0].to_here() for name in sorted(gathered)]
        rpc.barrier()  # nobody drops its own before all have them
        del gathered
        rpc.barrier()
        return values

    started = workers.rpc(3)
    pending = [worker.start(check, rank) for rank, worker in enumerate(started)]
    assert [each.result() for each in pending] == [[0, 1, 2]] * 3
    workers.each(started, assert_clean)


def ask_again(leader: str) -> list[object]:
    agent = current_agent()
    value = ("user", 0, (0, 1, 2), "again", True)
    told = agent.request(agent.worker(leader), Request(MessageType.ALL_GATHER, value, timeout=10)).wait()
    return sorted(
        (rank, numbers, [t.unique().tolist() for t in ts]) for rank, (numbers, ts) in told.values.items()
    )


def test_what_the_program_does_to_a_result_is_not_told_to_others(workers):
    """A member whose leader has died sends its value to the next one, which has the result already."""
    sizes = (3, 300_000)

    def gather_and_change(rank: int) -> None:
        gathered = rpc.all_gather(([rank], [torch.full((size,), rank) for size in sizes]))
        for numbers, tensors in gathered.values():
            numbers.append("changed")
            for tensor in tensors:
                tensor.fill_(99)

    started = workers.rpc(3)
    pending = [worker.start(gather_and_change, rank) for rank, worker in enumerate(started)]
    for each in pending:
        each.result()
    for leader in ("worker0", "worker1"):
        assert started[2].run(ask_again, leader) == [(rank, [rank], [[rank], [rank]]) for rank in range(3)]
