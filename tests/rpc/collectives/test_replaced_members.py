"""Collectives of a static group, in which a worker is killed and started again meanwhile."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gradwire import rpc
from gradwire.c10d import TCPStore
from gradwire.rpc.collectives.rounds import RoundKey, RoundLeader
from gradwire.rpc.contracts.agent import current_agent

from tests.remote_functions import wait_until
from tests.workers import Worker

SIZE = 3


def join(rank: int, port: int, **options: Any) -> None:
    settings = rpc.RpcBackendOptions(init_timeout=50, rpc_timeout=0, **options)
    store = TCPStore("127.0.0.1", port)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=SIZE, rpc_backend_options=settings, store=store)


@pytest.fixture
def port() -> Iterator[int]:
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        yield store.port


@pytest.fixture
def form_group(workers: Any, port: int) -> Callable[..., list[Worker]]:
    def form_group(**options: Any) -> list[Worker]:
        made = list(workers(SIZE))
        for pending in [worker.start(join, rank, port, **options) for rank, worker in enumerate(made)]:
            pending.result()
        return made

    return form_group


@pytest.fixture
def replace(workers: Any, port: int) -> Callable[..., None]:
    def replace(group: list[Worker], rank: int) -> None:
        """Kills a worker and starts it again, with the others that have nothing to do knowing that."""
        group[rank].kill()
        (group[rank],) = workers(1)
        group[rank].run(join, rank, port)

    return replace


def leader() -> RoundLeader:
    agent: Any = current_agent()
    return agent._all_gather_service._leader


def is_in_round() -> bool:
    return bool(leader()._running)


def wait_until_in_round(name: str) -> None:
    wait_until(lambda: rpc.rpc_sync(name, is_in_round))


def wait_for_values_of(*ids: int) -> None:
    """Waits until these members wait for this worker's result of its one open round."""
    wait_until(lambda: any(set(ids) <= set(each.answers) for each in list(leader()._open.values())))


def gather(times: int = 1) -> list[dict[str, tuple[int, int]]]:
    return [rpc.all_gather((os.getpid(), number)) for number in range(times)]


def values(group: list[Worker], number: int = 0) -> dict[str, tuple[int, int]]:
    return {f"w{rank}": (worker.pid, number) for rank, worker in enumerate(group)}


@pytest.mark.parametrize(("replaced", "waiting", "late"), [(1, 0, 2), (1, 2, 0), (0, 2, 1)])
def test_a_round_with_a_replaced_member_is_run_again(form_group, replace, replaced, waiting, late):
    """One member has begun it with the former incarnation, the other one knows of the new one before it begins."""
    group = form_group()
    pending = [group[waiting].start(gather, 2)]
    group[late].run(wait_until_in_round, f"w{waiting}")
    replace(group, replaced)
    pending += [group[rank].start(gather, 2) for rank in (late, replaced)]
    assert [each.result() for each in pending] == [[values(group, 0), values(group, 1)]] * SIZE


def answer_one_and_die() -> None:
    """Has this worker, which leads, give w2 the result of the next round, and no other."""

    def answer_one(self: RoundLeader) -> None:
        with self._lock:
            for open_round in self._open.values():
                if not open_round.missing and 2 in open_round.answers:
                    open_round.answers.pop(2).set_result(open_round.result())
                    wait_until(lambda: rpc.rpc_sync("w2", knows_result))
                    os.kill(os.getpid(), signal.SIGKILL)

    RoundLeader._finish_complete_rounds = answer_one


def knows_result() -> bool:
    return bool(leader()._finished)


def ask_late() -> None:
    """Has this worker ask others for the result of a round only when it knows that a member was replaced."""
    ask_missing = RoundLeader.ask_missing

    def ask_when_replaced(self: RoundLeader, key: RoundKey) -> None:
        wait_until(lambda: self._replacements.concern(key.members))
        ask_missing(self, key)

    RoundLeader.ask_missing = ask_when_replaced


def test_a_result_that_one_member_has_is_that_of_all(form_group, replace):
    """The leader dies when it has answered one of two, and is replaced before the other one asks for it."""
    group = form_group()
    first = values(group)
    group[0].run(answer_one_and_die)
    group[1].run(ask_late)
    answered, pending = group[2].start(gather), group[1].start(gather, 2)
    group[0].run(wait_for_values_of, 1, 2)  # an answer to the value that comes last is sent after its handler
    group[0].start(gather)
    assert answered.result() == [first]
    group[0].process.join(30)
    replace(group, 0)
    second = {**values(group), "w1": (group[1].pid, 1)}
    assert [each.result() for each in [worker.start(gather) for worker in (group[0], group[2])]] == [[second]] * 2
    assert pending.result() == [first, second]


def test_a_graceful_shutdown_waits_for_the_new_incarnation(form_group, replace):
    group = form_group()
    pending = [group[0].start(rpc.shutdown)]
    group[2].run(wait_until_in_round, "w0")
    replace(group, 1)
    pending.append(group[2].start(rpc.shutdown))
    assert group[1].run(rpc.rpc_sync, "w0", os.getpid) == group[0].pid
    pending.append(group[1].start(rpc.shutdown))
    for each in pending:
        each.result()


def learn_when_told() -> None:
    """Has this worker learn that another one was replaced when it has been told that a round is void."""
    replacements = leader()._replacements
    record, wait_for = replacements.record, replacements.wait_for
    was_told = threading.Event()

    def record_late(worker: rpc.WorkerInfo) -> None:
        assert was_told.wait(20)
        record(worker)

    def wait_and_tell(*args: Any) -> None:
        was_told.set()
        wait_for(*args)

    replacements.record, replacements.wait_for = record_late, wait_and_tell


def test_a_member_that_is_told_of_it_before_it_knows_waits(form_group, replace):
    """It does not begin round after round, of which the others know that they are void."""
    group = form_group()
    group[2].run(learn_when_told)
    pending = [group[2].start(gather)]
    group[0].run(wait_until_in_round, "w2")
    replace(group, 1)
    pending += [group[rank].start(gather) for rank in (0, 1)]
    assert [each.result() for each in pending] == [[values(group)]] * SIZE
