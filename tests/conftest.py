"""Fixtures for all tests."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gradwire.c10d import HashStore
from gradwire.extensions import DEFAULT_EXTENSIONS
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.options import RpcBackendOptions
from gradwire.rpc.contracts.worker import WorkerInfo
from gradwire.rpc.membership.members import Member

ROOT = Path(__file__).parent.parent
# Appended, so that worker processes can import test modules by name without shadowing anything.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from tests.hosts import Network, why_not  # noqa: E402
from tests.workers import Workers  # noqa: E402


class RootIsNoPackage:
    """Has pytest take the repository root for a folder, although its `__init__.py` is that of gradwire.

    pytest would import it a second time, by the name of the folder, which need not be one for a module.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    """Registers a plugin, since the hooks of this file itself are not asked about the folder above."""
    config.pluginmanager.register(RootIsNoPackage())


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """Starts worker processes; all of them end with the test."""
    group = Workers(tmp_path)
    yield group
    group.stop()


@pytest.fixture
def hosts(workers: Workers) -> Callable[..., Network]:
    """Hosts with so many workers each, for what depends on the network: `hosts(2, 1)`."""
    if reason := why_not():
        pytest.skip(reason)
    return lambda *counts, **options: Network(workers, counts, **options)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """Adds the output and the stacks of a failed test's workers to its report."""
    report = yield
    for group in getattr(item, "funcargs", {}).values():
        if report.failed and isinstance(group, Workers):
            for worker in group.all:
                report.sections.append((worker.name, worker.describe()))
    return report


@pytest.fixture
def agents() -> Iterator[Callable[[int], list[GrpcAgent]]]:
    """Several agents in this process, for what is easier to watch from inside."""
    made: list[GrpcAgent] = []
    store = HashStore()

    def start(count: int, **options: Any) -> list[GrpcAgent]:
        made.extend(
            GrpcAgent(
                WorkerInfo(f"agent{rank}", rank),
                RpcBackendOptions(**options),
                "test",
                extensions=DEFAULT_EXTENSIONS,
            )
            for rank in range(count)
        )
        members = [Member(agent.info, agent.listen()) for agent in made]
        for agent in made:
            agent.open(members, store)
        return made

    yield start
    for agent in made:
        agent.shutdown(graceful=False, timeout=0)
    store.close()
