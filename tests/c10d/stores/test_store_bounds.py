"""What a hostile client can make a store that is a process of its own remember, and write to its log."""

import os

import pytest
from gradwire.c10d.stores import durable, log, state
from gradwire.c10d.stores.limits import MAX_BYTES
from gradwire.c10d.stores.server import MESSAGE_OPTIONS
from gradwire.proto.v1 import store_pb2
from gradwire.proto.v1.store_pb2 import Operation

from tests.c10d.stores.test_store_process import add, contents, opened, pop, push


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "log")


def test_the_outcomes_of_one_client_are_bounded(path, monkeypatch):
    monkeypatch.setattr(durable, "MAX_OUTCOME_BYTES", 1000)
    store = opened(path)
    values = [bytes([number]) * 300 for number in range(8)]
    for number, (expected, desired) in enumerate(zip([b"", *values[:-1]], values, strict=True)):
        swap = Operation(
            kind=store_pb2.COMPARE_SET, keys=["key"], values=[expected, desired], client=7, number=number
        )
        assert store.apply(swap).values == [desired]
    assert sorted(store._answers[7]) == [5, 6, 7]
    assert store._answer_bytes <= 1000
    store.close()


def test_what_a_client_appends_leaves_a_log_that_can_be_read(path, monkeypatch):
    monkeypatch.setattr(durable, "MIN_GROWTH_BYTES", 0)
    monkeypatch.setattr(state, "MAX_BYTES", 1000)
    monkeypatch.setattr(log, "_MAX_RECORD_BYTES", log._MAX_RECORD_BYTES - MAX_BYTES + 1000)
    store = opened(path)
    key = "k" * 9000
    for _ in range(3):
        store.apply(Operation(kind=store_pb2.APPEND, keys=[key], values=[bytes(300)]))
    store._rewrite()
    store.close()
    opened(path).close()


def test_the_receipt_of_the_largest_item_can_be_read(path, monkeypatch):
    (largest_request,) = {
        size - MAX_BYTES for name, size in MESSAGE_OPTIONS if name == "grpc.max_receive_message_length"
    }
    monkeypatch.setattr(log, "_MAX_RECORD_BYTES", log._MAX_RECORD_BYTES - MAX_BYTES)  # as if MAX_BYTES were 0
    store = opened(path)
    request = push(b"")
    request.values[0] = bytes(largest_request - request.ByteSize() - 1)
    assert request.ByteSize() == largest_request
    assert not store.apply(request).error
    asked = pop(number=2**62, client=2**63)
    store.confirm(asked, store.apply(asked).values[0])
    store.close()
    store = opened(path)
    assert contents(store) == []
    store.close()


def test_a_log_grows_when_it_cannot_be_rewritten(path, monkeypatch):
    """In a folder that others can write to, what another user has put there cannot be removed."""
    monkeypatch.setattr(durable, "MIN_GROWTH_BYTES", 0)
    os.mkdir(path + ".new")
    store = opened(path)
    assert [store.apply(add(number)).number for number in range(20)] == [*range(1, 21)]
    store.close()
