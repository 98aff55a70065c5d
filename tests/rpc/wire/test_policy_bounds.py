"""What a policy lets strangers build is bounded in work and memory, and no use of it ends the process."""

import builtins
import contextlib
import pickle
import re
import resource
import struct
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradwire
import pytest
import torch
from gradwire import rpc
from gradwire.errors import PolicyError
from gradwire.net.security import Audit
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.wire.plain_pickle import RestrictedReader
from gradwire.rpc.wire.tensor_memory import DTYPE_NUMBERS
from gradwire.rpc.wire.tensors import decode_tensors, encode_tensors
from gradwire.rref.rref import call_method

from tests.rpc.wire import policy_functions as functions

ME, PEER = rpc.WorkerInfo("me", 0), rpc.WorkerInfo("peer", 1)
KIB, MIB = 1 << 10, 1 << 20

DOCUMENTATION = Path(gradwire.__file__).parent / "docs" / "policy.md"

HUGE = 1 << 60
"""Items of a range that must not become a tuple."""


def load(pickled: bytes, accepts: Any = "plain", **options: Any) -> Any:
    reader = RestrictedReader(ME, rpc.Policy(accepts=accepts, **options), Audit(ME.name))
    return reader.load(PEER, b"\x80\x05" + pickled + b".")


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG4 + struct.pack("<i", len(data)) + data


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return named(module, name) + b"(" + b"".join(arguments) + b"tR"


def doubled(levels: int) -> bytes:
    """Returns opcodes for a tuple that has the next one twice on each level, for the begin of a pickle."""
    return b")" + b"".join(b"\x94h" + bytes([level]) + pickle.TUPLE2 for level in range(levels))


# Attacks, each by itself. Those that used to take seconds or gigabytes are as small here as still shows that they
# are refused: with the old code they are not.


def test_the_length_of_a_range_is_not_computed_of_huge_numbers():
    for name in ("range", "slice"):
        with pytest.raises(PolicyError, match=f"a {name} has ints of 64 bits"):
            load(call("builtins", name, number(0), number(1 << 9000), number((1 << 4000) + 5)))
    whole = load(call("builtins", "range", number(-(1 << 63)), number((1 << 63) - 1), number(1)))
    assert whole == range(-(1 << 63), (1 << 63) - 1)
    assert load(call("builtins", "slice", b"N", number(5), b"N")) == slice(None, 5, None)


def test_the_text_of_an_error_reads_no_memory_that_is_not_its_own(workers):
    def decode(start: int, end: int) -> str:
        arguments = text("utf-8"), b"C\x01x", number(start), number(end), text("reason")
        return str(load(call("builtins", "UnicodeDecodeError", *arguments)))

    def check() -> None:
        assert decode(0, 1) == "'utf-8' codec can't decode byte 0x78 in position 0: reason"
        for start, end in ((-(1 << 40), 1 - (1 << 40)), (-1, 0), (0, 2), (1 << 40, 1)):
            with pytest.raises(PolicyError, match=f"positions {start} and {end} in 1 characters"):
                decode(start, end)

    workers(1)[0].run(check)


def test_no_exposed_error_reads_such_memory_either(workers):
    def check() -> None:
        arguments = text("utf-8"), b"C\x01x", number(0), number(1), text("reason")
        made = call(functions.__name__, "DecodingError", *arguments)
        state = b"}(" + text("start") + number(-(1 << 40)) + text("end") + number(1 - (1 << 40)) + b"ub"
        assert load(made, "exposed").start == 0
        with pytest.raises(PolicyError, match="positions"):
            str(load(made + state, "exposed"))

    workers(1)[0].run(check)


@pytest.mark.parametrize("name", ["SyntaxError", "ExceptionGroup", "OSError"])
def test_no_error_makes_a_tuple_of_a_range(name):
    huge = call("builtins", "range", number(1 << 16))  # 2 MiB as a tuple
    with limited_to(256 * KIB), pytest.raises(PolicyError, match="malformed"):
        load(call("builtins", name, text("text"), huge))
    with limited_to(256 * KIB), pytest.raises(PolicyError, match=r"malformed|not exposed"):
        rebuilt = named("gradwire.errors", "rebuild_exception") + b"(" + named("builtins", name)
        load(rebuilt + text("text") + huge + b"\x86}tR")


def test_the_marks_below_a_line_are_few():
    place = b"(" + text("file.py") + b"K\x01K\x01" + text("x") + b"K\x01" + number(1 << 40) + b"t"
    with pytest.raises(PolicyError, match="end_offset of a SyntaxError"):
        load(call("builtins", "SyntaxError", text("text"), place))


LARGE = b"B" + struct.pack("<I", 64 * KIB) + bytes(64 * KIB)
SMALL_TENSOR = b"h\x01K" + bytes([DTYPE_NUMBERS[torch.uint8]]) + number(64 * KIB) + b"\x85h\x00\x87R"

