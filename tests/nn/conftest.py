"""Workers for the tests of RemoteModule."""

import pytest

from tests.remote_functions import assert_clean


@pytest.fixture
def trio(workers):
    """Yields the first of three workers, and checks after the test that no reference is left."""
    started = workers.rpc(3)
    yield started[0]
    workers.each(started, assert_clean)
