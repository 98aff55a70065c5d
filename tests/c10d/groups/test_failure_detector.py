"""The failure detector: all ranks learn of deaths and departures, and only ranks of the group can connect."""

import contextlib
import json
import os
import queue
import signal
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from gradwire.c10d import Credentials, FileStore
from gradwire.c10d.engines.base import DIED
from gradwire.c10d.groups import failure_detector
from gradwire.c10d.groups.failure_detector import FailureDetector
from gradwire.errors import ProcessGroupError, StoreTimeoutError
from gradwire.net.event_loop import acquire_event_loop
from gradwire.net.host_identity import HostIdentity
from gradwire.net.security import SHARED_HOST_NAME, Audit, issuing

from tests.c10d.members import everywhere
from tests.certificates import make_authority, write
from tests.remote_functions import connect_to, wait_until

notices: "queue.Queue[tuple[str, int, str]]" = queue.Queue()
here: dict[str, Any] = {}


TOKEN = "Kq8vY0m3Zt5nWc1xRb7uEj2s"


def start_detector(path: Path, rank: int, size: int, token: str | None = None, seconds: float = 60) -> None:
    """Starts the failure detector of a worker process."""
    start_detector_with(path, rank, Credentials(token=token) if token is not None else None, size, seconds)


def start_detector_with(
    path: Path, rank: int, credentials: Credentials | None, size: int = 2, seconds: float = 60
) -> None:
    """Starts the failure detector of a worker process with credentials of any kind."""
    here["store"] = FileStore(str(path))
    here["watch"] = FailureDetector(
        here["store"],
        rank,
        size,
        seconds,
        identity=credentials.identity() if credentials is not None else None,
        on_lost=lambda rank, why: notices.put(("lost", rank, why)),
        on_left=lambda rank, why: notices.put(("left", rank, why)),
    )


def start_detector_that_tells(path: Path, file: Path) -> None:
    """Starts that of rank 0 of 3, which makes a file when a rank is lost, and waits for the others meanwhile."""
    here["store"] = FileStore(str(path))

    def on_lost(rank: int, why: str) -> None:
        file.touch()
        notices.put(("lost", rank, why))

    here["watch"] = FailureDetector(here["store"], 0, 3, 60, on_lost=on_lost, on_left=lambda *_: None)


def next_notice() -> tuple[str, int, str]:
    return notices.get(timeout=30)


def close() -> None:
    here["watch"].close()
    here["watch"].close()


@pytest.fixture(params=[None, TOKEN], ids=["clear", "TLS"])
def detectors(workers, tmp_path, request):
    """Starts workers with a failure detector."""

    def start(size: int):
        started = workers(size)
        pending = [
            each.start(start_detector, tmp_path / "store", rank, size, request.param)
            for rank, each in enumerate(started)
        ]
        for each in pending:
            each.result()
        return started

    return start


@pytest.mark.parametrize("dies", [0, 1, 3])
def test_all_ranks_are_told_of_a_death(detectors, dies):
    started = detectors(4)
    started[dies].kill()
    others = [member for rank, member in enumerate(started) if rank != dies]
    assert everywhere(others, next_notice) == [("lost", dies, DIED)] * 3


def fork() -> int:
    """Forks a process that lives until it is killed, as a DataLoader's worker may. Returns its id."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


@pytest.mark.parametrize("dies", [0, 1])
def test_a_death_is_detected_while_a_forked_child_lives(detectors, dies):
    started = detectors(2)
    child = started[dies].run(fork)
    try:
        started[dies].kill()
        assert started[1 - dies].run(next_notice) == ("lost", dies, DIED)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_fork_does_not_affect_the_connections(detectors):
    """A child's copies of the connections do not matter."""
    first, second, third = detectors(3)
    for member in (first, second):
        os.kill(member.run(fork), signal.SIGKILL)
    third.run(close)
    assert everywhere([first, second], next_notice) == [("left", 2, "it left the group")] * 2


@pytest.mark.parametrize("leaves", [0, 2])
def test_closing_a_detector_is_a_departure(detectors, leaves):
    started = detectors(3)
    started[leaves].run(close)
    others = [member for rank, member in enumerate(started) if rank != leaves]
    assert everywhere(others, next_notice) == [("left", leaves, "it left the group")] * 2


