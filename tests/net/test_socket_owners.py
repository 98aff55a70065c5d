"""Which user is at the other end of a loopback connection."""

import os
import socket
from collections.abc import Iterator
from itertools import count

import pytest
from gradwire.net import socket_owners
from gradwire.net.socket_owners import cut_off_other_users, own_listening_ports, user_of_peer, users_listening

from tests.hostile.attacks import NOBODY, become
from tests.workers import Worker

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@pytest.fixture(params=[("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")], ids=" to ".join)
def listener(request) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket, and the address at which to connect to it."""
    bind, dialled = request.param
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.create_server((bind, 0), family=family, dualstack_ipv6=bind == "::") as made:
        yield made, dialled


@pytest.fixture
def stranger(workers) -> Worker:
    (started,) = workers(1)
    started.run(become)
    return started  # type: ignore[no-any-return]


kept: list[socket.socket] = []


def connect(address: tuple[str, int]) -> None:
    kept.append(socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET))
    kept[-1].connect(address)


def is_cut_off() -> bool:
    kept[-1].settimeout(30)
    return kept[-1].recv(1) == b""


def close() -> None:
    kept.pop().close()


def test_the_user_of_a_peer(listener, stranger):
    listening, host = listener
    address = host, listening.getsockname()[1]
    stranger.run(connect, address)
    accepted, _ = listening.accept()
    with accepted, socket.create_connection(address) as own, listening.accept()[0] as of_own:
        assert user_of_peer(accepted) == NOBODY
        assert user_of_peer(of_own) == user_of_peer(own) == 0
        stranger.run(close)
        assert user_of_peer(accepted) is None  # the kernel shows it as a socket of root
    assert users_listening(address[1]) == {0}
    assert address[1] in own_listening_ports()


def test_other_users_are_cut_off(listener, stranger):
    listening, host = listener
    address = host, listening.getsockname()[1]
    stranger.run(connect, address)
    with (
        listening.accept()[0] as accepted,
        socket.create_connection(address) as own,
        listening.accept()[0] as twin,
    ):
        assert cut_off_other_users(own_listening_ports()) == []
        assert cut_off_other_users(own_listening_ports() - {address[1]}) == [NOBODY]
        assert stranger.run(is_cut_off)
        assert accepted.recv(1) == b""
        own.sendall(b"x")
        assert twin.recv(1) == b"x"


def test_who_connects_while_the_table_is_read_is_not_cut_off(monkeypatch):
    """The kernel's table is read in parts: it may show one end while it connects, and the other one connected."""
    known, tables, reads = own_listening_ports(), socket_owners._tables, count()

    def read() -> Iterator[str]:
        ends, is_early = f"{port} 0100007F:{other}", next(reads) == 0
        for table in tables():
            yield table.replace(f"{ends} 01", f"{ends} 02") if is_early else table

    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as own,
        listening.accept()[0] as accepted,
    ):
        port, other = (f"{each.getsockname()[1]:04X}" for each in (own, listening))
        monkeypatch.setattr(socket_owners, "_tables", read)
        assert cut_off_other_users(known) == []
        own.sendall(b"x")
        assert accepted.recv(1) == b"x"
    assert next(reads) > 2
