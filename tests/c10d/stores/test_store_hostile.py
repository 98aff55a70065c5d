"""A TCPStore's server and clients that are hostile, mistaken, or gone."""

import contextlib
import os
import resource
import selectors
import signal
import socket
import threading
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from gradwire.c10d import FileStore, HashStore, StoreLimits, TCPStore
from gradwire.c10d.stores import server as server_module
from gradwire.c10d.stores.limits import MAX_FIELDS, parse_outcome
from gradwire.c10d.stores.server import EXECUTE, POP
from gradwire.errors import StoreError
from gradwire.proto.v1 import store_pb2
from gradwire.proto.v1.store_pb2 import Operation, Outcome

from tests.c10d.stores import kinds as stores
from tests.c10d.stores.kinds import call, open_here
from tests.remote_functions import wait_until

MIB = 2**20

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2 begins with: the preface, and settings that change nothing."""


def on_a_port(**options: Any) -> TCPStore:
    """Returns the master of a store to which anybody can connect."""
    return TCPStore("0.0.0.0", 0, is_master=True, insecure=True, **options)


@pytest.fixture
def master():
    with on_a_port() as store:
        yield store


@pytest.fixture
def raw(master):
    """A gRPC channel to the master, for requests that no client of gradwire sends."""
    with grpc.insecure_channel(f"127.0.0.1:{master.port}") as channel:
        yield channel


def waiting_in(master: Any) -> int:
    """Returns the number of operations that wait in the store of a master."""
    return master._connection._server._waiting


def is_closed_after(port: int, sent: bytes) -> bool:
    """Sends bytes on a new connection; returns whether the server then closes it."""
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
        return True


def test_connections_that_say_nothing_are_closed(master):
    assert is_closed_after(master.port, b"")


def test_connections_that_make_no_call_are_closed(monkeypatch):
    monkeypatch.setattr(server_module, "IDLE_TIMEOUT_S", 0.2)
    with on_a_port() as master:
        assert is_closed_after(master.port, PREFACE)


def test_connections_that_answer_no_ping_are_closed(monkeypatch):
    monkeypatch.setattr(server_module, "KEEPALIVE_INTERVAL_S", 0.2)
    monkeypatch.setattr(server_module, "KEEPALIVE_TIMEOUT_S", 0.2)
    with on_a_port() as master:
        assert is_closed_after(master.port, PREFACE)


def test_the_number_of_connections_is_bounded(monkeypatch):
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT_S", 100.0)
    with (
        on_a_port(limits=StoreLimits(max_connections=4)) as master,
        contextlib.ExitStack() as stack,
        selectors.DefaultSelector() as selector,
    ):
        for _ in range(10):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", master.port)))
            connection.settimeout(0.0)
            selector.register(connection, selectors.EVENT_READ)
        while len(selector.get_map()) > 4:
            found = selector.select(20)
            assert found, f"{len(selector.get_map())} connections are open"
            for key, _ in found:
                try:
                    is_open = key.fileobj.recv(4096)  # settings
                except ConnectionResetError:
                    is_open = b""
                if not is_open:
                    selector.unregister(key.fileobj)
        master.set("key", "value")
        assert len(selector.get_map()) == 4


def peak_memory() -> int:
    """Returns the most memory, in bytes, that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_repeated_key_is_not_copied_beyond_the_limit(workers, free_port):
    host, client = workers(2)
    host.run(open_here, lambda: TCPStore("127.0.0.1", free_port, is_master=True))
    client.run(open_here, lambda: TCPStore("127.0.0.1", free_port))
    client.run(call, "set", "key", bytes(MIB))
    assert client.run(call, "multi_get", ["key"] * 2) == [bytes(MIB)] * 2
    before = host.run(peak_memory)
    with pytest.raises(
        StoreError, match=r"a result of \d+ bytes exceeds the limit of 67108864: ask for fewer keys"
    ):
        client.run(call, "multi_get", ["key"] * 300)
    assert host.run(peak_memory) - before < 100 * MIB


