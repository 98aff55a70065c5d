"""Processes that are killed while children that they have forked live on: their stores are closed all the same."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from gradwire.c10d import FileStore, TCPStore
from gradwire.errors import StoreNetworkError

opened: list[TCPStore | FileStore] = []


def fork_a_helper() -> int:
    """Starts a process that outlives this one, and waits until the fork has ended there as well."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b".")
        signal.pause()
        os._exit(0)
    os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    return child


@pytest.fixture
def forked() -> Iterator[list[int]]:
    """The processes to end after the test."""
    started: list[int] = []
    yield started
    for each in started:
        os.kill(each, signal.SIGKILL)


def open_tcp(port: int, *, is_master: bool = False) -> int:
    opened.append(TCPStore("localhost", port, is_master=is_master))
    opened[0].set("key", "value")
    return opened[0].port


def host_tcp() -> int:
    return open_tcp(0, is_master=True)


def open_file(path: str) -> None:
    opened.append(FileStore(path))


def push(key: str, item: str) -> None:
    opened[0].queue_push(key, item)


def get(key: str) -> bytes:
    return opened[0].get(key)


def pop(key: str) -> bytes:
    return opened[0].queue_pop(key)


def test_clients_notice_a_killed_master(workers, forked):
    master, client = workers(2)
    client.run(open_tcp, master.run(host_tcp))
    forked.append(master.run(fork_a_helper))
    waiting = client.start(get, "never")
    master.kill()
    with pytest.raises(StoreNetworkError):
        waiting.result(30)


def pop_and_fork(key: str) -> int:
    """Has another thread wait for an item, and forks meanwhile."""
    store = opened[0].clone()
    threading.Thread(target=store.queue_pop, args=(key,), daemon=True).start()
    opened[0].get("key")
    return fork_a_helper()


def test_the_master_notices_a_killed_client(workers, forked):
    """So what it has waited for goes to others."""
    master, client, other = workers(3)
    port = master.run(host_tcp)
    for each in client, other:
        each.run(open_tcp, port)
    forked.append(client.run(pop_and_fork, "queue"))
    client.kill()
    waiting = other.start(pop, "queue")
    master.run(push, "queue", "item")
    assert waiting.result(30) == b"item"


def test_a_file_is_not_inherited(workers, forked, tmp_path):
    """With the lock that another thread may have at that moment."""
    (worker,) = workers(1)
    path = tmp_path / "store"
    worker.run(open_file, str(path))

    def files(process: int) -> list[str]:
        return [os.readlink(f"/proc/{process}/fd/{each}") for each in os.listdir(f"/proc/{process}/fd")]

    forked.append(worker.run(fork_a_helper))
    assert str(path) in files(worker.pid)
    assert str(path) not in files(forked[0])
