"""The contract of stores, tested on each kind in this process."""

import threading
from datetime import timedelta

import pytest
import torch.distributed
from gradwire.c10d import Store
from gradwire.errors import QueueEmptyError, StoreError, StoreTimeoutError

from tests.c10d.stores.kinds import ALL_STORES

pytestmark = pytest.mark.parametrize("store", ALL_STORES, indirect=True)


def test_a_store_is_torchs(store):
    assert isinstance(store, torch.distributed.Store)
    assert isinstance(store, Store)
    assert store.has_extended_api()


@pytest.mark.parametrize("value", [b"", b"\x00\xff", b"v" * 100_000, "", "text", "Grüße"])
def test_set_and_get(store, value):
    store.set("key", "before")
    store.set("key", value)
    assert store.get("key") == (value.encode() if isinstance(value, str) else value)


@pytest.mark.parametrize("key", ["", "a/b", "schlüssel", "with space", "x" * 1000])
def test_keys_are_any_text(store, key):
    store.set(key, "v")
    assert store.get(key) == b"v"
    assert store.check([key])


def test_keys_are_text_only(store):
    with pytest.raises(TypeError, match="key is b'k'"):
        store.set(b"k", "v")
    with pytest.raises(ValueError, match="UTF-8"):
        store.set("\ud800", "v")
    with pytest.raises(TypeError, match=r"give a list of str"):
        store.wait("key")
    with pytest.raises(TypeError, match=r"give a list of str"):
        store.check(3)
    with pytest.raises(TypeError, match="keys are str"):
        store.multi_get(["a", None])


def test_values_are_bytes_or_text(store):
    for value in (None, 3, bytearray(b"x")):
        with pytest.raises(TypeError, match="give bytes or str"):
            store.set("key", value)
    with pytest.raises(ValueError, match="give bytes"):
        store.append("key", "\ud800")
    with pytest.raises(TypeError, match="give a list"):
        store.multi_set(["a", "b"], "xy")
    assert not store.check(["key"])


def test_add_counts(store):
    assert store.add("n", 0) == 0
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", " +40 ")
    assert store.add("n", 2) == 42


def test_what_is_added_is_an_integer(store):
    with pytest.raises(TypeError, match=r"amount to add is 1\.5"):
        store.add("n", 1.5)
    with pytest.raises(ValueError, match="64 bits"):
        store.add("n", 2**63)


def test_append(store):
    store.append("log", "a")
    store.append("log", b"b")
    assert store.get("log") == b"ab"


def test_compare_set(store):
    assert store.compare_set("key", "other", "new") == b"other"
    assert not store.check(["key"])
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "", "second") == b"first"
    assert store.compare_set("key", b"first", b"third") == b"third"
    assert store.get("key") == b"third"


def test_check_needs_all_keys(store):
    store.set("a", "1")
    assert store.check(["a"])
    assert store.check([])
    assert not store.check(["a", "b"])


def test_delete(store):
    store.set("a", "1")
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert not store.check(["a"])


def test_counting_and_listing(store):
    before = store.num_keys()
    store.multi_set(["a", "b"], ["1", "2"])
    store.queue_push("queue", "item")
    assert store.num_keys() == before + 2
    assert sorted(store.list_keys()) == ["a", "b"]


def test_many_keys_at_once(store):
    store.multi_set(["a", "b", "c"], ["1", b"2", "3"])
    assert store.multi_get(["c", "a", "c"]) == [b"3", b"1", b"3"]
    assert store.multi_get([]) == []
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        store.multi_set(["x", "y"], ["1"])


def test_queues_are_first_in_first_out(store):
    store.queue_push("q", "1")
    store.queue_push("q", b"2")
    assert store.queue_len("q") == 2
    assert [store.queue_pop("q"), store.queue_pop("q", block=False)] == [b"1", b"2"]
    assert store.queue_len("q") == 0
    with pytest.raises(QueueEmptyError, match="queue is empty: 'q'"):
        store.queue_pop("q", block=False)
    with pytest.raises(torch.distributed.QueueEmptyError):
        store.queue_pop("q", block=False)


def test_queue_names_and_keys_are_separate(store):
    store.queue_push("x", "item")
    assert store.check(["x"])
    store.wait(["x"], 0)
    assert not store.delete_key("x")
    store.set("x", "value")
    assert (store.get("x"), store.queue_len("x")) == (b"value", 1)


def test_a_timeout_names_the_missing_keys(store):
    store.set("there", "1")
    store.set_timeout(0.01)
    with pytest.raises(StoreTimeoutError, match="'a', 'b'") as caught:
        store.wait(["a", "there", "b", "a"])
    assert caught.value.missing == ["a", "b"]
    assert caught.value.seconds == 0.01
    with pytest.raises(StoreTimeoutError, match=r"0\.001 s waiting for 'a'"):
        store.wait(["a"], timedelta(milliseconds=1))
    with pytest.raises(StoreTimeoutError, match="'a'"):
        store.get("a")
    with pytest.raises(StoreTimeoutError, match="'a'"):
        store.multi_get(["there", "a"])
    with pytest.raises(StoreTimeoutError, match="'q'"):
        store.queue_pop("q")
    with pytest.raises(torch.distributed.DistStoreError):
        store.wait(["a"], 0)