REPEATED = {
    "texts are compared": LARGE + b"\x94" + LARGE + b"\x94}(h\x00N" + b"h\x01N" * 100 + b"u",
    "texts are printed": LARGE + b"\x94(" + b"h\x00" * 100 + b"t",
    "numbers are hashed": number(1 << (8 * 64 * KIB)) + b"\x94}(" + (b"(" + b"h\x00" * 10 + b"tN") * 10 + b"u",
    "bytes are copied": LARGE
    + b"\x94"
    + named("gradwire.rpc.wire.small_tensors", "small_tensor")
    + b"\x94("
    + SMALL_TENSOR * 40
    + b"t",
    "states are copied": b"}("
    + b"".join(text(f"name{index}") + b"N" for index in range(300))
    + b"u\x94"
    + named("builtins", "ValueError")
    + b"\x94"
    + b"h\x01)Rh\x00b" * 40,
    "arguments are hashed": doubled(9)
    + b"\x94"
    + named("tests.rpc.wire.policy_functions", "Names")
    + b"\x94"
    + b"h\x0ah\x09\x85R" * 20,
    "errors are formatted": named("builtins", "ValueError") + b"\x94(" + b"h\x00)R" * 20 + b"t",
    "keys are compared": b"("
    + b"K\x01" * 40
    + b"t\x94}("
    + b"".join(b"h\x00" + number(index * ((1 << 61) - 1)) + b"\x86N" for index in range(60))
    + b"u",
}
"""What uses something again that the pickle has once."""


@pytest.mark.parametrize("attack", REPEATED)
def test_what_is_there_once_is_counted_as_often_as_it_is_used(attack):
    with limited_to(8 * MIB), pytest.raises(PolicyError, match="max_operations=4000"):
        load(REPEATED[attack], "exposed", max_operations=4000)


@pytest.mark.parametrize("kind", ["dict", "set", "frozenset"])
def test_places_of_numbers_in_a_table_are_counted(kind):
    """A peer can choose numbers, of different hashes, so that each is looked for in the places of all others."""
    put = {
        "dict": lambda keys: b"}(" + b"".join(key + b"N" for key in keys) + b"u",
        "set": lambda keys: b"\x8f(" + b"".join(keys) + b"\x90",
        "frozenset": lambda keys: b"(" + b"".join(keys) + pickle.FROZENSET,
    }[kind]
    keys = [b"J" + struct.pack("<i", index << 8) for index in range(4000)]
    assert len(load(put(keys[:2000]), max_operations=8500)) == 2000
    with pytest.raises(PolicyError, match="max_operations=10000"):
        load(put(keys), max_operations=10_000)


def test_equal_hashes_are_compared_a_bounded_number_of_times():
    functions.Colliding.compared = 0
    values = b"".join(
        call(functions.__name__, "Colliding", b"J" + struct.pack("<i", index)) + b"N" for index in range(1001)
    )
    with pytest.raises(PolicyError, match="1000 keys"):
        load(b"}(" + values + b"u", "exposed")
    assert 0 < functions.Colliding.compared <= 1000 * 1000 // 2


def test_long_names_are_not_looked_up():
    long = pickle.BINUNICODE + struct.pack("<I", 3000) + b"a." * 1500
    with pytest.raises(PolicyError, match="a name of more than 2000 characters"):
        load(text("builtins") + long + pickle.STACK_GLOBAL)


def test_a_flag_has_no_millions_of_bits():
    assert (
        load(call(functions.__name__, "Mode", number(3)), "exposed") == functions.Mode.READ | functions.Mode.WRITE
    )
    with pytest.raises(PolicyError, match="malformed"):
        load(call(functions.__name__, "Mode", number((1 << 100) - 1)), "exposed")


def test_ranges_and_tensors_are_no_arguments(workers):
    """`f(*range(2**60))` takes all memory."""
    pair = workers.rpc(2, policy=rpc.Policy(accepts="plain"))
    workers.each(pair, functions.load)

    def check() -> None:
        rref = rpc.remote("worker1", functions.Counter, (1,))
        rref._get_future().wait()  # calls that name no values they need do not wait for them
        for args in (range(1 << 16), torch.empty(1 << 16, device="meta"), "text"):
            with pytest.raises(TypeError, match=f"args is a {type(args).__name__}: give a tuple"):
                rpc.rpc_sync("worker1", call_method, (tuple(rref._handle.id), "add", args, {}))
        assert rpc.rpc_sync("worker1", call_method, (tuple(rref._handle.id), "add", (1,), {})) == 2

    pair[0].run(check)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantized_tensors_that_torch_cannot_read_are_refused():
    """torch ends the process where it prints one of qint32 with zero points that are floats."""
    parts = torch.tensor([0.1, 0.2]), torch.tensor([1.0, 2.0])
    sent = torch.quantize_per_channel(torch.zeros(2, 2), *parts, 0, torch.quint8)
    payloads: list[bytes] = []

    def put(data: memoryview) -> agent_pb2.Payload:
        payloads.append(bytes(data))
        return agent_pb2.Payload(inline=bytes(data))

    (message,) = encode_tensors([sent], put)
    (received,) = decode_tensors([message], lambda payload: payload.inline)
    assert repr(received) == repr(sent)
    message.dtype, message.data.inline = DTYPE_NUMBERS[torch.qint32], bytes(16)
    with pytest.raises(ValueError, match="malformed tensor: scales and zero points of dtypes"):
        decode_tensors([message], lambda payload: payload.inline)


