"""Prefix stores on all kinds of stores."""

import threading

import pytest
import torch.distributed
from gradwire.c10d import FileStore, HashStore, PrefixStore
from gradwire.errors import StoreError, StoreTimeoutError


@pytest.fixture
def root():
    with HashStore() as store:
        yield store


def test_prefixes_nest(root):
    inner = PrefixStore("inner", PrefixStore("outer", root))
    inner.set("key", "value")
    assert root.get("outer/inner/key") == b"value"
    assert PrefixStore("outer/inner", root).get("key") == b"value"
    assert inner.underlying_store.underlying_store is root


def test_each_prefix_sees_its_own_keys(root):
    a, ab = PrefixStore("a", root), PrefixStore("ab", root)
    a.multi_set(["x", "y"], ["1", "2"])
    ab.set("z", "3")
    assert sorted(a.list_keys()) == ["x", "y"]
    assert ab.list_keys() == ["z"]
    assert a.num_keys() == root.num_keys() == 3  # as in torch, the keys of the whole store


def test_errors_name_keys_without_the_prefix(root):
    view = PrefixStore("a", root)
    with pytest.raises(StoreError) as caught:
        view.wait(["a/key", "other"], 0)
    assert caught.value.missing == ["a/key", "other"]


def test_a_prefix_is_closed_with_its_store(root):
    view = PrefixStore("b", PrefixStore("a", root))
    root.close()
    with pytest.raises(StoreError, match="PrefixStore is closed"):
        view.set("k", "v")


def test_closing_a_prefix_leaves_its_store_open(root):
    with PrefixStore("a", root) as view:
        view.set("k", "v")
    assert root.get("a/k") == b"v"


def test_a_prefix_has_its_own_timeout(root):
    root.set_timeout(5)
    view = PrefixStore("a", root)
    assert view.timeout == root.timeout
    view.set_timeout(0)
    assert root.timeout.total_seconds() == 5


@pytest.mark.parametrize(
    "make", [torch.distributed.HashStore, lambda: torch.distributed.PrefixStore("c", HashStore())]
)
def test_a_prefix_works_on_torchs_stores(make):
    under = make()
    with PrefixStore("a", under) as view:
        view.set("k", "1")
        assert view.add("k", 1) == 2
        assert under.get("a/k") == b"2"
        assert view.multi_get(["k"]) == [b"2"]
        assert view.underlying_store is under


def test_an_operation_that_the_underlying_store_lacks_is_an_error(tmp_path):
    with PrefixStore("a", torch.distributed.FileStore(str(tmp_path / "store"))) as view:
        assert not view.has_extended_api()
        view.multi_set(["x", "y"], ["1", "2"])
        assert view.multi_get(["x", "y"]) == [b"1", b"2"]
        with pytest.raises(StoreError, match="queue support is not implemented"):
            view.queue_push("q", "1")


def test_a_lost_underlying_store_is_an_error():
    master = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("127.0.0.1", master.port, wait_for_workers=False)
    with PrefixStore("a", client) as view:
        view.set("k", "v")
        del master
        with pytest.raises(StoreError, match="TCPStore: "):
            for _ in range(100):  # the socket may still accept the first
                view.set("k", "v")


def test_closing_ends_a_wait_in_torchs_store(capfd):
    """torch's store prints no stack trace when its server closes next."""
    master = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    view = PrefixStore("a", torch.distributed.TCPStore("127.0.0.1", master.port, wait_for_workers=False))
    errors = []

    def wait() -> None:
        try:
            view.get("never")
        except StoreError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    view.close()
    waiting.join(60)
    assert errors
    del master
    assert capfd.readouterr().err == ""


def test_a_timeout_in_torchs_store_prints_nothing(capfd):
    master = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with PrefixStore("a", master) as view:
        with pytest.raises(StoreTimeoutError, match="0.05 s waiting for 'k'"):
            view.wait(["k"], 0.05)
        view.set("k", "v")
        view.wait(["k"], 60)
    assert capfd.readouterr().err == ""


def test_wrong_arguments(root):
    with pytest.raises(TypeError, match="prefix is 3"):
        PrefixStore(3, root)
    with pytest.raises(TypeError, match=r"store is \{\}: give a torch\.distributed\.Store"):
        PrefixStore("a", {})


def test_a_prefix_of_a_file_store(tmp_path):
    with FileStore(str(tmp_path / "store")) as store, PrefixStore("a", store) as view, view.clone() as twin:
        twin.set("k", "v")
        assert view.get("k") == b"v"
    assert not (tmp_path / "store").exists()
