"""gradwire's stores behave like torch's HashStore in random programs."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed
from gradwire.c10d import FileStore, HashStore, PrefixStore
from gradwire.errors import StoreTimeoutError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from(["", "x", b"\x00\xff", "x" * 20])
NUMBERS = st.sampled_from(["", "0", "-12", "7"])
COUNTERS = st.just("n")  # stores differ for counters whose value is not a number

STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("set"), COUNTERS, NUMBERS),
    st.tuples(st.just("add"), COUNTERS, st.integers(-(2**40), 2**40)),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("compare_set"), COUNTERS, NUMBERS, NUMBERS),
    st.tuples(st.just("check"), st.lists(KEYS, max_size=3)),
    st.tuples(st.just("wait"), st.lists(KEYS, max_size=3)),
    st.tuples(st.just("multi_get"), st.lists(KEYS, max_size=3)),
    st.lists(st.tuples(KEYS, VALUES), max_size=3).map(
        lambda pairs: ("multi_set", [k for k, _ in pairs], [v for _, v in pairs])
    ),
    st.tuples(st.just("delete_key"), KEYS | COUNTERS),
    st.tuples(st.just("num_keys")),
    st.tuples(st.just("list_keys")),
    st.tuples(st.just("queue_push"), KEYS, VALUES),
    st.tuples(st.just("queue_pop"), KEYS, st.sampled_from([False])),
    st.tuples(st.just("queue_len"), KEYS),
)


def outcome(store: torch.distributed.Store, step: tuple[Any, ...]) -> object:
    """Returns the outcome of a step, without the parts of it that may differ between stores."""
    name, *arguments = step
    try:
        result = getattr(store, name)(*arguments)
    except torch.distributed.QueueEmptyError:
        return "queue is empty"
    except StoreTimeoutError:
        return "timeout"
    except torch.distributed.DistStoreError as error:
        return "timeout" if "timeout" in str(error).lower() else error
    return sorted(result) if name == "list_keys" else result


def run(store: torch.distributed.Store, program: list[tuple[Any, ...]]) -> list[object]:
    store.set_timeout(timedelta(milliseconds=1))
    return [outcome(store, step) for step in program]


@pytest.mark.parametrize("kind", ["hash", "file", "prefix"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=st.lists(STEPS, max_size=30))
def test_random_programs(kind, program, tmp_path):
    expected = run(torch.distributed.HashStore(), program)
    with {
        "hash": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store")),
        "prefix": lambda: PrefixStore("p", HashStore()),
    }[kind]() as store:
        assert run(store, program) == expected
        if kind == "prefix":
            store.underlying_store.close()
        elif kind == "file":
            with FileStore(store.path) as reader:  # reads what a second process would
                assert sorted(reader.list_keys()) == sorted(store.list_keys())
                assert reader.multi_get(reader.list_keys()) == store.multi_get(reader.list_keys())
