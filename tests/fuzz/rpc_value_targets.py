"""Parsers of rpc for values: pickles that are read as data, and what workers tell of themselves."""

import json
import pickle
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from gradwire.errors import LossCause, PolicyError, WorkerNameError
from gradwire.net.security import Audit
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.messages import Incoming
from gradwire.rpc.contracts.policy import Policy
from gradwire.rpc.contracts.worker import Member, RosterVersion
from gradwire.rpc.membership.roster import RosterError, RosterLog
from gradwire.rpc.wire.pickling import Packer
from gradwire.rpc.wire.plain_pickle import RestrictedReader
from hypothesis import strategies as st

from tests.fuzz.exposed import CodedError, Color, FrozenPoint, Pair, Point, count_to, echo, unexposed
from tests.fuzz.rpc_wire_targets import ME, MIB, PEER
from tests.fuzz.target import Target

__all__ = ["RPC_VALUE_TARGETS"]

# Pickles.

MAX_OPERATIONS = 1 << 16

KEYS = st.one_of(st.text(max_size=3), st.integers(), st.binary(max_size=3), st.tuples(st.integers()))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sets(KEYS, max_size=3)
    | st.sampled_from(
        [
            1 << 3000,
            *[sign * (1 << bits) + offset for sign in (1, -1) for bits in (40, 61, 62, 64) for offset in (0, 1)],
            bytearray(b"bytes"),
            slice(1, None, -(1 << 62)),
            range(0, 1 << 62, 3),
            UnicodeDecodeError("utf-8", b"bytes", 1, 2, "reason"),
            UnicodeEncodeError("utf-8", "text", 1, 2, "reason"),
            UnicodeTranslateError("text", 1, 2, "reason"),
            SyntaxError("text", ("file.py", 1, 2, "line", 1, 3)),
            FileNotFoundError(2, "no such file", "name", None, "other"),
            BlockingIOError(11, "text", 3),
            ExceptionGroup("several", [KeyError(1), StopIteration(2)]),
            ImportError("text"),
            frozenset({1}),
            range(3),
            1j,
            torch.float32,
            torch.device("cuda", 1),
            torch.Size([2, 3]),
            torch.ones(2, 3),
            torch.ones(2, requires_grad=True),
            torch.nn.Linear(1, 1).state_dict(),
            ValueError("text", 3),
            WorkerNameError("name", "rule"),
            LossCause.EXIT,
            echo,
            count_to,
            unexposed,
            Point(1, [2]),
            FrozenPoint(1, 2),
            Pair("a", {}),
            Color.RED,
            CodedError(7),
        ]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def _twice(levels: int) -> bytes:
    """Returns opcodes for a tuple that has the next one twice on each level."""
    return b")" + b"".join(b"\x94h" + bytes([level]) + pickle.TUPLE2 for level in range(levels))


def _named(module: str, name: str) -> bytes:
    texts = (pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"".join(texts) + pickle.STACK_GLOBAL


GROWING = st.builds(
    lambda levels, use: b"\x80\x05" + use(_twice(levels)) + b".",
    st.sampled_from([3, 60]),
    st.sampled_from(
        [
            lambda value: value,
            lambda value: b"}" + value + b"Ns",
            lambda value: b"(" + value + pickle.FROZENSET,
            lambda value: _named("gradwire.errors", "LossCause") + value + b"\x85R",
            lambda value: _named("gradwire.errors", "WorkerNameError") + value + b"h\x00\x86R",
            lambda value: b"(" + value + b"h\x00h\x00h\x01h\x01\x8f(h\x00h\x01\x90t",
            *[
                lambda value, name=name: value + _named("builtins", name) + b"h\x00\x85R"
                for name in ("KeyError", "OSError", "SyntaxError", "ExceptionGroup", "range", "slice", "complex")
            ],
        ]
    ),
)
PICKLES = VALUES.map(lambda value: bytes(Packer().pack(value, "the value").body)) | GROWING


def _read_pickle(accepts: Any, data: bytes) -> None:
    """Reads a pickle; what comes out of it can be walked through, printed, hashed and compared."""
    reader = RestrictedReader(ME, Policy(accepts=accepts, max_operations=MAX_OPERATIONS), Audit(ME.name))
    message = Incoming(PEER, agent_pb2.Envelope(), data, [torch.ones(2), torch.ones(3)])
    message.references.append(object())
    value = reader.read(message)
    left, count = [value], 0
    while left:
        each = left.pop()
        count += 1
        assert count <= MAX_OPERATIONS
        if isinstance(each, dict):
            left += [*each, *each.values()]
        elif isinstance(each, list | tuple | set | frozenset) and not isinstance(each, torch.Size):
            left += each
        elif isinstance(each, BaseException):
            traceback.format_exception(each)
    for use in (str, repr, hash, lambda value: value == reader.read(message), {}.get):
        with suppress(TypeError, ValueError, RuntimeError):  # a list has no hash, a tensor no truth
            use(value)


def read_plain_pickle(data: bytes) -> None:
    """Reads a pickle that may have plain data, and the names of exposed functions."""
    with suppress(PolicyError):
        _read_pickle("plain", data)


def read_exposed_pickle(data: bytes) -> None:
    """Reads a pickle that may have instances of exposed classes, whose constructors raise what they like."""
    try:
        _read_pickle("exposed", data)
    except (AssertionError, MemoryError, RecursionError):
        raise
    except Exception:
        return


# Members.

MEMBER = asdict(Member(PEER, "unix:/run/x", device_count=1, network="n", process="p", directory="d"))
JSON_VALUES = st.sampled_from(
    [None, True, 0, -1, 2**80, 1e999, "", "text", "\ud800", "\n", [], {}, {"a": 1}, {"a": {"cuda:0": "cuda:1"}}]
)


def _changed(record: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    return {**record, name: value}


MEMBERS = st.one_of(
    st.builds(_changed, st.just(MEMBER), st.sampled_from([*MEMBER, "other"]), JSON_VALUES),
    st.integers(0, 3).map(lambda number: {**MEMBER, "info": {"name": f"worker{number}", "id": number}}),
    JSON_VALUES,
)
ENTRIES = st.one_of(
    MEMBERS.map(lambda member: {"join": member}),
    st.sampled_from([0, 1, 2, True, "1"]).map(lambda number: {"leave": number}),
    JSON_VALUES,
)
ROSTERS = st.lists(ENTRIES.map(json.dumps), max_size=5).map(lambda lines: "\n".join(lines).encode())

MAX_ERROR_CHARS = 1000
"""Of the text that the worker is told whose hello says so."""


class _Store:
    """Has the entries of a log."""

    def __init__(self, entries: Sequence[bytes]) -> None:
        self._entries = {f"rpc/dynamic/{position}": entry for position, entry in enumerate(entries)}

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._entries for key in keys)

    def get(self, key: str) -> bytes:
        return self._entries[key]


def learn_roster(data: bytes) -> None:
    """Learns the entries in a store, of which a hello says that there are so many."""
    entries = data.split(b"\n")
    store: Any = _Store(entries)
    log = RosterLog(store)
    error = ""
    try:
        log.learn(RosterVersion(len(entries), log.version.digest))
    except RosterError as refusal:
        error = str(refusal)
    assert len(error) <= MAX_ERROR_CHARS
    for member in log.members():
        _check_member(member)


def _check_member(member: Member) -> None:
    """Checks that everything can be done with a member that is done with members."""
    assert {member: str(member)}
    assert isinstance(member.has_unix_socket, bool)
    assert member.directory + member.network + member.process + member.host + member.address
    assert Member.from_record(json.loads(json.dumps(asdict(member)))) == member


def _target(name: str, parse: Callable[[bytes], None], inputs: st.SearchStrategy[bytes], mebibytes: int) -> Target:
    return Target(name=f"rpc-{name}", parse=parse, inputs=inputs, max_bytes=mebibytes * MIB)


RPC_VALUE_TARGETS = (
    _target("plain-pickles", read_plain_pickle, PICKLES, 8),
    _target("exposed-pickles", read_exposed_pickle, PICKLES, 8),
    _target("roster", learn_roster, ROSTERS, 2),
)