def test_with_a_timeout_of_zero_nothing_waits(store):
    store.set("there", "1")
    store.wait(["there"], 0)
    store.set_timeout(0)
    assert store.get("there") == b"1"
    with pytest.raises(StoreTimeoutError):
        store.get("missing")


def test_timeouts_are_timedeltas_or_seconds(store):
    assert store.timeout == timedelta(seconds=300)
    store.set_timeout(2.5)
    assert store.timeout == timedelta(seconds=2.5)
    store.set_timeout(timedelta(minutes=1))
    assert store.timeout == timedelta(minutes=1)
    for wrong in (-1, float("nan"), float("inf"), timedelta(days=-1)):
        with pytest.raises(ValueError, match="timeout is"):
            store.set_timeout(wrong)
    for wrong in ("1", True):
        with pytest.raises(TypeError, match="timedelta or seconds"):
            store.wait(["x"], wrong)
    assert store.timeout == timedelta(minutes=1)


@pytest.mark.parametrize(
    ("waiting", "bringing"),
    [
        ((lambda s: s.get("k")), (lambda s: s.set("k", "v"))),
        ((lambda s: s.multi_get(["k", "j"])[0]), (lambda s: s.multi_set(["j", "k"], ["w", "v"]))),
        ((lambda s: s.wait(["k"]) or b"v"), (lambda s: s.compare_set("k", "", "v"))),
        ((lambda s: s.wait(["k"]) or b"v"), (lambda s: s.queue_push("k", "v"))),
        ((lambda s: s.get("k")), (lambda s: s.append("k", "v"))),
        ((lambda s: s.queue_pop("k")), (lambda s: s.queue_push("k", "v"))),
    ],
)
def test_waiting_in_one_thread_for_another(store, waiting, bringing):
    results = []
    # A torch TCPStore runs one operation at a time, so each thread needs its own.
    with store.clone() as other:
        thread = threading.Thread(target=lambda: results.append(waiting(other)))
        thread.start()
        bringing(store)
        thread.join()
    assert results == [b"v"]


def test_barrier(store):
    store.set_timeout(0.01)
    with pytest.raises(StoreTimeoutError, match="alone/last_member"):
        store.barrier("alone", 2)
    with pytest.raises(ValueError, match="world_size is 0"):
        store.barrier("nobody", 0)
    with store.clone() as twin:
        other = threading.Thread(target=twin.barrier, args=("both", 2, 60))
        other.start()
        store.barrier("both", 2, timedelta(seconds=60))
        other.join()


def test_a_clone_has_the_same_keys_and_is_closed_separately(store):
    store.set_timeout(7)
    twin = store.clone()
    assert twin.timeout == timedelta(seconds=7)
    twin.set("key", "value")
    assert store.get("key") == b"value"
    twin.close()
    assert store.get("key") == b"value"


def test_operations_on_a_closed_store_raise(store):
    with store as same:
        assert same is store
    store.close()
    for use in (lambda: store.set("k", "v"), lambda: store.get("k"), store.num_keys):
        with pytest.raises(StoreError, match=f"this {type(store).__name__} is closed"):
            use()


def test_the_names_that_cpp_uses(store):
    store.set("a", "1")
    count = store.num_keys()
    assert store.getNumKeys() == count
    assert store.deleteKey("a") is True
    assert store.getNumKeys() == count - 1


def test_cpp_calls_every_operation(store):
    """torch's own PrefixStore is C++ and calls the store's methods as C++ does."""
    through = torch.distributed.PrefixStore("p", store)
    through.set("k", "1")
    assert store.get("p/k") == b"1"
    assert through.get("k") == b"1"
    assert through.add("k", 4) == 5
    through.append("k", "0")
    assert through.compare_set("k", "50", "51") == b"51"
    assert through.check(["k"])
    through.wait(["k"])
    through.wait(["k"], timedelta(seconds=60))
    through.multi_set(["x", "y"], [b"\xff", "2"])
    assert through.multi_get(["y", "x"]) == [b"2", b"\xff"]
    assert through.has_extended_api()
    assert through.num_keys() == store.num_keys()
    assert through.delete_key("k")
    with pytest.raises(StoreTimeoutError, match="'p/k'"):
        through.wait(["k"], timedelta(milliseconds=1))
    if hasattr(through, "barrier"):  # from torch 2.12 on
        through.barrier("b", 1)
    through.set_timeout(timedelta(seconds=9))
    assert store.timeout == timedelta(seconds=9)


def test_cpp_can_use_a_clone(store):
    twin = torch.distributed.PrefixStore("p", store).clone()
    twin.set("k", "v")
    assert store.get("p/k") == b"v"
    twin.underlying_store.close()


def test_a_store_cannot_be_used_in_a_fork(store, monkeypatch):
    monkeypatch.setattr("gradwire.c10d.stores.base.os.getpid", lambda: 1)
    with pytest.raises(StoreError, match=r"used in its fork 1: open stores in the process"):
        store.set("k", "v")
    store.close()
    monkeypatch.undo()
    store.set("k", "v")
