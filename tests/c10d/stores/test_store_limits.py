"""gradwire's stores are stricter than torch's in some places, and do more in others."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import grpc
import pytest
import torch.distributed
from gradwire.c10d import HashStore, PrefixStore, TCPStore
from gradwire.c10d.stores import state
from gradwire.c10d.stores.limits import MAX_LISTED
from gradwire.c10d.stores.sealed import SealedStore
from gradwire.c10d.stores.server import EXECUTE
from gradwire.errors import StoreError

from tests.c10d.stores.kinds import OWN_STORES

own_stores = pytest.mark.parametrize("store", OWN_STORES, indirect=True)


@own_stores
def test_add_stays_within_64_bits(store):
    store.set("n", str(2**63 - 1))
    with pytest.raises(StoreError, match="64 bits"):
        store.add("n", 1)
    assert store.get("n") == b"9223372036854775807"


@own_stores
def test_add_needs_a_number(store):
    store.set("word", "seven")
    with pytest.raises(StoreError, match=r"add to '.*word' needs a decimal number there.* b'seven'"):
        store.add("word", 1)
    assert store.get("word") == b"seven"


@own_stores
def test_add_takes_whole_numbers_only(store):
    store.set("n", "12abc")
    with pytest.raises(StoreError, match=r"b'12abc'"):
        store.add("n", 1)


@own_stores
def test_an_operation_over_the_size_limit_is_refused(store):
    with pytest.raises(StoreError, match="67108864"):
        store.set("key", bytes(64 * 1024 * 1024))
    assert not store.check(["key"])


@own_stores
def test_add_ends_a_wait(store):
    """It does not in torch's HashStore."""
    thread = threading.Thread(target=store.wait, args=(["n"],))
    thread.start()
    store.add("n", 0)
    thread.join()


@own_stores
def test_closing_ends_a_wait(store):
    errors = []
    is_waiting = threading.Event()

    def wait() -> None:
        is_waiting.set()
        try:
            store.get("never")
        except StoreError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    is_waiting.wait()
    root = store
    while isinstance(root, PrefixStore | SealedStore):
        root = root.underlying_store
    root.close()
    thread.join()
    assert len(errors) == 1
    assert "closed" in errors[0]


def test_cpp_keeps_using_a_store_that_python_dropped():
    def wrap() -> torch.distributed.Store:
        return torch.distributed.PrefixStore("p", HashStore())

    through = wrap()
    through.set("k", "v")
    assert through.get("k") == b"v"
    through.underlying_store.close()


def test_the_result_of_a_foreign_server_is_bounded():
    """64 MiB of empty values took 1 GiB of the client's memory."""

    def answer(_request: bytes, _context: object) -> bytes:
        return b"\x0a\x00" * (MAX_LISTED + 100)

    handler = grpc.method_handlers_generic_handler(
        EXECUTE.split("/")[1], {EXECUTE.split("/")[2]: grpc.unary_unary_rpc_method_handler(answer)}
    )
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(StoreError, match="deserializing response"):
            TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20), insecure=True)
    finally:
        server.stop(None).wait()


def test_more_keys_than_are_listed(monkeypatch):
    monkeypatch.setattr(state, "MAX_LISTED", 2)
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        store.multi_set(["a", "b"], ["", ""])
        assert sorted(store.list_keys()) == ["a", "b"]
        store.set("c", "")
        with pytest.raises(StoreError, match="has 3 keys, and lists 2 at most"):
            store.list_keys()
