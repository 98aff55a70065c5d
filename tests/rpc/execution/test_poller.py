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

    is_completing = False

    def __init__(self, poller: Poller) -> None:
        self.poller = poller
        self.socket, self.other = socket.socketpair()
        self.descriptor = os.dup(self.socket.fileno())
        self.is_read = False
        self.reading = threading.Lock()
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

    def read(self) -> bool:
        self.is_read = self.is_completing = True
        return True

    def end_reading(self) -> None:
        self.reading.release()


@pytest.fixture
def poller() -> Iterator[Poller]:
    made = Poller(0)
    yield made
    made.close()


def test_a_thread_that_has_read_may_find_the_connection_closed(poller):
    connection = EndingConnection(poller)
    waiter = poller.waiter
    assert waiter is not None
    with connection.socket, connection.other:
        connection.other.send(b"x")
        poller.read_here(connection, waiter, connection)
    assert connection.is_read
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(connection.descriptor)


def test_a_descriptor_that_two_threads_believe_to_keep_is_not_lost(poller):
    """The first thread finds it ready while the second one, which has taken it over, is still reading."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        poller.watch(ours.fileno(), READABLE, lambda: False)  # somebody else reads it
        theirs.send(b"x")
        assert poller.wait(60) == -1
        poller.keep(ours.fileno())
        taken_over, spun = threading.Event(), threading.Event()

        def second() -> None:
            poller.take_over(-1.0)
            assert poller.wait(60) == -1
            poller.keep(ours.fileno())
            taken_over.set()
            assert spun.wait(60)
            poller.release()

        thread = threading.Thread(target=second)
        thread.start()
        assert taken_over.wait(60)
        assert poller.spin(lambda: False)
        spun.set()
        thread.join()
        assert poller.wait(1) == -1  # it is still ready, and the handler has been called
        assert poller.kept == {}
