"""Parsers of c10d: of a store's server and file, of values in stores, of the failure detector and of PMI."""

import asyncio
import struct
import tempfile
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from google.protobuf.message import DecodeError
from gradwire.c10d import StoreLimits
from gradwire.c10d.engines.mpi import pmi
from gradwire.c10d.groups import failure_detector
from gradwire.c10d.groups.failure_detector import parse_message
from gradwire.c10d.rendezvous.start_barrier import Outcome as RoundOutcome
from gradwire.c10d.rendezvous.start_barrier import Registration
from gradwire.c10d.stores.limits import parse_operation
from gradwire.c10d.stores.log import OperationLog
from gradwire.c10d.stores.server import StoreServer
from gradwire.c10d.stores.state import KeyValueState
from gradwire.errors import ProcessGroupError, RendezvousError, StoreError
from gradwire.net.host_identity import HostIdentity
from gradwire.proto.v1 import store_pb2
from gradwire.proto.v1.store_pb2 import Operation
from hypothesis import strategies as st

from tests.fuzz.framing import framed, unframed
from tests.fuzz.target import Target

__all__ = ["C10D_TARGETS"]

MIB = 2**20

LIMITS = StoreLimits(max_entries=16, max_bytes=4096, max_waiting=4)
SIZE = 4
"""Ranks of the groups."""

TOKEN = "0123456789abcdef"
PMI_IDS = [11, 22, 33, 44]

_loop = asyncio.new_event_loop()

# Operations on stores.

KEYS = st.sampled_from(["", "a", "b", "key", "\u00e9", "n" * 300]) | st.text(max_size=4)
VALUES = st.sampled_from([b"", b"1", b" -5 ", b"9223372036854775807", bytes(1000)]) | st.binary(max_size=8)
OPERATIONS = st.builds(
    Operation,
    kind=st.sampled_from(store_pb2.OperationKind.values()) | st.integers(-1, 99),
    keys=st.lists(KEYS, max_size=3),
    values=st.lists(VALUES, max_size=3),
    amount=st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]),
    timeout_ms=st.sampled_from([0, 1, 10**12, 2**64 - 1]),
)
SERIALIZED = OPERATIONS.map(Operation.SerializeToString)


def serve_requests(data: bytes) -> None:
    """Sends requests to a server, which stays within its limits. What would wait is cancelled."""
    server = StoreServer(LIMITS)
    _loop.run_until_complete(_serve(server, unframed(data)))
    _check_accounts(server)


async def _serve(server: StoreServer, requests: list[bytes]) -> None:
    for request in requests:
        try:
            operation = parse_operation(request)
        except DecodeError:
            continue
        task = asyncio.ensure_future(server.execute(operation))
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            outcome = await task
            if outcome.values and operation.kind == store_pb2.QUEUE_POP:
                server._state.put_back(operation, outcome.values[0])


def _check_accounts(server: StoreServer) -> None:
    """Checks that a server counts what it has, and has no more than its limits allow."""
    state = server._state
    items = [(name, item) for name, queue in state._queues.items() for item in queue]
    keys = sum(len(key.encode()) for key in state._values)
    values = sum(map(len, state._values.values())) + sum(len(name.encode()) + len(item) for name, item in items)
    assert (state._key_bytes, state._value_bytes, state._item_count) == (keys, values, len(items))
    assert len(state._values) + len(items) <= LIMITS.max_entries
    assert keys + values <= LIMITS.max_bytes
    assert server._waiting == 0
    assert not server._waiters


def parse_request(data: bytes) -> None:
    """Parses one request."""
    with suppress(DecodeError):
        parse_operation(data)


def _log(records: list[bytes]) -> bytes:
    parts = [b"gradwire store 2\n"]
    checksum = zlib.crc32(parts[0])
    for record in records:
        checked = struct.pack("<II", len(record), zlib.crc32(record))
        checksum = zlib.crc32(checked, checksum)
        parts += [checked, checksum.to_bytes(4, "little"), record, b"\n"]
    return b"".join(parts)


def replay_log(data: bytes) -> None:
    """Replays a FileStore's file."""
    with tempfile.TemporaryDirectory(prefix="fuzz-store-") as folder:
        _replay(Path(folder, "store"), data)


def _replay(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o600)
    log = OperationLog(str(path))
    state = KeyValueState()
    try:
        assert log.try_lock(exclusive=True)
        with suppress(StoreError):
            for operation in log.read():
                state.apply(operation)
            log.append(Operation(kind=store_pb2.JOIN))
    finally:
        log.close()


# Values in stores.

NAMES = ["name", "rank", "world_size", "process", "description", "other"]
JSON_TEXTS = st.recursive(
    st.sampled_from(["null", "true", "1", "-1", "1e999", '"text"', '"\\ud800"', "9" * 30, "NaN"]),
    lambda inner: (
        st.lists(inner, max_size=6).map(lambda each: f"[{','.join(each)}]")
        | st.lists(inner, max_size=6).map(
            lambda each: "{" + ",".join(f'"{n}":{v}' for n, v in zip(NAMES, each, strict=False)) + "}"
        )
    ),
    max_leaves=12,
)
VALID_JSON = st.sampled_from(
    [
        Registration(name="worker", rank=0, world_size=2).to_json(),
        HostIdentity("memory", "network").to_json(),
        '["why", true]',
        '["10.0.0.1", 29500, "token"]',
        "[" * 100_000,
    ]
)
JSON_INPUTS = (JSON_TEXTS | VALID_JSON).map(str.encode)


