"""all_gathers of workers some of which have lost each other, while others are connected to both."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from gradwire import rpc
from gradwire.errors import AnswerFailedError, RpcTimeoutError, SendFailedError, WorkerLostError
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.collectives import all_gather
from gradwire.rpc.contracts.messages import MessageType, Request
from gradwire.rpc.contracts.worker import WorkerInfo

from tests.remote_functions import wait_until


@pytest.fixture(autouse=True)
def _ask_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_gather, "ASK_AFTER_S", 0.01)


def part(a: GrpcAgent, b: GrpcAgent) -> None:
    """Cuts the connection of two agents, so that each of them counts the other one as lost."""
    a._network.call_soon(a.peers.of(b.info).abort, "the network is partitioned")
    wait_until(lambda: a.end_of(b.info.id) is not None and b.end_of(a.info.id) is not None)


def gather(agent: GrpcAgent, topic: str, value: object) -> object:
    """Returns what a worker gathers from all, or the error. Without a timeout: only the protocol can end it."""
    try:
        return agent.all_gather(topic, value, agent.workers(), 0)
    except WorkerLostError as error:
        return error


@pytest.fixture
def start(agents: Callable[..., list[GrpcAgent]]):
    """Starts agents that are connected to each other, and a pool of threads that run functions on them."""
    with ThreadPoolExecutor(thread_name_prefix="gradwire-test") as pool:

        def start(count: int) -> tuple[list[GrpcAgent], Callable[..., Future]]:
            made = agents(count)
            for agent in made:
                for other in made:
                    if other is not agent:
                        agent.request(other.info, Request(MessageType.GREETING, None)).wait()
            return made, pool.submit

        yield start


def assert_excluded(result: object, worker: str) -> None:
    assert isinstance(result, WorkerLostError), result
    assert result.worker == "agent0"
    assert str(result).endswith(f"the other workers have ended this all_gather without {worker!r}")


def test_all_end_if_two_of_four_have_lost_each_other(start):
    members, submit = start(4)
    part(members[0], members[1])
    for number in range(6):
        pending = [submit(gather, agent, "user", (number, agent.info.id)) for agent in members]
        first, excluded, *others = [each.result(60) for each in pending]
        assert first == {rank: (number, rank) for rank in (0, 2, 3)}
        assert others == [first, first]
        assert_excluded(excluded, "agent1")
    wait_until(lambda: not any(_open_rounds(agent) for agent in members))


def _open_rounds(agent: GrpcAgent) -> int:
    leader = agent._all_gather_service._leader
    return len(leader._open) + len(leader._askers)


def test_the_others_are_rounds_ahead(start):
    members, submit = start(4)
    part(members[0], members[1])
    for number in range(3):
        pending = [submit(gather, agent, "test", number) for agent in members if agent.info.id != 1]
        assert [each.result(60) for each in pending] == [dict.fromkeys((0, 2, 3), number)] * 3
    for _ in range(3):
        assert_excluded(submit(gather, members[1], "test", "late").result(60), "agent1")


def test_two_are_parted_within_a_round(start):
    """The value of the one that is not the leader has arrived: all four get the same result."""
    members, submit = start(4)
    a, b, *_ = members
    pending = [submit(gather, agent, "test", agent.info.id) for agent in (a, b)]
    rounds = a._all_gather_service._leader._open
    wait_until(lambda: any(len(each.values) == 2 for each in rounds.copy().values()))
    part(a, b)
    pending += [submit(gather, agent, "test", agent.info.id) for agent in members[2:]]
    assert [each.result(60) for each in pending] == [{0: 0, 1: 1, 2: 2, 3: 3}] * 4


def test_a_member_whose_leader_is_led_by_another(start):
    """The third one has lost the first one, and sends its value to the second one, which does not lead."""
    members, submit = start(3)
    a, b, c = members
    part(a, c)
    for number in range(3):
        pending = [submit(gather, agent, "test", number) for agent in (a, b, c)]
        first, second, excluded = [each.result(60) for each in pending]
        assert first == second == {0: number, 1: number}
        assert_excluded(excluded, "agent2")
    for agent in (a, b):
        submit(gather, agent, "test", 3)
    wait_until(lambda: all(_last_round(agent) == 3 for agent in (a, b)))
    assert_excluded(submit(gather, c, "test", 3).result(60), "agent2")


def _last_round(agent: GrpcAgent) -> int:
    return max(number for number, _ in agent._all_gather_service._leader._finished.copy().values())


def test_a_round_in_which_a_leader_has_asked_goes_on(start):
    """All agree that the first member is dead."""
    members, submit = start(3)
    a, b, c = members
    a.shutdown(graceful=False, timeout=0)
    wait_until(lambda: b.end_of(0) is not None and c.end_of(0) is not None)
    pending = submit(gather, b, "test", 1)
    wait_until(lambda: c._all_gather_service._leader._askers)  # which its own value answers
    assert gather(c, "test", 2) == pending.result(60) == {1: 1, 2: 2}
    wait_until(lambda: not any(_open_rounds(agent) for agent in (b, c)))


def test_a_graceful_shutdown_of_all_four_ends(start):
    members, submit = start(4)
    part(members[0], members[1])
    pending = [submit(agent.shutdown, graceful=True, timeout=0) for agent in members]
    for each in pending:
        each.result(60)
    wait_until(lambda: not any(each.name.startswith("gradwire-agent") for each in threading.enumerate()))


@pytest.mark.parametrize("is_sent", [True, False], ids=["answer", "value"])
def test_a_value_or_its_answer_is_lost_on_the_way(start, monkeypatch, is_sent):
    """Not its worker: the value is sent again in the same round, in which the others wait for it."""
    members, submit = start(3)
    sender = members[2]
    send, attempts = sender.request, []

    def fail_at_first(worker: WorkerInfo, request: Request) -> rpc.Future:
        if request.kind == MessageType.ALL_GATHER:
            attempts.append(request)
        if len(attempts) != 1 or request.kind != MessageType.ALL_GATHER:
            return send(worker, request)
        if is_sent:
            send(worker, request)
        failed = rpc.Future(sender._executor)
        error = AnswerFailedError if is_sent else SendFailedError
        failed.set_exception(error(worker.name, "the connection broke"))
        return failed

    monkeypatch.setattr(sender, "request", fail_at_first)
    pending = [submit(gather, agent, "test", agent.info.id) for agent in members[1:]]
    wait_until(lambda: len(attempts) == 2)
    pending.append(submit(gather, members[0], "test", 0))
    assert [each.result(60) for each in pending] == [{0: 0, 1: 1, 2: 2}] * 3
    later = [submit(gather, agent, "test", "later") for agent in members]
    assert [each.result(60) for each in later] == [dict.fromkeys(range(3), "later")] * 3
    assert len(attempts) == 3


def test_a_value_that_cannot_be_sent_in_time(start, monkeypatch):
    members, _ = start(2)
    sender = members[1]
    send = sender.request

    def fail(worker: WorkerInfo, request: Request) -> rpc.Future:
        if request.kind != MessageType.ALL_GATHER:
            return send(worker, request)
        failed = rpc.Future(sender._executor)
        failed.set_exception(SendFailedError(worker.name, "the connection broke"))
        return failed

    monkeypatch.setattr(sender, "request", fail)
    with pytest.raises(RpcTimeoutError, match="all_gather waits for 'agent0'"):
        sender.all_gather("test", 1, sender.workers(), 0.05)
