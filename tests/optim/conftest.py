"""Fixtures: one group of workers that all tests of a module share, since these tests are many and small."""

from collections.abc import Iterator

import pytest

from tests.remote_functions import assert_clean
from tests.workers import Worker, Workers


@pytest.fixture(scope="module")
def shared_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Starts three workers, which end with the module."""
    group = Workers(tmp_path_factory.mktemp("workers"))
    group.rpc(3)
    yield group
    group.stop()


@pytest.fixture
def trio(shared_workers: Workers) -> Iterator[Worker]:
    """Yields the first of three workers, and checks after the test that nothing is left on any of them."""
    yield shared_workers.all[0]
    shared_workers.each(shared_workers.all, assert_clean)
