"""Fixtures: one group of workers that all tests of a module share, since these tests are many and small."""

from collections.abc import Iterator

import pytest

from tests.remote_functions import assert_clean
from tests.workers import Worker, Workers


@pytest.fixture(scope="module")
def shared_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Three workers in an RPC group, which end with the module."""
    workers = Workers(tmp_path_factory.mktemp("workers"))
    workers.rpc(3)
    yield workers
    workers.stop()


@pytest.fixture
def three_workers(shared_workers: Workers) -> Iterator[list[Worker]]:
    """Three workers in an RPC group; after the test nothing is left on them."""
    yield shared_workers.all
    shared_workers.each(shared_workers.all, assert_clean)
