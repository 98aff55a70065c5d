"""Workers for the tests of RemoteModule."""

import pytest

from tests.remote_functions import assert_clean


@pytest.fixture
def trio(workers):
    """Three workers; the test runs on the first. Afterwards no reference is left."""
    started = workers.rpc(3)
    yield started[0]
    workers.each(started, assert_clean)