@pytest.mark.parametrize("make", [HashStore, lambda: FileStore("store"), None])
def test_the_number_of_keys_is_bounded(make, master, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with TCPStore("127.0.0.1", master.port) if make is None else make() as store:
        store.set("key", "")
        assert len(store.multi_get(["key"] * MAX_FIELDS)) == MAX_FIELDS
        with pytest.raises(StoreError, match="131073 keys and values exceeds the limit of 131072"):
            store.multi_get(["key"] * (MAX_FIELDS + 1))


@pytest.mark.parametrize(
    ("request_bytes", "problem"),
    [
        (b"\x12\x00" * (MAX_FIELDS + 9), "more than 131072 keys and values"),
        (b"\x12\x05abc", "cut off"),
        (b"\x12" + b"\xff" * 20, "does not end"),
        (b"\x0b", "wire type 3"),
        (b"\x12\x02\xff\xfe", "Error parsing message"),
    ],
)
def test_requests_that_are_no_operation_are_refused(raw, master, request_bytes, problem):
    with pytest.raises(grpc.RpcError) as caught:
        raw.unary_unary(EXECUTE)(request_bytes, timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in caught.value.details()
    with pytest.raises(grpc.RpcError) as caught:
        next(raw.stream_stream(POP)(iter([request_bytes]), timeout=30))
    assert problem in caught.value.details()
    master.set("key", "value")


@pytest.mark.parametrize("requests", [[], [Operation(kind=store_pb2.GET, keys=["key"])]])
def test_only_pops_are_popped(raw, requests):
    with pytest.raises(grpc.RpcError, match="for QUEUE_POP only"):
        next(raw.stream_stream(POP)(iter([each.SerializeToString() for each in requests]), timeout=30))


def test_pops_need_to_be_confirmed(raw, master):
    master.queue_push("queue", "item")
    pop = Operation(kind=store_pb2.QUEUE_POP, keys=["queue"])
    outcome = Outcome.FromString(raw.unary_unary(EXECUTE)(pop.SerializeToString(), timeout=30))
    assert "method Pop" in outcome.error
    assert master.queue_len("queue") == 1


def test_the_longest_timeout_is_a_long_wait(raw, master):
    wait = Operation(kind=store_pb2.GET, keys=["key"], timeout_ms=2**64 - 1)
    pending = raw.unary_unary(EXECUTE).future(wait.SerializeToString(), timeout=60)
    wait_until(lambda: waiting_in(master) == 1)
    master.set("key", "value")
    assert Outcome.FromString(pending.result()).values == [b"value"]


def test_invalid_operations_do_not_wait(raw):
    for kind in (store_pb2.QUEUE_POP, store_pb2.GET, 99):
        wrong = Operation(kind=kind, keys=["a", "b"], values=[b"c"], timeout_ms=100_000).SerializeToString()
        method = raw.stream_stream(POP) if kind == store_pb2.QUEUE_POP else None
        answer = next(method(iter([wrong]), timeout=30)) if method else raw.unary_unary(EXECUTE)(wrong, timeout=30)
        assert "store operation" in Outcome.FromString(answer).error


# Items of queues, and clients that are gone.


@pytest.mark.parametrize("ends", ["cancel", "no more requests"])
def test_an_item_that_is_not_confirmed_is_put_back(raw, master, ends):
    for item in ("first", "second"):
        master.queue_push("queue", item)
    is_over = threading.Event()

    def requests():
        yield Operation(kind=store_pb2.QUEUE_POP, keys=["queue"]).SerializeToString()
        is_over.wait(30)

    popping = raw.stream_stream(POP)(requests(), timeout=60)
    assert Outcome.FromString(next(popping)).values == [b"first"]
    assert master.queue_len("queue") == 1
    with TCPStore("127.0.0.1", master.port) as other:
        assert other.queue_pop("queue") == b"second"
        if ends == "cancel":
            popping.cancel()
        is_over.set()
        assert other.queue_pop("queue") == b"first"


def pop_for_ever() -> None:
    stores.mine.set("popping", "now")
    stores.mine.queue_pop("queue")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_ends_while_it_waits_takes_no_item(monkeypatch, workers, number):
    """A stopped client is one whose host has lost power: its connection is not closed."""
    monkeypatch.setattr(server_module, "KEEPALIVE_INTERVAL_S", 0.2)
    monkeypatch.setattr(server_module, "KEEPALIVE_TIMEOUT_S", 3.0)  # a client must not wait as long to run
    with TCPStore("127.0.0.1", 0, is_master=True) as master:
        port = master.port
        (victim,) = workers(1)
        victim.run(open_here, lambda: TCPStore("127.0.0.1", port))
        victim.start(pop_for_ever)
        wait_until(lambda: waiting_in(master) == 1)
        os.kill(victim.pid, number)
        master.queue_push("queue", "item")
        assert master.queue_pop("queue") == b"item"
        victim.kill()


# What a server holds at most.


def test_the_number_of_entries_is_bounded():
    with TCPStore("127.0.0.1", 0, is_master=True, limits=StoreLimits(max_entries=3)) as master:
        master.set("a", "1")
        master.queue_push("queue", "item")
        master.queue_push("queue", "item")
        for refused in (
            lambda: master.set("b", "1"),
            lambda: master.add("b", 1),
            lambda: master.append("b", "1"),
            lambda: master.compare_set("b", "", "1"),
            lambda: master.queue_push("queue", "item"),
        ):
            with pytest.raises(StoreError, match="the store has 3 keys and items of queues, its max_entries"):
                refused()
        master.set("a", "2")
        assert master.queue_pop("queue") == b"item"
        master.multi_set(["a", "b"], ["3", "4"])
        assert master.delete_key("a")
        master.add("c", 1)
        assert sorted(master.list_keys()) == ["b", "c"]


def test_the_number_of_bytes_is_bounded():
    with TCPStore("127.0.0.1", 0, is_master=True, limits=StoreLimits(max_bytes=1000)) as master:
        master.set("key", bytes(900))
        for refused in (
            lambda: master.set("other", bytes(93)),
            lambda: master.set("\u00e9" * 49, b""),
            lambda: master.append("key", bytes(98)),
            lambda: master.compare_set("key", bytes(900), bytes(998)),
            lambda: master.queue_push("queue", bytes(93)),
            lambda: master.multi_set(["a", "b"], [bytes(50), bytes(50)]),
        ):
            with pytest.raises(StoreError, match="the store would hold .* bytes, more than its max_bytes of 1000"):
                refused()
        assert master.num_keys() == 1
        master.append("key", bytes(97))
        master.set("key", b"")
        master.queue_push("queue", bytes(900))
        assert len(master.queue_pop("queue")) == 900
        master.set("other", bytes(990))
        assert master.delete_key("other")
        master.set("another", bytes(980))


def test_the_number_of_waiting_operations_is_bounded():
    with TCPStore("127.0.0.1", 0, is_master=True, limits=StoreLimits(max_waiting=1)) as master:
        waiting = threading.Thread(target=master.get, args=("key",))
        waiting.start()
        wait_until(lambda: waiting_in(master) == 1)
        with pytest.raises(StoreError, match="1 operations wait in the store already, its max_waiting"):
            master.get("other")
        master.set("key", "value")
        waiting.join()
        assert master.get("key") == b"value"


def test_what_waits_or_is_not_confirmed_is_bounded():
    """It is not in the store, but in the memory of its server."""
    with (
        on_a_port(limits=StoreLimits(max_bytes=4000)) as master,
        grpc.insecure_channel(f"127.0.0.1:{master.port}") as channel,
    ):
        raw: Any = channel  # bytes, without serializers
        wait = Operation(kind=store_pb2.WAIT, keys=["k" * 3000], timeout_ms=60_000).SerializeToString()
        waiting = raw.unary_unary(EXECUTE).future(wait, timeout=60)
        wait_until(lambda: waiting_in(master) == 1)
        refused = Outcome.FromString(raw.unary_unary(EXECUTE)(wait, timeout=60))
        assert "its max_bytes of 4000" in refused.error
        waiting.cancel()
        wait_until(lambda: waiting_in(master) == 0)
        is_over = threading.Event()

        def pop():
            yield Operation(kind=store_pb2.QUEUE_POP, keys=["queue"]).SerializeToString()
            is_over.wait(60)

        popped = []
        for _ in range(2):
            master.queue_push("queue", bytes(2500))
            popped.append(raw.stream_stream(POP)(pop(), timeout=60))
            outcome = Outcome.FromString(next(popped[-1]))
        assert "its max_bytes of 4000" in outcome.error
        is_over.set()
        for each in popped:
            each.cancel()
        wait_until(lambda: master.queue_len("queue") == 2)


def test_a_value_does_not_grow_beyond_the_limit(master):
    master.set("key", bytes(60 * MIB))
    with pytest.raises(StoreError, match="append to 'key' gives .* bytes, more than the limit of 67108864"):
        master.append("key", bytes(5 * MIB))
    assert len(master.get("key")) == 60 * MIB


@pytest.mark.parametrize("value", [0, -1])
def test_limits_are_at_least_one(value):
    with pytest.raises(ValueError, match=f"max_waiting is {value}: give at least 1"):
        StoreLimits(max_waiting=value)
    with pytest.raises(TypeError, match="max_bytes is 1.5: give an int"):
        StoreLimits(max_bytes=1.5)


def test_a_bad_outcome_is_not_called_an_operation():
    outcome = Outcome(values=[b"x" * 2048]).SerializeToString()
    with pytest.raises(DecodeError, match="the outcome of a store operation is cut off"):
        parse_outcome(outcome[:-1])
