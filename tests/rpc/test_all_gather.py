"""Values of several workers brought together."""

import os
import signal
import threading

import pytest
from gradwire import rpc
from gradwire.errors import SerializationError
from gradwire.rpc.collectives.all_gather import ASK, AllGatherService
from gradwire.rpc.contracts.agent import current_agent

from tests.remote_functions import set_event, wait_for, wait_until


def gather(value: object) -> dict[int, object]:
    agent = current_agent()
    return agent.all_gather("test", value, agent.workers(), 30.0)


def test_everybody_gets_everything(workers):
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


def test_the_leader_dies_when_it_has_told_one_of_two(workers):
    """The one that was told goes on to the next round; the other must get the result all the same."""
    a, b, c = workers.rpc(3)

    def die_between_answers() -> None:
        def complete(self: AllGatherService) -> None:
            with self._lock:
                for key, gathering in self._open.items():
                    if gathering.complete:
                        # Not the last to come: its request is still being handled here.
                        told, member = next((i, m) for i, m in enumerate(gathering.values) if m != 0)
                        gathering.answers[told].set_result(gathering.outcome(key[1]))
                        wait_until(lambda member=member: rpc.rpc_sync(member, rounds_finished) == 1)
                        os.kill(os.getpid(), signal.SIGKILL)

        AllGatherService._complete = complete

    a.run(die_between_answers)
    a.start(gather, "a")
    pending = [b.start(twice, "b"), c.start(twice, "c")]
    everything = {0: "a", 1: "b", 2: "c"}
    for p in pending:
        first, second = p.result()
        assert first == everything
        assert second == {1: "b", 2: "c"}


def test_the_leader_dies_when_it_has_told_one_that_does_not_come_again(workers):
    """The next leader asks for the result, and gets it although whom it asks has not got it by then."""
    a, b, c, d = workers.rpc(4)

    def die_between_answers() -> None:
        def complete(self: AllGatherService) -> None:
            with self._lock:
                for key, gathering in self._open.items():
                    if gathering.complete:
                        answer = gathering.answers[list(gathering.values).index(2)]
                        answer.set_result(gathering.outcome(key[1]))
                        rpc.rpc_sync("worker2", wait_for, ("about to finish",))
                        os.kill(os.getpid(), signal.SIGKILL)

        AllGatherService._complete = complete

    def be_slow() -> None:
        all_gather, finish = current_agent()._all_gather_service, AllGatherService._finish
        was_asked = threading.Event()

        def ask(leader: rpc.WorkerInfo, key: object) -> None:
            all_gather._asked(leader, key)
            was_asked.set()

        def finish_when_asked(self: AllGatherService, *args: object) -> None:
            set_event("about to finish")
            assert was_asked.wait(30)
            finish(self, *args)

        current_agent().control.on(ASK, ask)
        AllGatherService._finish = finish_when_asked

    c.run(be_slow)
    a.run(die_between_answers)
    a.start(gather, "a")
    pending = [worker.start(gather, worker.name) for worker in (b, c, d)]
    expected = {0: "a", 1: "worker1", 2: "worker2", 3: "worker3"}
    assert [p.result() for p in pending] == [expected] * 3


def twice(value: str) -> tuple[dict[int, object], dict[int, object]]:
    return gather(value), gather(value)


def rounds_finished() -> int:
    return len(current_agent()._all_gather_service._finished)


def test_who_could_not_send_its_value_is_still_in_the_same_round(workers):
    started = workers.rpc(2)

    def fail_then_gather() -> dict[int, object]:
        with pytest.raises(SerializationError):
            gather(lambda: 0)
        return gather("second try")

    pending = [started[0].start(gather, "first try"), started[1].start(fail_then_gather)]
    assert [p.result() for p in pending] == [{0: "first try", 1: "second try"}] * 2


def test_results_are_not_kept_for_members_that_are_gone(workers):
    """Each change of the members makes another gathering; only the last result of the last one is kept."""
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