def test_interpreter_exit_is_a_departure(detectors):
    first, second = detectors(2)
    second._connection.send_bytes(b"")  # it returns from its main function
    assert first.run(next_notice) == ("left", 1, "it left the group")


def test_several_deaths_are_told_one_after_another(detectors):
    first, second, third = detectors(3)
    second.kill()
    assert first.run(next_notice)[:2] == ("lost", 1)
    third.kill()
    assert first.run(next_notice)[:2] == ("lost", 2)


def test_a_rank_that_connects_late_is_told_of_an_earlier_death(workers, tmp_path):
    first, second, third = workers(3)
    with FileStore(str(tmp_path / "store")) as store:
        store.set("host/2", HostIdentity.here().to_json())  # its host is known, but it has not connected
        serving = first.start(start_detector_that_tells, tmp_path / "store", tmp_path / "lost")
        second.run(start_detector, tmp_path / "store", 1, 3)
        second.kill()
        wait_until((tmp_path / "lost").exists)
        third.run(start_detector, tmp_path / "store", 2, 3)
        serving.result()
    assert everywhere([first, third], next_notice) == [("lost", 1, DIED)] * 2


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gradwire")]


def test_closing_ends_all_threads(detectors):
    started = detectors(2)
    everywhere(started, close)
    assert everywhere(started, threads_left) == [[], []]


def connect_and_send(path: Path, say: str) -> bytes:
    host, port, word = json.loads(FileStore(str(path)).get("address"))
    with connect_to(host, port) as connection:
        connection.sendall(say.format(word=word).encode())
        return connection.recv(64)


def test_connections_without_the_token_are_refused(detectors, tmp_path):
    first, second = detectors(2)
    for say in ("wrong 1\n", "{word} 7\n", "{word} 1\n", "{word} one\n", "x" * 5000 + "\n", "\u00e9 1\n", ""):
        try:
            heard = connect_and_send(tmp_path / "store", say)
        except ConnectionResetError:
            heard = b""
        assert b"welcome" not in heard, say  # with TLS, it may be an alert
    second.kill()
    assert first.run(next_notice) == ("lost", 1, DIED)


def connect_idle_and_count_closed(path: Path, count: int) -> int:
    """Connects without a token; returns how many connections the detector closes."""
    host, port, _ = json.loads(FileStore(str(path)).get("address"))
    idle = [connect_to(host, port) for _ in range(count)]
    closed = 0
    for connection in idle:
        with connection, contextlib.suppress(ConnectionError):
            closed += connection.recv(1) == b""
    return closed


def test_connections_that_say_nothing_are_closed(detectors, tmp_path):
    first, second = detectors(2)
    assert connect_idle_and_count_closed(tmp_path / "store", 30) == 30
    second.kill()
    assert first.run(next_notice) == ("lost", 1, DIED)


def start_late(path: Path, rank: int, token: str | None, told: Path) -> None:
    """Starts a failure detector; that of rank 1 says its token when rank 0 has stopped waiting for it."""
    failure_detector.TOKEN_TIMEOUT_S = 0.1
    deny, enable_keepalive = Audit.deny, failure_detector._enable_keepalive

    def deny_and_be_patient(*args: Any, **fields: Any) -> None:
        failure_detector.TOKEN_TIMEOUT_S = 60
        deny(*args, **fields)
        told.touch()

    def stall(writer: Any) -> None:
        enable_keepalive(writer)
        if rank == 1:
            wait_until(told.exists)

    Audit.deny = deny_and_be_patient
    failure_detector._enable_keepalive = stall
    start_detector(path, rank, 2, token)


@pytest.mark.parametrize("token", [None, TOKEN], ids=["clear", "TLS"])
def test_a_rank_that_says_its_token_late_connects_again(workers, tmp_path, token):
    """As on a machine that lets a process wait for the processor."""
    first, second = workers(2)
    pending = [
        each.start(start_late, tmp_path / "store", rank, token, tmp_path / "told")
        for rank, each in enumerate((first, second))
    ]
    for each in pending:
        each.result()
    second.kill()
    assert first.run(next_notice) == ("lost", 1, DIED)


