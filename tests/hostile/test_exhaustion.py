"""What many connections at once, of which nothing is known, leave to a worker."""

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest
from gradwire import rpc
from gradwire.c10d import Credentials
from gradwire.c10d.engines.base import DIED
from gradwire.c10d.groups import failure_detector

from tests.c10d.groups.test_failure_detector import next_notice, start_detector
from tests.certificates import TOKEN
from tests.hostile.listeners import find_listeners
from tests.remote_functions import add
from tests.workers import Worker


def limit_descriptors(count: int) -> None:
    """Sets how many files this process may have open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def open_files(count: int) -> int:
    with contextlib.ExitStack() as stack:
        return len([stack.enter_context(open(os.devnull)) for _ in range(count)])


@pytest.fixture
def short_of_files(workers) -> list[Worker]:
    """Two workers, of which the first may have few files open."""
    started = workers(2)
    started[0].run(limit_descriptors, 500)
    return started


@contextlib.contextmanager
def many_connections(worker: Worker) -> Iterator[None]:
    """Connects to the only port on which a worker listens, more often than the worker may have files open."""
    (address,) = (each.address for each in find_listeners(worker.pid) if each.family == "tcp")
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(socket.create_connection(address, 20))
        yield


def test_strangers_leave_an_agent_its_file_descriptors(workers, short_of_files):
    a, b = short_of_files
    credentials = Credentials(token=TOKEN)
    workers.join_rpc([a, b], transports=("grpc",), host="127.0.0.1", credentials=credentials)
    assert a.run(rpc.rpc_sync, b.name, add, (1, 2)) == 3
    with many_connections(a):
        assert a.run(open_files, 20) == 20
        assert b.run(rpc.rpc_sync, a.name, add, (1, 2)) == 3


def wait_long_for_tokens() -> None:
    failure_detector.TOKEN_TIMEOUT_S = 100.0


def test_strangers_leave_a_failure_detector_its_file_descriptors(short_of_files, tmp_path):
    a, b = short_of_files
    a.run(wait_long_for_tokens)
    pending = [each.start(start_detector, tmp_path / "store", rank, 2, TOKEN) for rank, each in enumerate((a, b))]
    for each in pending:
        each.result()
    with many_connections(a):
        assert a.run(open_files, 20) == 20
        b.kill()
        assert a.run(next_notice) == ("lost", 1, DIED)
