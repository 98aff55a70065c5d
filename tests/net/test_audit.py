"""The audit log: what a line says, how many there are, and what the listeners of c10d record."""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from gradwire.c10d import Credentials, HashStore, StoreLimits, TCPStore, dump_flight_recorder
from gradwire.c10d.engines.mpi import pmi
from gradwire.c10d.groups import failure_detector
from gradwire.c10d.groups.failure_detector import FailureDetector
from gradwire.c10d.rendezvous.start_barrier import Registration
from gradwire.c10d.stores.server import EXECUTE
from gradwire.errors import StoreError
from gradwire.net.security import Audit, AuditEvent, printable, printable_lines
from gradwire.net.security.audit import WINDOW_S
from gradwire.proto.v1 import store_pb2
from hypothesis import given
from hypothesis import strategies as st

from tests.certificates import OTHER_TOKEN, TOKEN
from tests.net.audit_records import events, record_all, the_event
from tests.remote_functions import connect_to, wait_until

EVIL = "\x1b[31mred\x07\r\nevent=authenticate \u202eesrever\x00\u2028"

# Texts of peers.


@given(text=st.text(max_size=300), size=st.integers(2, 250))
def test_a_text_is_shown_on_one_line_of_bounded_length(text, size):
    shown = printable(text, size)
    assert shown.isprintable()
    assert len(shown) <= size
    assert printable(shown, size) == shown
    if text.isprintable() and len(text) <= size:
        assert shown == text


def test_control_characters_are_escaped_and_letters_are_not():
    assert printable(EVIL) == ("\\x1b[31mred\\x07\\r\\nevent=authenticate \\u202eesrever\\x00\\u2028")
    assert printable("trainé-日本 'a'") == "trainé-日本 'a'"
    assert printable("\udc80") == "\\udc80"
    assert printable("a" * 10**7) == "a" * 199 + "…"
    assert printable(ValueError("a\nb")) == "a\\nb"


@given(text=st.text(st.sampled_from("a\n\t\x1b\u202e\r"), max_size=60), size=st.integers(2, 250))
def test_a_traceback_keeps_its_lines(text, size):
    shown = printable_lines(text, size)
    assert len(shown) <= size
    assert shown.replace("\n", "").replace("\t", "").isprintable()
    if size == 250 and len(text) < 25:
        assert shown.count("\n") == text.count("\n")


def test_what_others_have_put_into_the_store_is_shown_so():
    registration = Registration(name=EVIL, rank=0, world_size=1, description="x" * 1000 + EVIL)
    shown = str(Registration.from_json(registration.to_json()))
    assert shown.isprintable()
    assert len(shown) < 500


# Lines.


