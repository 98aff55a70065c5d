"""Another user of the host against jobs that have no credentials: he reads nothing, writes nothing, runs nothing.

Nor does he keep anybody from starting. The victims run as root, and as an ordinary user.
"""

import os
import socket
from collections.abc import Callable, Sequence

import pytest
from gradwire.c10d import TCPStore
from gradwire.errors import StoreNetworkError

from tests.hostile.attacks import NOBODY, become
from tests.hostile.listeners import find_listeners
from tests.workers import Worker

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")

ROOT, SOMEBODY = 0, 65533


def listens_first(port: int) -> None:
    """Takes a port before its owner does, with a store of this user at it."""
    taken = socket.create_server(("127.0.0.1", port))
    store = TCPStore("127.0.0.1", port + 1, is_master=True)
    store.set("key", "forged")
    kept.extend((taken, store))


kept: list[object] = []


def try_to_connect(addresses: Sequence[tuple[str, int] | str]) -> list[str]:
    """Connects to each address; returns the names of the errors, and the addresses that let this user in."""
    outcomes = []
    for address in addresses:
        with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as connection:
            try:
                connection.connect(address)
            except OSError as error:
                outcomes.append(type(error).__name__)
            else:
                outcomes.append(f"connected to {address!r}")
    return outcomes


def use_store_of_another(port: int) -> str:
    """Returns the error of a client that tries to use the store of another user."""
    with pytest.raises(StoreNetworkError) as caught, TCPStore("127.0.0.1", port, timeout=0.1):
        pass
    return str(caught.value)


def open_store(port: int, *, is_master: bool) -> None:
    kept.append(TCPStore("127.0.0.1", port, is_master=is_master, timeout=60))


def call(method: str, *arguments: str) -> object:
    return getattr(kept[-1], method)(*arguments)


def as_users(worker: Callable[..., Sequence[Worker]], users: Sequence[int]) -> Sequence[Worker]:
    """Starts workers of these users. Those may not read the interpreter's files, so all is loaded before."""
    started = worker(len(users))
    pending = [each.start(change_user, user) for each, user in zip(started, users, strict=True) if user != ROOT]
    for each in pending:
        each.result()
    return started


def change_user(user: int) -> None:
    with TCPStore("localhost", 0, is_master=True) as master, TCPStore("127.0.0.1", master.port):
        use_store_of_another(1)
    become(user)


@pytest.mark.parametrize("victim", [ROOT, SOMEBODY])
def test_the_store_of_rank_0(workers, free_port, victim):
    host, client, stranger = as_users(workers, [victim, victim, NOBODY])
    host.run(open_store, free_port, is_master=True)
    assert "no store of this user" in stranger.run(use_store_of_another, free_port)
    client.run(open_store, free_port, is_master=False)
    client.run(call, "set", "key", "value")
    listeners = [each.address for each in find_listeners(host.pid)]
    assert [each for each in listeners if not isinstance(each, str)] == []
    assert set(stranger.run(try_to_connect, listeners)) == {"PermissionError"}
    assert host.run(call, "get", "key") == b"value"


@pytest.mark.parametrize("victim", [ROOT, SOMEBODY])
def test_a_port_that_another_user_has_taken_keeps_nobody_from_starting(workers, free_port, victim):
    host, client, stranger = as_users(workers, [victim, victim, NOBODY])
    stranger.run(listens_first, free_port)
    waiting = client.start(open_store, free_port, is_master=False)
    host.run(open_store, free_port, is_master=True)
    waiting.result()
    host.run(call, "set", "key", "value")
    assert client.run(call, "get", "key") == b"value"
    host.run(call, "close")
    assert f"user {NOBODY} listens" in client.run(use_store_of_another, free_port)