@pytest.mark.parametrize("token", [None, "pL4gT9wHs6dVf0yNx3aQz8Cm"], ids=["none", "another token"])
def test_ranks_without_the_credentials_of_the_others_are_refused(workers, tmp_path, token):
    first, second = workers(2)
    refused = second.start(start_detector, tmp_path / "store", 1, 2, token, 60)
    with FileStore(str(tmp_path / "store")) as store:
        store.wait(["host/1"])
    waiting = first.start(start_detector, tmp_path / "store", 0, 2, TOKEN, 3)
    for each in refused, waiting:
        with pytest.raises(ProcessGroupError, match="the ranks did not connect to rank 0"):
            each.result()


def test_a_second_process_of_a_rank_is_told_why_it_is_refused(detectors, workers, tmp_path, request):
    detectors(2)
    (second,) = workers(1)
    token = request.node.callspec.params["detectors"]
    with pytest.raises(ProcessGroupError, match="refused the connection of rank 1: rank 1 is connected already"):
        second.run(start_detector, tmp_path / "store", 1, 2, token)


def tls_context(credentials: Credentials) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=credentials.ca)
    context.load_cert_chain(credentials.certificate, credentials.key)
    return context


def test_a_certificate_of_the_same_ca_for_something_else_is_refused(workers, tmp_path, monkeypatch):
    """A company's CA signs certificates for other programs, too. The token does not help them."""
    path, authority = tmp_path / "store", make_authority()
    ours = write(tmp_path / "ours", authority, None)
    started = workers(2)
    pending = [each.start(start_detector_with, path, rank, ours) for rank, each in enumerate(started)]
    for each in pending:
        each.result()
    with FileStore(str(path)) as store:
        host, port, word = json.loads(store.get("address"))
    monkeypatch.setattr(issuing, "host_names", lambda _worker: ["www.example.org"])
    context = tls_context(write(tmp_path / "others", authority, None))
    with (
        socket.create_connection((host, port)) as plain,
        context.wrap_socket(plain, server_hostname=SHARED_HOST_NAME) as connection,
    ):
        connection.sendall(f"{word} 1\n".encode())
        assert connection.recv(100) == b"its certificate is not for gradwire.invalid\n"
        assert connection.recv(100) == b""


def give_up(path: Path, token: str | None) -> None:
    """Waits as rank 0 for a rank that does not say its token. The event loop goes on, as it does in a group."""
    failure_detector.TOKEN_TIMEOUT_S = 600
    here["loop"] = acquire_event_loop()
    with pytest.raises(ProcessGroupError, match=r"these ranks have not connected: \[1\]"):
        start_detector(path, 0, 2, token, 5)


@pytest.mark.parametrize("token", [None, TOKEN], ids=["clear", "TLS"])
def test_a_connection_that_is_not_admitted_ends_with_the_detector(workers, tmp_path, token):
    (first,) = workers(1)
    with FileStore(str(tmp_path / "store")) as store:
        store.set("host/1", HostIdentity.here().to_json())
        pending = first.start(give_up, tmp_path / "store", token)
        host, port, word = json.loads(store.get("address"))
        with connect_to(host, port) as connection:
            pending.result()
            heard = b""
            with contextlib.suppress(ConnectionError):
                connection.sendall(f"{word} 1\n".encode())
                heard = connection.recv(64)
            assert heard == b""
    assert "Traceback" not in first.log.read_text()


def test_a_rank_that_does_not_connect_is_named(tmp_path):
    store = FileStore(str(tmp_path / "store"))
    store.set("host/1", json.dumps(["another", "host", True, 0]))
    with pytest.raises(ProcessGroupError, match=r"within 0.1 s: .*these ranks have not connected: \[1\]"):
        FailureDetector(store, 0, 2, 0.1, insecure=True, on_lost=print, on_left=print)
    empty = FileStore(str(tmp_path / "empty"))
    with pytest.raises(StoreTimeoutError):
        FailureDetector(empty, 1, 2, 0.1, on_lost=print, on_left=print)
    empty.close()
    store.close()