class Clock:
    """A clock that stands."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_line_has_its_fields_as_text_and_as_attributes(caplog, clock):
    record_all(caplog)
    Audit("worker0", clock).deny("agent", f'a "reason" \\ {EVIL}', peer="ipv4:10.0.0.1:99", worker=EVIL)
    found = the_event(caplog)
    assert {name: found[name] for name in ("event", "listener", "owner", "peer", "limit", "count", "omitted")} == {
        "event": "deny",
        "listener": "agent",
        "owner": "worker0",
        "peer": "ipv4:10.0.0.1:99",
        "limit": "",
        "count": 1,
        "omitted": 0,
    }
    shown = printable(EVIL)
    assert found["worker"] == shown
    assert found["reason"] == f'a "reason" \\ {shown}'
    quoted = shown.replace("\\", "\\\\")
    assert found["line"] == (
        f'event=deny listener=agent owner=worker0 peer=ipv4:10.0.0.1:99 worker="{quoted}" '
        f'reason="a \\"reason\\" \\\\ {quoted}" count=1'
    )


def test_each_kind_of_event_has_its_level(caplog, clock):
    record_all(caplog)
    audit = Audit("worker0", clock)
    audit.connect("agent", "here")
    audit.authenticate("agent", "here", "worker1")
    audit.deny("agent", "why")
    audit.limit("agent", "max=3")
    audit.limit("unix", "max=3", refuses=False)
    levels = [(each["event"], each["level"]) for each in events(caplog)]
    assert levels == [
        ("connect", logging.DEBUG),
        ("authenticate", logging.INFO),
        ("deny", logging.WARNING),
        ("limit", logging.WARNING),
        ("limit", logging.INFO),
    ]


def test_texts_are_bounded(caplog):
    Audit("worker0").deny("agent", "r" * 10**6, peer="p" * 10**6, worker="w" * 10**6)
    assert len(the_event(caplog)["line"]) < 1200
    assert len(AuditEvent(event="deny", listener="agent", reason="r" * 10**6).reason) == 500


def test_a_flood_is_counted_and_not_logged(caplog, clock):
    audit = Audit("worker0", clock)
    for _ in range(100_000):
        audit.deny("agent", "why")
    lines = events(caplog)
    assert [each["count"] for each in lines] == [*range(1, 21)]
    assert [each["line"].endswith('note="further ones are only counted, for up to 60 s"') for each in lines] == [
        *[False] * 19,
        True,
    ]
    audit.deny("unix", "why")  # other listeners and events have their own lines
    audit.limit("agent", "max=3")
    assert len(events(caplog)) == 22
    clock.now += WINDOW_S
    audit.deny("agent", "why")
    last = events(caplog)[-1]
    assert (last["count"], last["omitted"]) == (100_001, 99_980)
    assert audit.counts() == {"agent": {"deny": 100_001, "limit": 1}, "unix": {"deny": 1}}


def test_what_was_left_out_is_said_at_the_end(caplog, clock):
    audit = Audit("worker0", clock)
    for _ in range(25):
        audit.deny("agent", "why")
    for _ in range(2):
        audit.close()
    assert len(events(caplog)) == 21
    assert events(caplog)[-1]["line"] == "event=deny listener=agent owner=worker0 count=25 omitted=5"


def test_events_that_are_not_logged_are_counted(caplog, clock):
    caplog.set_level(logging.ERROR, "gradwire.audit")
    audit = Audit("worker0", clock)
    for _ in range(30):
        audit.deny("agent", "why")
    assert not events(caplog)
    record_all(caplog)
    audit.deny("agent", "why")
    assert (the_event(caplog)["count"], the_event(caplog)["omitted"]) == (31, 0)


def test_many_threads_lose_no_event(clock):
    audit = Audit("worker0", clock)

    def record() -> None:
        for _ in range(2000):
            audit.connect("agent")

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert audit.counts() == {"agent": {"connect": 8000}}


# Stores.


def test_a_store_records_its_clients_and_what_is_malformed(caplog):
    record_all(caplog)
    with TCPStore("0.0.0.0", 0, is_master=True, insecure=True) as master:
        with TCPStore("127.0.0.1", master.port):
            pass
        with grpc.insecure_channel(f"127.0.0.1:{master.port}") as channel:
            execute: Any = channel.unary_unary
            with pytest.raises(grpc.RpcError):
                execute(EXECUTE)(b"\x12\x05abc", timeout=30)
        assert master.audit_counts() == {"store": {"connect": 1, "deny": 1}}
    assert the_event(caplog, event="connect")["peer"] == "unix:"
    denied = the_event(caplog, event="deny", listener="store")
    assert denied["peer"].startswith("ipv4:127.0.0.1:")
    assert denied["reason"] == "a store operation is cut off"
    assert denied["level"] == logging.WARNING


def test_a_store_with_credentials_records_who_is_let_in(caplog):
    record_all(caplog)
    credentials = Credentials(token=TOKEN)
    with TCPStore("127.0.0.1", 0, is_master=True, credentials=credentials) as master:
        with TCPStore("127.0.0.1", master.port, credentials=credentials) as client:
            assert client.audit_counts() == {}
        with pytest.raises(StoreError, match="not of this job"):
            TCPStore("127.0.0.1", master.port, credentials=Credentials(token=OTHER_TOKEN))
        counts = master.audit_counts()["store"]
    assert counts["authenticate"] == 1
    assert counts["connect"] >= 2  # gRPC tells of connections, and not that it has refused one
    assert the_event(caplog, event="authenticate")["peer"].startswith("ipv4:127.0.0.1:")
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    ("limits", "limit", "use"),
    [
        (StoreLimits(max_entries=1), "max_entries=1", lambda store: store.set("b", "1")),
        (StoreLimits(max_bytes=10), "max_bytes=10", lambda store: store.set("b", "1" * 20)),
    ],
    ids=["entries", "bytes"],
)
def test_a_store_records_its_limits(caplog, limits, limit, use):
    with TCPStore("127.0.0.1", 0, is_master=True, limits=limits) as master:
        master.set("a", "1")
        for _ in range(2):
            with pytest.raises(StoreError), TCPStore("127.0.0.1", master.port) as client:
                use(client)
        with pytest.raises(StoreError):
            use(master)
        assert master.audit_counts()["store"]["limit"] == 3
    found = events(caplog, event="limit", listener="store")
    assert [each["limit"] for each in found] == [limit] * 3
    assert [bool(each["peer"]) for each in found] == [True, True, False]


def test_a_store_records_that_too_many_operations_wait(caplog):
    with TCPStore("127.0.0.1", 0, is_master=True, limits=StoreLimits(max_waiting=1)) as master:
        waiting = threading.Thread(target=master.get, args=("key",))
        waiting.start()
        connection: Any = master._connection
        wait_until(lambda: connection._server._waiting == 1)
        with pytest.raises(StoreError):
            master.get("other")
        master.set("key", "value")
        waiting.join()
    assert the_event(caplog, event="limit")["limit"] == "max_waiting=1"


def test_errors_of_a_server_are_shown_without_control_characters(monkeypatch):
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        outcome = store_pb2.Outcome(error=EVIL + "x" * 10**6)
        monkeypatch.setattr(store, "_execute", lambda *_: outcome)
        with pytest.raises(StoreError) as caught:
            store.set("key", "value")
        monkeypatch.undo()
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 5000


# The failure detector.


@pytest.fixture(params=[None, TOKEN], ids=["clear", "TLS"])
def detector(request, monkeypatch) -> Iterator[tuple[FailureDetector, tuple[str, int], str]]:
    """The failure detector of rank 0 of 2 ranks, its address, and its token."""
    monkeypatch.setattr(failure_detector, "TOKEN_TIMEOUT_S", 60)
    store = HashStore()
    made: list[FailureDetector] = []

    def start(rank: int) -> None:
        identity = Credentials(token=request.param).identity() if request.param is not None else None
        made.append(FailureDetector(store, rank, 2, 60, identity=identity, on_lost=print, on_left=print))

    other = threading.Thread(target=start, args=(1,))
    other.start()
    start(0)
    other.join()
    first = next(each for each in made if each._rank == 0)
    host, port, token = failure_detector._parse_address(store.get("address"))
    yield first, (host, port), token
    for each in made:
        each.close()
    store.close()


def say(address: tuple[str, int], data: bytes) -> None:
    """Sends bytes on a new connection, and waits until it is closed."""
    with connect_to(*address) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        while connection.recv(4096):
            pass


def test_a_failure_detector_records_who_connects(detector, caplog):
    first, address, token = detector
    record_all(caplog)

    def counts() -> dict[str, int]:
        return first.audit.counts()["failure_detector"]

    assert counts() == {"connect": 1, "authenticate": 1}
    say(address, f"wrong 1\n{EVIL}\n".encode())
    wait_until(lambda: counts().get("deny") == 1)
    denied = the_event(caplog, event="deny", listener="failure_detector")
    assert denied["owner"] == "rank 0"
    assert denied["peer"].startswith(("127.0.0.1:", f"unix:pid={os.getpid()},uid={os.geteuid()}"))
    assert denied["reason"] == "it has not said the token" or "SSL" in denied["reason"]
    assert token not in caplog.text


def test_a_failure_detector_records_who_says_nothing(detector, caplog, monkeypatch):
    first, address, _ = detector
    monkeypatch.setattr(failure_detector, "TOKEN_TIMEOUT_S", 0.2)
    say(address, b"")
    wait_until(lambda: first.audit.counts()["failure_detector"].get("deny") == 1)
    assert the_event(caplog, event="deny")["reason"] == "no token within 0.2 s"


def test_a_failure_detector_records_its_limit(detector, caplog, monkeypatch):
    first, address, _ = detector
    monkeypatch.setattr(failure_detector, "MAX_UNADMITTED", 0)
    say(address, b"")
    wait_until(lambda: first.audit.counts()["failure_detector"].get("limit") == 1)
    assert the_event(caplog, event="limit")["limit"] == "MAX_UNADMITTED=0"


def test_who_only_looks_whether_a_detector_listens_is_not_denied(detector):
    first, address, _ = detector
    connect_to(*address).close()
    counts = first.audit.counts
    wait_until(lambda: counts()["failure_detector"]["connect"] == 2 and not first._unadmitted)
    assert "deny" not in counts()["failure_detector"]


def audit_in_dump(folder: Path) -> dict[str, dict[str, int]]:
    return json.loads(dump_flight_recorder(folder).read_text())["groups"][0]["audit"]


def test_the_flight_recorder_has_the_counts(group, tmp_path):
    first, second = group(2)
    assert first.run(audit_in_dump, tmp_path) == {"failure_detector": {"connect": 1, "authenticate": 1}}
    assert second.run(audit_in_dump, tmp_path) == {}


# The PMI server.


@pytest.fixture
def server(monkeypatch) -> Iterator[tuple[pmi.PmiServer, tuple[str, int]]]:
    monkeypatch.setattr(pmi, "GREETING_TIMEOUT_S", 60)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    made = pmi.PmiServer(listener, [0])
    yield made, address
    made._thread.join(30)
    assert not made._thread.is_alive()


def greet(made: pmi.PmiServer, address: tuple[str, int]) -> None:
    """Has the only rank connect and leave, with which the server ends."""
    with socket.create_connection(address, 20) as connection:
        connection.sendall(f"cmd=initack pmiid={made.ids[0]}\n".encode())
        assert connection.recv(4096)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"cmd=initack pmiid=5\n", "its PMI_ID is of no rank"),
        (b"cmd=get key=a\n", "the client has not sent initack"),
        (b"\xc3\xa9\x1b[31m\n", "its request is malformed"),
        (b"x" * 9000, "a line has more than 8192 bytes"),
        (b"", "no PMI_ID within 0.2 s"),
    ],
    ids=["wrong id", "no id", "malformed", "long", "silent"],
)
def test_a_pmi_server_records_who_connects(server, caplog, monkeypatch, sent, reason):
    record_all(caplog)
    made, address = server
    with monkeypatch.context() as patch:
        if not sent:
            patch.setattr(pmi, "GREETING_TIMEOUT_S", 0.2)
        say(address, sent)
    greet(made, address)
    made._thread.join(30)
    denied = the_event(caplog, event="deny", listener="pmi")
    assert denied["reason"] == reason
    assert denied["peer"].startswith("127.0.0.1:")
    assert the_event(caplog, event="authenticate")["worker"] == "rank 0"
    assert made.audit.counts() == {"pmi": {"connect": 2, "authenticate": 1, "deny": 1}}
    assert str(made.ids[0]) not in caplog.text


def test_a_pmi_server_records_its_limit(server, caplog, monkeypatch):
    monkeypatch.setattr(pmi, "MAX_STRANGERS", -1)
    made, address = server
    say(address, b"")
    assert the_event(caplog, event="limit", listener="pmi")["limit"] == "MAX_STRANGERS=-1"
    monkeypatch.setattr(pmi, "MAX_STRANGERS", 64)
    greet(made, address)


def test_a_pmi_server_hears_who_has_spoken_while_it_stalled(server, clock, monkeypatch):
    """As on a machine that lets a process wait for the processor."""
    made, address = server
    spoken = threading.Event()
    accept = made._accept
    clock.now = time.monotonic()  # the server has looked at it already
    monkeypatch.setattr(pmi, "time", SimpleNamespace(monotonic=clock))

    def accept_and_stall() -> None:
        accept()
        assert spoken.wait(60)
        clock.now += 61

    monkeypatch.setattr(made, "_accept", accept_and_stall)
    with socket.create_connection(address, 20) as connection:
        connection.sendall(f"cmd=initack pmiid={made.ids[0]}\n".encode())
        spoken.set()
        assert connection.recv(4096).startswith(b"cmd=initack rc=0")
