"""Fixtures that open stores: `@pytest.mark.parametrize("store", ALL_STORES, indirect=True)`."""

import threading
from collections.abc import Iterator

import pytest
from gradwire.c10d import Store

from tests.c10d.stores.kinds import KINDS, Opened, open_here
from tests.workers import Worker


@pytest.fixture
def opened(request, tmp_path) -> Iterator[Opened]:
    """Opens a store of the kind that the parameter names, and says how other processes open it."""
    made = KINDS[request.param](tmp_path)
    yield made
    made.close()


@pytest.fixture
def store(request, tmp_path) -> Iterator[Store]:
    """Opens a store of the kind that the parameter names, for use in this process."""
    made = KINDS[request.param](tmp_path)
    yield made.store
    made.close()


@pytest.fixture
def store_workers(opened, workers):
    """Starts worker processes in which the store of `opened` is open too; they `call` its methods."""

    def start(count: int) -> list[Worker]:
        started = workers(count)
        workers.each(started, open_here, opened.elsewhere)
        return started

    return start


@pytest.fixture(autouse=True)
def no_thread_stays(request) -> Iterator[None]:
    """Fails a test that leaves a thread of gradwire behind in this process."""
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("gradwire")]
    assert not left, f"the test left threads running: {left}"
