"""The watch over a group: deaths and departures are told to all, strangers are not listened to."""

import json
import os
import queue
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from gradwire.c10d import FileStore
from gradwire.c10d.failure_detector import DIED, FailureDetector
from gradwire.errors import ProcessGroupError, StoreTimeoutError

from tests.c10d.members import everywhere

notices: "queue.Queue[tuple[str, int, str]]" = queue.Queue()
here: dict[str, Any] = {}


def watch(path: Path, rank: int, size: int, seconds: float = 60) -> None:
    """Starts the watch of a worker process."""
    here["store"] = FileStore(str(path))
    here["watch"] = FailureDetector(
        here["store"],
        rank,
        size,
        seconds,
        on_lost=lambda rank, why: notices.put(("lost", rank, why)),
        on_left=lambda rank, why: notices.put(("left", rank, why)),
    )


def next_notice() -> tuple[str, int, str]:
    return notices.get(timeout=30)


def close() -> None:
    here["watch"].close()
    here["watch"].close()


@pytest.fixture
def watching(workers, tmp_path):
    """Workers that watch each other."""

    def start(size: int):
        started = workers(size)
        pending = [each.start(watch, tmp_path / "store", rank, size) for rank, each in enumerate(started)]
        for each in pending:
            each.result()
        return started

    return start


@pytest.mark.parametrize("dies", [0, 1, 3])
def test_a_death_is_told_to_all(watching, dies):
    started = watching(4)
    started[dies].kill()
    others = [member for rank, member in enumerate(started) if rank != dies]
    assert everywhere(others, next_notice) == [("lost", dies, DIED)] * 3


def fork() -> int:
    """Forks a process that lives until it is killed, as a DataLoader's worker may; its id."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


@pytest.mark.parametrize("dies", [0, 1])
def test_a_death_is_told_though_a_child_lives(watching, dies):
    started = watching(2)
    child = started[dies].run(fork)
    try:
        started[dies].kill()
        assert started[1 - dies].run(next_notice) == ("lost", dies, DIED)
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_watch_goes_on_after_a_fork(watching):
    """What a child does with its copies of the connections does not concern them."""
    first, second, third = watching(3)
    for member in (first, second):
        os.kill(member.run(fork), signal.SIGKILL)
    third.run(close)
    assert everywhere([first, second], next_notice) == [("left", 2, "it left the group")] * 2


@pytest.mark.parametrize("leaves", [0, 2])
def test_a_goodbye_is_no_death(watching, leaves):
    started = watching(3)
    started[leaves].run(close)
    others = [member for rank, member in enumerate(started) if rank != leaves]
    assert everywhere(others, next_notice) == [("left", leaves, "it left the group")] * 2


def test_the_end_of_the_interpreter_is_a_goodbye(watching):
    first, second = watching(2)
    second._connection.send_bytes(b"")  # it returns from its main function
    assert first.run(next_notice) == ("left", 1, "it left the group")


def test_several_deaths_are_told_one_by_one(watching):
    first, second, third = watching(3)
    second.kill()
    assert first.run(next_notice)[:2] == ("lost", 1)
    third.kill()
    assert first.run(next_notice)[:2] == ("lost", 2)


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gradwire")]


def test_threads_and_sockets_end_with_it(watching):
    started = watching(2)
    everywhere(started, close)
    assert everywhere(started, threads_left) == [[], []]


def stranger(path: Path, say: str) -> bytes:
    host, port, word = json.loads(FileStore(str(path)).get("address"))
    with socket.create_connection((host, port)) as connection:
        connection.sendall(say.format(word=word).encode())
        return connection.recv(64)


@pytest.mark.parametrize("say", ["wrong 1\n", "{word} 7\n", "{word} 1\n", "{word} one\n", "x" * 5000 + "\n"])
def test_strangers_are_sent_away(watching, tmp_path, say):
    first, second = watching(2)
    try:
        heard = stranger(tmp_path / "store", say)
    except ConnectionResetError:
        heard = b""
    assert heard == b""
    second.kill()
    assert first.run(next_notice) == ("lost", 1, DIED)


def test_a_rank_that_does_not_come_is_named(tmp_path):
    store = FileStore(str(tmp_path / "store"))
    store.set("host/1", json.dumps(["another", "host"]))
    with pytest.raises(ProcessGroupError, match=r"within 0.1 s: .*these ranks have not connected: \[1\]"):
        FailureDetector(store, 0, 2, 0.1, on_lost=print, on_left=print)
    empty = FileStore(str(tmp_path / "empty"))
    with pytest.raises(StoreTimeoutError):
        FailureDetector(empty, 1, 2, 0.1, on_lost=print, on_left=print)
    empty.close()
    store.close()
