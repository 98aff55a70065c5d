"""Stores for tests: `@pytest.mark.parametrize("store", ALL_STORES, indirect=True)`; and ranks of groups."""

import threading
from collections.abc import Callable, Iterator

import pytest
from gradwire.c10d import Store

from tests.c10d.members import join_all
from tests.c10d.stores import KINDS, Opened, open_here
from tests.workers import Worker


@pytest.fixture
def opened(request, tmp_path) -> Iterator[Opened]:
    """A store of the kind named by the parameter."""
    made = KINDS[request.param](tmp_path)
    yield made
    made.close()


@pytest.fixture
def store(request, tmp_path) -> Iterator[Store]:
    """A store of the kind named by the parameter, for use in this process."""
    made = KINDS[request.param](tmp_path)
    yield made.store
    made.close()


@pytest.fixture
def store_workers(opened, workers):
    """Starts worker processes that have opened the same store as the test; they `call` its methods."""

    def start(count: int) -> list[Worker]:
        started = workers(count)
        workers.each(started, open_here, opened.elsewhere)
        return started

    return start


@pytest.fixture
def group_on(workers, tmp_path) -> Callable[..., list[Worker]]:
    """Starts workers in a group; `group_on("gradwire_shm", 2)` is [worker, worker]."""

    def start(backend: str, size: int, seconds: float = 60) -> list[Worker]:
        members = workers(size)
        join_all(members, tmp_path / "store", backend, seconds)
        return members

    return start


@pytest.fixture(autouse=True)
def no_thread_stays(request) -> Iterator[None]:
    """Whatever a test opened and closed has ended its threads."""
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("gradwire")]
    assert not left