def parse_values(data: bytes) -> None:
    """Parses what other processes have put into the store."""
    with suppress(RendezvousError):
        found = Registration.from_json(data)
        assert str(found)
        assert Registration.from_json(found.to_json()) == found
    with suppress(RendezvousError):
        RoundOutcome.from_json(data)
    with suppress(ProcessGroupError):
        HostIdentity.from_json(data)
    with suppress(ProcessGroupError):
        failure_detector._parse_address(data)


# Lines.

WORDS = st.sampled_from([TOKEN, "0", "1", "3", "4", "-1", "one", "lost", "left", "failed", "\u00e9", "9" * 50])
LINES = st.lists(st.lists(WORDS, max_size=3).map(" ".join), max_size=4).map(lambda each: "\n".join(each).encode())


def read_token(data: bytes) -> None:
    """Reads the first line of a connection to the failure detector."""

    async def read() -> int | None:
        reader = asyncio.StreamReader(limit=failure_detector.MAX_LINE_BYTES)
        reader.feed_data(data)
        reader.feed_eof()
        with suppress(ValueError, ConnectionResetError):
            return await failure_detector._read_rank(reader, TOKEN, SIZE)
        return None

    rank = _loop.run_until_complete(read())
    assert rank is None or (rank in range(1, SIZE) and data.lstrip().startswith(TOKEN.encode()))


def read_messages(data: bytes) -> None:
    """Reads the lines that a rank sends to the failure detector."""
    for line in data.split(b"\n"):
        with suppress(ValueError):
            message = parse_message(line, SIZE)
            assert message.rank in range(SIZE)
            assert message.reason.isprintable()


PMI_COMMANDS = st.sampled_from(
    [
        *(f"cmd=initack pmiid={number}" for number in (*PMI_IDS, 5, "x")),
        "cmd=init pmi_version=1 pmi_subversion=1",
        "cmd=get_maxes",
        "cmd=put kvsname=world key=a value=1",
        f"cmd=put kvsname=world key={'k' * 100} value=1",
        "cmd=get kvsname=world key=a",
        "cmd=get key=PMI_process_mapping",
        "cmd=barrier_in",
        "cmd=leave pmiid=11",
        "cmd=finalize",
        "cmd=unknown",
        "cmd",
        "key=\u00e9",
    ]
)
PMI_INPUTS = st.lists(PMI_COMMANDS, max_size=6).map(lambda each: "".join(f"{line}\n" for line in each).encode())


class _Socket:
    """A connection that has these bytes, and then ends."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def recv(self, count: int) -> bytes:
        piece, self._data = self._data[:count], self._data[count:]
        return piece

    def sendall(self, answer: bytes) -> None:
        assert answer.endswith(b"\n")

    def close(self) -> None:
        pass


@cache
def _pmi_server() -> pmi.PmiServer:
    """Returns a server whose thread does not run."""
    selector = SimpleNamespace(register=lambda *_: None, unregister=lambda *_: None)
    listener: Any = SimpleNamespace(settimeout=lambda _: None)
    with (
        mock.patch.object(pmi.selectors, "DefaultSelector", return_value=selector),
        mock.patch.object(pmi.threading.Thread, "start"),
    ):
        server = pmi.PmiServer(listener, [0] * SIZE)
    server.ids[:] = PMI_IDS
    return server


def ask_pmi(data: bytes) -> None:
    """Sends lines to a PMI server on a connection."""
    server = _pmi_server()
    server._values.clear()
    server._joined.clear()
    connection: Any = _Socket(data)
    client = pmi._Client(connection)
    server._clients.add(client)
    while client in server._clients:
        server._receive(client)
    assert not server._in_barrier
    assert not server._finalizing


C10D_TARGETS = (
    Target(name="store-request", parse=parse_request, inputs=SERIALIZED | st.binary(max_size=64), max_bytes=MIB),
    Target(
        name="store-server",
        parse=serve_requests,
        inputs=st.lists(SERIALIZED, max_size=8).map(framed),
        max_bytes=4 * MIB,
        is_slow=True,
    ),
    Target(
        name="store-file",
        parse=replay_log,
        inputs=st.lists(SERIALIZED, max_size=6).map(_log) | st.binary(max_size=64),
        max_bytes=4 * MIB,
        is_slow=True,
    ),
    Target(name="store-values", parse=parse_values, inputs=JSON_INPUTS, max_bytes=8 * MIB),
    Target(name="failure-detector-token", parse=read_token, inputs=LINES, max_bytes=MIB),
    Target(name="failure-detector-messages", parse=read_messages, inputs=LINES, max_bytes=4 * MIB),
    Target(name="pmi", parse=ask_pmi, inputs=PMI_INPUTS, max_bytes=MIB),
)
