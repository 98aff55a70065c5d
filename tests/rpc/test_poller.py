"""The poller, when a connection ends while several threads have to do with it."""

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from gradwire.rpc.execution.poller import READABLE, Poller


class EndingConnection:
    """A connection that another thread ends just after the calling one has read it.

    Such a thread learns of a hang-up even while the descriptor is watched for nothing, and closes the descriptor.
    """

    def __init__(self, poller: Poller) -> None:
        self.poller = poller
        self.reading = threading.Lock()
        self.received: list[Any] = []
        self.socket, self.other = socket.socketpair()
        self.descriptor = os.dup(self.socket.fileno())
        self.is_read = False
        poller.watch(self.descriptor, READABLE, self._end)

    def _end(self) -> bool:
        self.poller.unwatch(self.descriptor)
        os.close(self.descriptor)
        return False

    @property
    def on_readable(self) -> Any:
        if self.is_read:  # what the poller compares with what it has found under the descriptor before
            self._end()
        return self._end

    def can_be_read(self) -> bool:
        return True

    def release_library(self) -> None:
        pass


@pytest.fixture
def poller() -> Iterator[Poller]:
    made = Poller(0)
    yield made
    made.close()


def test_a_thread_that_has_read_may_find_the_connection_closed(poller):
    connection = EndingConnection(poller)
    with connection.socket, connection.other:

        def use(held: list[bool]) -> None:
            assert held == [True]
            connection.is_read = True

        poller.read_here(connection, use)
    assert connection.is_read
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(connection.descriptor)
