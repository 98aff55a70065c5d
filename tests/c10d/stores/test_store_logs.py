"""Logs of stores that are damaged or cut off: nothing that was acknowledged is lost silently, or done twice."""

import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gradwire.c10d import FileStore, Store, StoreLimits
from gradwire.c10d.stores.durable import DurableState
from gradwire.c10d.stores.log import FILE_STORE, STORE_PROCESS, OperationLog
from gradwire.errors import StoreError
from gradwire.proto.v1.store_pb2 import Operation, Outcome

RECORDS = 50

STEP = int(os.environ.get("GRADWIRE_STORE_STEP", "7"))
"""Of so many bytes, one is damaged. `make stores` damages all."""


class StoreProcess(Store):
    """The state of a store process, without the process."""

    def __init__(self, path: str) -> None:
        self._durable = DurableState(path, StoreLimits())
        super().__init__()

    def _execute(self, operation: Operation, _seconds: float) -> Outcome:
        return self._durable.apply(operation)

    def _release(self) -> None:
        self._durable.close()


KINDS: dict[str, Callable[[str], Store]] = {
    "file": lambda path: FileStore(path, 10**6),  # so that nobody removes the file
    "process": StoreProcess,
}
REFUSALS = re.compile("is damaged at byte [0-9]+, in record|is not a gradwire store|in version [0-9]+ of its")
every_kind = pytest.mark.parametrize("kind", KINDS)


def contents(store: Store) -> dict[str, bytes]:
    keys = sorted(store.list_keys())
    return dict(zip(keys, store.multi_get(keys), strict=True)) if keys else {}


class Log:
    """A log of 50 records, which a test writes anew with damages."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self._open = KINDS[kind]
        self.ends: list[int] = []
        """Where the records end that a store has opened with and each key has."""
        self.states: list[dict[str, bytes]] = []
        """The contents up to there."""
        with self.opened() as store:
            self._record(store)
            for number in range(RECORDS - 1):
                # Some end with zeros, as does what a host that fails leaves.
                store.set(chr(48 + number), bytes([number]) if number % 2 else bytes(2))
                self._record(store)
            self.bytes = path.read_bytes()

    def _record(self, store: Store) -> None:
        self.ends.append(self.path.stat().st_size)
        self.states.append(contents(store))

    def opened(self) -> Store:
        return self._open(str(self.path))

    def is_refused(self, damaged: bytes) -> bool:
        """Opens a damaged log: returns whether it is refused and unchanged; if not, all records must be there."""
        self.path.write_bytes(damaged)
        problem = ""
        try:
            with self.opened() as store:
                assert contents(store) == self.states[-1]
        except StoreError as error:
            problem = str(error)
        if problem:
            assert REFUSALS.search(problem)
            assert self.path.read_bytes() == damaged
        return bool(problem)

    def places(self) -> list[int]:
        """Returns which bytes are damaged one by one: all of the last record, and every STEPth of the others."""
        return [*range(0, self.ends[-2], STEP), *range(self.ends[-2], self.ends[-1])]

    def records(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Yields each record, with what is before and after it."""
        for start, end in zip(self.ends, self.ends[1:], strict=False):
            yield self.bytes[:start], self.bytes[start:end], self.bytes[end:]


@pytest.fixture
def log(tmp_path, kind) -> Log:
    return Log(tmp_path / "log", kind)


@every_kind
def test_no_flipped_bit_loses_a_change(log):
    recovered = []
    for place in log.places():
        damaged = bytearray(log.bytes)
        damaged[place] ^= 1 << place % 8
        if not log.is_refused(bytes(damaged)):
            recovered.append(place)
    assert len(recovered) <= RECORDS + 1  # in the last byte of each record, which says nothing


@every_kind
def test_a_cut_log_has_the_changes_before_and_goes_on(log):
    for size in [*log.places(), len(log.bytes)]:
        whole = max((index for index, end in enumerate(log.ends) if end <= size), default=0)
        log.path.write_bytes(log.bytes[:size])
        with log.opened() as store:
            assert contents(store) == log.states[whole]
            store.set("more", "1")
        with log.opened() as store:
            assert contents(store) == {**log.states[whole], "more": b"1"}


@every_kind
def test_zeros_that_a_host_leaves_at_the_end_are_no_change(log):
    for size in range(log.ends[-3], len(log.bytes)):
        whole = max(index for index, end in enumerate(log.ends) if end <= size)
        log.path.write_bytes(log.bytes[:size] + bytes(100))
        with log.opened() as store:
            found = contents(store)
            # The zeros may be those of the value that was being written.
            assert found in (log.states[whole], log.states[whole + 1])
            store.set("more", "1")
        with log.opened() as store:
            assert contents(store) == {**found, "more": b"1"}


@every_kind
def test_records_that_are_repeated_missing_or_exchanged_are_refused(log):
    for before, record, after in log.records():
        assert log.is_refused(before + record + record + after)
        if after:
            assert log.is_refused(before + after)
            following = after[: len(record)]
            assert log.is_refused(before + following + record + after[len(record) :])


@every_kind
def test_several_damages_are_refused(log):
    order = random.Random(5)
    for _ in range(100):
        damaged = bytearray(log.bytes)
        start = order.randrange(log.ends[0], log.ends[-2])
        damaged[start : start + 9] = order.choice([order.randbytes(9), bytes(9), b"\xff" * 9])
        assert bytes(damaged) == log.bytes or log.is_refused(bytes(damaged))


@every_kind
def test_a_damaged_log_says_how_to_go_on(log):
    middle = log.ends[20]
    damaged = bytearray(log.bytes)
    damaged[middle] ^= 1
    log.path.write_bytes(damaged)
    with pytest.raises(StoreError, match=rf"at byte {middle}, in record \d\d: .* `truncate --size={middle} "):
        log.opened()
    with log.path.open("r+b") as file:
        file.truncate(middle)
    with log.opened() as store:
        assert contents(store) == log.states[20]


@every_kind
def test_a_log_of_another_version_is_refused(log):
    other = log.bytes.replace(b" 2\n", b" 1\n", 1)
    log.path.write_bytes(other)
    with pytest.raises(StoreError, match="in version 1 of its format, and this gradwire has version 2: go on"):
        log.opened()
    assert log.path.read_bytes() == other


@every_kind
def test_a_change_of_a_newer_version_is_refused(tmp_path, kind):
    """Its log may have the same format, and operations that this version does not know."""
    path = tmp_path / "log"
    KINDS[kind](str(path)).close()
    newer = OperationLog(str(path), {"file": FILE_STORE, "process": STORE_PROCESS}[kind])
    assert newer.try_lock(exclusive=True)
    assert len(list(newer.read())) > 0
    newer.append(Operation(kind=99))
    newer.close()
    written = path.read_bytes()
    with pytest.raises(StoreError, match="change that cannot be replayed: .* does not know store operation 99"):
        KINDS[kind](str(path))
    assert path.read_bytes() == written


def test_logs_of_other_kinds_are_refused(tmp_path):
    for kind, opener in KINDS.items():
        opener(str(tmp_path / kind)).close()
    with pytest.raises(StoreError, match=r"is the log of a store process \(gradwire store\), not the file of"):
        FileStore(str(tmp_path / "process"))
    with pytest.raises(StoreError, match=r"is the file of a FileStore, not the log of a store process"):
        StoreProcess(str(tmp_path / "file"))
