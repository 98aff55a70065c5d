"""Fixtures for all tests: worker processes, alone and in groups, hosts, and agents in the test's own process."""

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from gradwire.c10d import HashStore, PrefixStore
from gradwire.extensions import DEFAULT_EXTENSIONS
from gradwire.rpc.agent.grpc_agent import AgentFactories, GrpcAgent
from gradwire.rpc.contracts.agent import is_initialized
from gradwire.rpc.contracts.options import RpcBackendOptions
from gradwire.rpc.contracts.worker import Member, WorkerInfo
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.membership.roster import RosterLog

from tests import ports
from tests.addresses import address_here
from tests.c10d.members import join_all
from tests.hosts import Network, why_unavailable
from tests.interpreters import Python
from tests.remote_functions import assert_clean
from tests.workers import Worker, WorkerDiedError, Workers

# No test asserts how long something takes, and so no example of a property may.
hypothesis.settings.register_profile("gradwire", deadline=None)
hypothesis.settings.load_profile("gradwire")


@pytest.fixture
def executor() -> Iterator[Executor]:
    """Two threads of an agent, for tests of its parts."""
    made = Executor(2, "test")
    yield made
    assert made.close(10)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """Starts worker processes, which end with the test: `workers(2)`, or `workers.rpc(2)` in an RPC group."""
    started = Workers(tmp_path)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def python() -> Iterator[Python]:
    """Runs programs without the seconds that a new interpreter takes: `python.run("-m", "gradwire")`."""
    made = Python()
    yield made
    made.close()


@pytest.fixture
def two_workers(workers: Workers) -> Iterator[list[Worker]]:
    """Two workers in an RPC group, worker0 and worker1; after the test nothing is left on them."""
    yield from _clean_rpc_group(workers, 2)


@pytest.fixture
def three_workers(workers: Workers) -> Iterator[list[Worker]]:
    """Three workers in an RPC group, worker0 to worker2; after the test nothing is left on them."""
    yield from _clean_rpc_group(workers, 3)


def _clean_rpc_group(workers: Workers, count: int) -> Iterator[list[Worker]]:
    started = workers.rpc(count)
    yield started
    pending = []
    for worker in started:
        if worker.process.is_alive():
            with _unless_killed(worker):
                pending.append((worker, worker.start(_assert_clean_if_joined)))
    for worker, result in pending:
        with _unless_killed(worker):
            result.result()


@contextmanager
def _unless_killed(worker: Worker) -> Iterator[None]:
    """Lets a worker be dead that the test had killed; the fork server may tell it after others have noticed it."""
    try:
        yield
    except WorkerDiedError:
        if worker.process.exitcode != -signal.SIGKILL:
            raise


def _assert_clean_if_joined() -> None:
    if is_initialized():  # the test may have shut the worker down
        assert_clean()


@pytest.fixture
def group_on(workers: Workers, tmp_path: Path) -> Callable[..., list[Worker]]:
    """Starts workers in a process group: `group_on("gradwire_shm", 2)` returns [worker, worker].

    Its operations time out after the third argument, in seconds, if there is one.
    """

    def start(backend: str, size: int, seconds: float | None = None) -> list[Worker]:
        members = workers(size)
        join_all(members, tmp_path / "store", backend, seconds)
        return members

    return start


@pytest.fixture
def group(group_on: Callable[..., list[Worker]], request: pytest.FixtureRequest) -> Callable[..., list[Worker]]:
    """Starts workers in a process group on the module's `BACKEND`, else gradwire_shm: `group(2)`."""
    return partial(group_on, getattr(request.module, "BACKEND", "gradwire_shm"))


@pytest.fixture
def hosts(workers: Workers) -> Callable[..., Network]:
    """Starts workers on simulated hosts: `hosts(2, 1)` puts two on the first and one on the second."""
    if reason := why_unavailable():
        pytest.skip(reason)
    return lambda *counts, **options: Network(workers, counts, **options)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the output and the stacks of a failed test's workers to its report."""
    report = yield
    for group in getattr(item, "funcargs", {}).values():
        if report.failed and isinstance(group, Workers):
            for worker in group.all:
                report.sections.append((worker.name, worker.describe()))
    return report


@pytest.fixture
def agents() -> Iterator[Callable[[int], list[GrpcAgent]]]:
    """Starts RPC agents in the test's own process, for tests that look inside them: `agents(2)`.

    `factories` returns the factories of the agent of a rank, with parts in the place of its own.
    """
    made: list[GrpcAgent] = []
    store = HashStore()

    def start(
        count: int, factories: Callable[[int], AgentFactories] = lambda _rank: AgentFactories(), **options: Any
    ) -> list[GrpcAgent]:
        made.extend(
            GrpcAgent(
                WorkerInfo(f"agent{rank}", rank),
                RpcBackendOptions(**options),
                "test",
                RosterLog(store, "test"),
                extensions=DEFAULT_EXTENSIONS,
                factories=factories(rank),
            )
            for rank in range(count)
        )
        members = [Member(agent.info, agent.listen(address_here())) for agent in made]
        for agent in made:
            agent.open(members, PrefixStore("agents", store))
        return made

    yield start
    for agent in made:
        agent.shutdown(graceful=False, timeout=0)
    store.close()


@pytest.fixture
def free_port() -> int:
    """A TCP port on which nobody listens, and which no other test gets."""
    return ports.free_port()
