"""gradwire's stores are stricter than torch's in some places, and do more in others."""

import threading

import pytest
import torch.distributed
from gradwire.c10d import HashStore, PrefixStore
from gradwire.errors import StoreError

from tests.c10d.stores import OWN_STORES

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
    twin = store.clone()

    def wait() -> None:
        store.set("waiting", "now")
        try:
            store.get("never")
        except StoreError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    twin.get("waiting")
    root = store
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    root.close()
    thread.join()
    assert len(errors) == 1
    assert "closed" in errors[0]
    twin.close()


def test_cpp_keeps_using_a_store_that_python_dropped():
    def wrap() -> torch.distributed.Store:
        return torch.distributed.PrefixStore("p", HashStore())

    through = wrap()
    through.set("k", "v")
    assert through.get("k") == b"v"
    through.underlying_store.close()