# Everything that can be built, of everything that it can be built of.

PARTS: dict[str, bytes] = {
    "None": b"N",
    "text": text("text"),
    "bytes": b"C\x05bytes",
    "bytearray": pickle.BYTEARRAY8 + struct.pack("<Q", 5) + b"bytes",
    "negative": number(-(1 << 40)),
    "next": number(1 - (1 << 40)),
    "large": number(1 << 62),
    "larger": number(1 << 64),
    "huge": number(1 << 100_000),
    "float": b"G" + struct.pack(">d", 1e308),
    "range": call("builtins", "range", number(HUGE)),
    "slice": call("builtins", "slice", number(HUGE)),
    "list": b"](K\x01K\x02e",
    "nested": b")" + b"".join(b"\x94h" + bytes([level]) + pickle.TUPLE2 for level in range(6)),
    "pair": b"K\x01" + text("x") + b"\x86",
    "place": b"(" + text("file.py") + number(1 << 62) + number(-(1 << 62)) + text("x") + b"t",
    "class": named("builtins", "ValueError"),
    "errors": b"](" + call("builtins", "ValueError") * 2 + b"e",
    "device": call("torch", "device", text("cpu")),
    "size": call("torch", "Size", number(1 << 62) + number(1 << 62) + b"\x86"),
}

ERRORS = {
    (cls.__new__, cls.__init__, cls.__str__, cls.__base__): cls
    for cls in vars(builtins).values()
    if isinstance(cls, type) and issubclass(cls, Exception)
}.values()
"""One exception class for each constructor in C."""

CALLED = [
    ("builtins", "complex"),
    ("builtins", "range"),
    ("builtins", "slice"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("gradwire.rpc.wire.small_tensors", "small_tensor"),
    ("gradwire.errors", "LossCause"),
    ("gradwire.errors", "Outcome"),
    ("gradwire.rpc.contracts.worker", "WorkerInfo"),
    *(("builtins", cls.__name__) for cls in ERRORS),
]


def arguments_of(name: str) -> Iterator[bytes]:
    """Yields arguments for a class: each part alone, and in each place among others that may fit."""
    parts = PARTS.values()
    yield b""
    yield from parts
    for part in parts:
        yield from (text("text") + part, part + text("text"), part * 2, part * 5)
    if name.startswith("Unicode"):
        for data in (b"C\x05bytes", text("bytes")):
            for first in (b"K\x01", PARTS["negative"], PARTS["large"]):
                for second in (b"K\x02", PARTS["next"], PARTS["huge"], PARTS["float"]):
                    yield text("utf-8") + data + first + second + text("reason")
                    yield data + first + second + text("reason")


def use(value: Any) -> None:
    """Does what is done with values: prints, hashes and compares them."""
    for operation in USES:
        with contextlib.suppress(TypeError, ValueError, OverflowError, AttributeError, RuntimeError):
            operation(value)


USES: tuple[Callable[[Any], object], ...] = (
    str,
    repr,
    hash,
    lambda value: value == value,  # noqa: PLR0124
    lambda value: {value: value},
    lambda value: "".join(traceback.format_exception(value)),
    lambda value: "".join(traceback.format_exception(RuntimeError("text", value))),
)


def use_everything() -> int:
    """Makes everything of everything, and uses it; returns how much has been made."""
    made = 0
    for module, name in CALLED:
        for arguments in arguments_of(name):
            with contextlib.suppress(PolicyError):
                value = load(call(module, name, arguments))
                use(value)
                made += 1
        attributes = b"}(" + text("start") + number(-(1 << 40)) + text("__notes__") + PARTS["nested"] + b"ub"
        with contextlib.suppress(PolicyError):
            use(load(call(module, name, text("text")) + attributes))
    return made


def test_everything_that_can_be_built_can_be_used(workers):
    def check() -> tuple[int, int]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        made = use_everything()
        return made, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    made, kibibytes = workers(1)[0].run(check)
    assert made > 1000
    assert kibibytes < 64 * KIB


def test_the_documentation_has_all_that_can_be_built():
    table = DOCUMENTATION.read_text().partition("| value | what bounds it |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"`([\w.]+)`", table))
    for module, name in CALLED:
        public = "Exception" if module == "builtins" and name not in ("complex", "range", "slice") else name
        assert {name, public, f"{module}.{name}"} & documented, name


@contextlib.contextmanager
def limited_to(nbytes: int) -> Iterator[None]:
    """Asserts that the block allocates no more at any time, of memory that Python knows of."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()
