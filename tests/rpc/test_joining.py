"""Workers that join while members do not answer."""

import os
import signal
from collections.abc import Iterator

import pytest
from gradwire import rpc
from gradwire.errors import RendezvousError
from gradwire.rpc.joining import newcomer

from tests.remote_functions import identity
from tests.workers import Worker

from .test_dynamic_groups import join, members


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path / 'dynamic'}"


def join_soon(name: str, url: str) -> rpc.WorkerInfo:
    newcomer.GREETING_TIMEOUT_S = 1.0
    return join(name, url, init_timeout=55)


@pytest.fixture
def stopped(workers, url) -> Iterator[tuple[Worker, Worker]]:
    """Two members, the second of which is stopped."""
    a, b = workers(2)
    a.run(join, "a", url)
    b.run(join, "b", url)
    os.kill(b.pid, signal.SIGSTOP)
    yield a, b
    os.kill(b.pid, signal.SIGCONT)


def test_a_member_that_does_not_answer_holds_up_nobody_and_stays(stopped, workers, url):
    """It held each of them up for 300 s."""
    a, b = stopped
    for name in ("c", "d"):
        (new,) = workers(1)
        new.run(join_soon, name, url)
        assert new.run(members) >= {"a", "b", name}
        assert a.run(rpc.rpc_sync, name, identity, (name,)) == name
    os.kill(b.pid, signal.SIGCONT)
    for name in ("a", "c", "d"):
        assert b.run(call_when_known, name) == name


def call_when_known(name: str) -> str:
    from gradwire.errors import UnknownWorkerError

    from tests.remote_functions import wait_until

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


def make_unreachable(pid: int) -> None:
    """Makes this process unable to reach another one, as if packets to it were lost."""
    from gradwire.rpc.membership.addresses import ListenAddress

    reach = ListenAddress.reach

    def fail(where: ListenAddress, address: str) -> str:
        if f"/{pid}-" in address:
            raise TimeoutError("no answer")
        return reach(where, address)

    ListenAddress.reach = fail  # type: ignore[method-assign]
