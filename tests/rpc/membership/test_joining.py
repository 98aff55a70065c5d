"""Workers that join while members do not answer."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from gradwire import rpc
from gradwire.errors import EvictedError, RendezvousError, WorkerLostError
from gradwire.rpc import grpc_backend
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.membership.addresses import ListenAddress
from gradwire.rpc.membership.evictions import Verdict, Vote, Vouching, ask_before_joining, verdict_of

from tests.addresses import address_here
from tests.remote_functions import identity, wait_until
from tests.rpc.channels.segments import network
from tests.stopped import stopped
from tests.workers import Worker

from .test_dynamic_groups import join, members
from .test_evictions import call_until


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path / 'dynamic'}"


SHORT = rpc.Liveness(suspect_after=60.0, lease=1.0)


def join_soon(name: str, url: str, **options: Any) -> rpc.WorkerInfo:
    grpc_backend.GREETING_TIMEOUT_S = 1.0
    return join(name, url, init_timeout=55, **options)


@pytest.fixture
def one_stopped(workers, url) -> Iterator[tuple[Worker, Worker]]:
    """Two members, the second of which is stopped."""
    a, b = workers(2)
    a.run(join, "a", url)
    b.run(join, "b", url)
    with stopped(b):
        yield a, b


def test_a_member_that_does_not_answer_holds_up_nobody_and_stays(one_stopped, workers, url):
    """It held each of them up for 300 s."""
    a, b = one_stopped
    for name in ("c", "d"):
        (new,) = workers(1)
        new.run(join_soon, name, url)
        assert new.run(members) >= {"a", "b", name}
        assert a.run(call_when_known, name) == name  # it may not have answered within a second either
    os.kill(b.pid, signal.SIGCONT)
    for name in ("a", "c", "d"):
        assert b.run(call_when_known, name) == name


def call_when_known(name: str) -> str:
    from gradwire.errors import UnknownWorkerError

    answers = []

    def call() -> bool:
        try:
            answers.append(rpc.rpc_sync(name, identity, (name,)))
        except UnknownWorkerError:
            return False
        return True

    wait_until(call)
    return answers[0]


def test_one_that_cannot_reach_a_member_does_not_evict_it(workers, url):
    """It was removed from the group, so that another worker could take its name."""
    a, b, c, d = workers(4)
    a.run(join, "a", url)
    b.run(join, "b", url)
    c.run(make_unreachable, b.pid)
    c.run(join_soon, "c", url)
    with pytest.raises(RendezvousError, match="name 'b' is not unique"):
        d.run(join_soon, "b", url)
    assert a.run(rpc.rpc_sync, "b", os.getpid) == b.pid


def test_nor_does_it_after_a_lease_while_others_reach_it(workers, url):
    """It did, when the lease of its own first attempt to connect was over."""
    a, b, c, d = workers(4)
    a.run(join, "a", url)
    b.run(join, "b", url)
    for each in (c, d):
        each.run(make_unreachable, b.pid)
        b.run(make_unreachable, each.pid)
    c.run(asked_about_it, join_soon, "c", url, liveness=SHORT)
    with pytest.raises(RendezvousError, match="'b' .* has not been evicted within"):
        d.run(join, "b", url, init_timeout=5, liveness=SHORT)
    c.run(await_verdict)
    assert a.run(rpc.rpc_sync, "b", os.getpid) == b.pid
    assert b.run(rpc.rpc_sync, "a", os.getpid) == a.pid


verdicts: list[Verdict] = []


def await_verdict() -> None:
    wait_until(lambda: verdicts)
    assert verdicts == [Verdict.STAYS]


def asked_about_it(*args: Any, **options: Any) -> None:
    """Joins, and records what the others say of the members that this worker wants to evict."""
    ask_others = Vouching.ask_others

    async def record(*arguments: Any) -> Verdict:
        verdicts.append(await ask_others(*arguments))
        return verdicts[-1]

    Vouching.ask_others = record  # type: ignore[method-assign]
    args[0](*args[1:], **options)


def test_the_name_of_a_silent_member_to_which_nobody_is_connected_becomes_free(workers, url):
    """It did not: only those whose connections to it had ended evicted it."""
    b, a, c = workers(3)
    b.run(join, "b", url, liveness=SHORT)
    with stopped(b):
        a.run(join_soon, "a", url)
        former = a.run(workers_named, "b")
        c.run(join_soon, "b", url, liveness=SHORT)
        a.run(wait_until, lambda: workers_named("b") not in ([], former))
        assert a.run(rpc.rpc_sync, "b", os.getpid) == c.pid
    # It knows nobody who would tell it.
    assert "did not answer 'b', which wants its place, for 1 s" in b.run(reason_of_eviction)


def workers_named(name: str) -> list[rpc.WorkerInfo]:
    return [worker for worker in current_agent().workers() if worker.name == name]


def reason_of_eviction() -> str:
    roster = network()._roster
    wait_until(lambda: roster.departed())
    (gone,) = roster.departed().values()
    return gone.reason


@pytest.mark.parametrize(("group", "verdict"), [("test", Verdict.STAYS), ("another", Verdict.UNDECIDED)])
def test_members_answer_questions_about_their_own_group_only(agents, group, verdict):
    a, b = agents(2)
    others = [a.peers.by_id[a.info.wire_id].member]
    where = address_here()
    assert ask_before_joining("c", rpc.RpcBackendOptions(), where, group, b.info, others) is verdict


@pytest.mark.parametrize(
    ("votes", "verdict"),
    [
        ("", Verdict.UNDECIDED),  # there is nobody to ask
        ("g", Verdict.UNDECIDED),
        ("d", Verdict.SILENT),
        ("da", Verdict.UNDECIDED),
        ("dda", Verdict.SILENT),
        ("dgg", Verdict.SILENT),
        ("dddv", Verdict.STAYS),
        ("vaaa", Verdict.STAYS),
    ],
)
def test_one_that_vouches_is_enough_and_most_have_to_be_asked(votes, verdict):
    letters = {vote.name[0].lower(): vote for vote in Vote}
    assert verdict_of(letters[letter] for letter in votes) is verdict


def test_the_others_are_told_of_a_member_whose_process_has_ended(workers, url):
    a, b, c = workers(3)
    a.run(join, "a", url)
    b.run(join, "b", url)
    c.run(make_unreachable, b.pid, FileNotFoundError)  # as if it had ended: who lives shows who has been told
    c.run(join_soon, "c", url)
    text = "its process has ended without a goodbye"
    assert text in a.run(call_until, WorkerLostError, "b")
    assert text in b.run(call_until, EvictedError, "a")


def make_unreachable(pid: int, error: type[OSError] = TimeoutError) -> None:
    """Makes this process unable to reach another one, as if packets to it were lost."""
    reach = ListenAddress.reach

    def fail(where: ListenAddress, address: str) -> str:
        if f"/{pid}-" in address:
            raise error("no answer")
        return reach(where, address)

    ListenAddress.reach = fail  # type: ignore[method-assign]
