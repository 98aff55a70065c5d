"""Pickles that are read as data: what arrives as it was sent, and what a stranger's pickle cannot do."""

import collections
import contextlib
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc

import pytest
import torch
from gradwire import rpc
from gradwire.errors import LossCause, PolicyError, SerializationError, StoreTimeoutError, WorkerLostError
from gradwire.net.security import Audit
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.messages import Incoming
from gradwire.rpc.wire.failures import decode_failure, encode_failure
from gradwire.rpc.wire.pickling import Packer
from gradwire.rpc.wire.plain_pickle import RestrictedReader
from hypothesis import given
from hypothesis import strategies as st

from tests.rpc.wire import policy_functions as functions
from tests.rpc.wire.policy_functions import Attack, Color, Counter, FrozenPoint, Names, Pair, Point, echo

ME, PEER = rpc.WorkerInfo("me", 0), rpc.WorkerInfo("peer", 1)
MODULE = functions.__name__


def reader(accepts: str = "plain", **options):
    return RestrictedReader(ME, rpc.Policy(accepts=accepts, **options), Audit(ME.name))


def round_trip(value, accepts: str = "plain", **options):
    packed = Packer().pack(value, "the value")
    message = Incoming(PEER, agent_pb2.Envelope(), packed.body, packed.tensors)
    return reader(accepts, **options).read(message)


def load(pickled: bytes, accepts: str = "plain", **options):
    return reader(accepts, **options).load(PEER, pickled)


PLAIN_KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.binary(), st.tuples(st.integers(), st.text()))
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.binary().map(bytearray)
    | st.sets(PLAIN_KEYS)
    | st.frozensets(PLAIN_KEYS)
    | st.sampled_from([torch.float32, torch.device("cuda", 1), torch.Size([2, 3]), torch.strided, range(3)]),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(PLAIN_KEYS, inner),
    max_leaves=30,
)


@given(PLAIN)
def test_plain_data_arrives_as_it_was(value):
    received = round_trip(value)
    assert received == value
    assert pickle.dumps(received) == pickle.dumps(
        pickle.loads(pickle.dumps(value))
    )  # types, sharing and order too


def test_large_plain_data():
    value = {
        "texts": ["x" * size for size in (0, 255, 256, 70_000)],
        "numbers": list(range(5000)),
        1 << 3000: b"k" * 300,
    }
    assert round_trip(value) == value


def test_what_is_shared_stays_shared():
    item = [1]
    first, second, third = round_trip([item, item, (item,)])
    assert first is second is third[0]


def test_tensors():
    large, small = torch.randn(300, 300), torch.arange(6).view(2, 3)
    parameter = torch.nn.Parameter(torch.ones(3))
    state = torch.nn.Linear(2, 2).state_dict()
    received = round_trip([large, small, small.double().requires_grad_(), parameter, state])
    assert torch.equal(received[0], large)
    assert torch.equal(received[1], small)
    assert torch.equal(received[2], small.double())
    assert isinstance(received[3], torch.nn.Parameter)
    assert type(received[4]) is collections.OrderedDict
    assert torch.equal(received[4]["weight"], state["weight"])
    assert vars(received[4]) == vars(state) != {}


def test_functions_by_name():
    assert round_trip((echo, (1,), {})) == (echo, (1,), {})
    assert round_trip(Counter.starting_at)(3).count == 3
    assert round_trip(functions.Decorated.exposed_static) is functions.Decorated.exposed_static
    assert round_trip(torch.add, exposed=["torch.add"]) is torch.add
    assert round_trip(torch.Tensor.add, exposed=["torch.Tensor.add"])(torch.ones(1), 1) == 2
    assert round_trip(functions.listed, exposed=[f"{MODULE}.l*"]) is functions.listed


@pytest.mark.parametrize(
    ("value", "patterns"),
    [
        (os.mkdir, ()),
        (eval, ()),
        (functions.unlisted, ()),
        (functions.unlisted, (f"{MODULE}.l*", "tests.*", "*.*", f"{MODULE}.unlisted.*")),
        (functions._private, (f"{MODULE}.*",)),
        (functions.Decorated, (f"{MODULE}.l*",)),
        (torch.mul, ("torch.add", "torch.*")),
        (subprocess.run, (f"{MODULE}.*", "sub.*")),
    ],
)
@pytest.mark.parametrize("accepts", ["plain", "exposed"])
def test_names_that_are_not_exposed(value, patterns, accepts):
    with pytest.raises(PolicyError, match="not exposed: decorate it with rpc.expose"):
        round_trip((value, (), {}), accepts, exposed=patterns)


@pytest.mark.parametrize(
    "name", ["os.mkdir", "imported_path.join", "os", "rpc.init_rpc", "Counter.__init__.__globals__"]
)
@pytest.mark.parametrize("accepts", ["plain", "exposed"])
def test_patterns_do_not_reach_what_a_module_has_imported(name, accepts):
    pickled = pickle.PROTO + b"\x05" + text(MODULE) + text(name) + pickle.STACK_GLOBAL + b"."
    with pytest.raises(PolicyError, match="not exposed"):
        load(pickled, accepts, exposed=[f"{MODULE}.*", f"{MODULE}.*.*"])


@pytest.mark.parametrize("name", ["runs_when_looked_at", "runs_when_looked_at.x", "WithDescriptor.described"])
def test_looking_a_name_up_runs_nothing(name):
    with pytest.raises(PolicyError, match="not exposed"):
        round_trip_name(MODULE, name, exposed=[f"{MODULE}.*", f"{MODULE}.*.*"])
    assert functions.LOOKED_AT == []


def test_a_name_is_imported_only_if_it_is_listed():
    unloaded = "this"  # prints a poem when it is imported
    pickled = pickle.PROTO + b"\x05" + text(unloaded) + text("s") + pickle.STACK_GLOBAL + b"."
    with pytest.raises(PolicyError, match="'this' is not imported here"):
        load(pickled, exposed=["*.*"])
    assert unloaded not in sys.modules
    assert round_trip_name("colorsys", "rgb_to_hsv", exposed=["colorsys.*"]) == sys.modules["colorsys"].rgb_to_hsv


def round_trip_name(module: str, name: str, **options):
    return load(pickle.PROTO + b"\x05" + text(module) + text(name) + pickle.STACK_GLOBAL + b".", **options)


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


INSTANCES = [
    Point(1, 2),
    FrozenPoint(1, 2),
    Color.RED,
    Pair(Point(1, 2), [3]),
    [Point(1, 2), {"x": FrozenPoint(3, 4)}],
]


@pytest.mark.parametrize("value", INSTANCES, ids=repr)
def test_instances_of_exposed_classes(value):
    assert round_trip(value, "exposed") == value
    with pytest.raises(PolicyError, match="instance of .* plain data only"):
        round_trip(value, "plain")


def test_more_instances_of_exposed_classes():
    names = round_trip(Names(["a", "b"]), "exposed")
    assert (type(names), names) == (Names, ["a", "b"])
    assert round_trip(Counter(3).add, "exposed")(2) == 5
    assert round_trip((Counter(3), (1,), {}), "exposed")[0](1) == 4
    with pytest.raises(PolicyError, match=r"Counter\._reset"):
        round_trip(Counter(3)._reset, "exposed")
    layer = functions.Layer(2, 3)
    received = round_trip(layer, "exposed", exposed=["collections.OrderedDict"])
    assert torch.equal(received.weight, layer.weight)


ERRORS = [
    ValueError("text", 3),
    KeyError("key"),
    FileNotFoundError(2, "no such file", "name"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "reason"),
    ExceptionGroup("several", [ValueError("one")]),
    WorkerLostError("w", "it died"),
    StoreTimeoutError(["key"], 3.0),
    SerializationError("args[0]", "it is a lock"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_arrive_as_they_were(error):
    received = decode_failure(encode_failure(error), "peer", lambda data: reader().load(PEER, data))
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert vars(received).keys() == vars(error).keys()


def test_errors_of_exposed_classes():
    def decode(error, accepts):
        return decode_failure(encode_failure(error), "peer", lambda data: reader(accepts).load(PEER, data))

    assert decode(functions.CodedError(7), "exposed").code == 7
    for error, accepts in ((functions.CodedError(7), "plain"), (functions.UnexposedError("text"), "exposed")):
        received = decode(error, accepts)
        assert type(received).__name__ == "RemoteUnpicklableError"
        assert str(error) in str(received)


# What strangers may send.


@pytest.mark.parametrize("accepts", ["plain", "exposed"])
@pytest.mark.parametrize("protocol", range(6))
def test_nothing_of_a_pickle_runs(tmp_path, accepts, protocol):
    folder = tmp_path / "made"
    attack = Attack(str(folder), process=0)
    values = [
        attack,
        (echo, (attack,), {}),
        {"key": [attack]},
        (Point(1, 2), attack),
    ]
    for value in values:
        with pytest.raises(PolicyError, match="refuses a message of worker 'peer'"):
            load(pickle.dumps(value, protocol), accepts)
    assert not folder.exists()
    pickle.loads(pickle.dumps(values[0], protocol))
    assert folder.exists()


@pytest.mark.parametrize("accepts", ["plain", "exposed"])
def test_a_function_is_checked_before_the_arguments_are_made(accepts):
    """Of a call whose function is not exposed, not even instances of exposed classes are made."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions.Point, "__setstate__", lambda _self, state: made.append(state), raising=False)
        with pytest.raises(PolicyError, match="unlisted"):
            round_trip((functions.unlisted, (Point(1, 2),), {}), accepts)
    assert made == []


@pytest.mark.parametrize("accepts", ["plain", "exposed"])
def test_malformed_values_are_refused(accepts):
    unhashable = b"\x80\x05}]Ns."
    no_device = b"\x80\x05" + text("torch") + text("device") + pickle.STACK_GLOBAL + text("x\ny") + b"\x85R."
    for pickled in (unhashable, no_device, b"\x80\x05(1.", b"", b"\x80\x05"):
        with pytest.raises(PolicyError, match="malformed|opcode") as caught:
            load(pickled, accepts)
        assert "\n" not in str(caught.value)


def test_methods_of_tensors():
    method = torch.ones(2).sum
    assert round_trip(method, "exposed", exposed=["torch.Tensor"])() == 2
    for accepts, exposed in (("plain", ["torch.Tensor"]), ("exposed", [])):
        with pytest.raises(PolicyError, match=r"torch\.Tensor\.sum"):
            round_trip(method, accepts, exposed=exposed)


def test_the_error_of_an_exposed_class_is_raised():
    with pytest.raises(TypeError, match="missing 1 required"):
        load(b"\x80\x05" + text(MODULE) + text("Pair") + pickle.STACK_GLOBAL + b"N\x85R.", "exposed")


def test_no_state_of_functions_or_classes_is_set():
    function = text(MODULE) + text("echo") + pickle.STACK_GLOBAL
    cls = text(MODULE) + text("Point") + pickle.STACK_GLOBAL
    state = b"}" + text("__defaults__") + b"N" + pickle.SETITEM
    slots = b"N" + state + pickle.TUPLE2
    for target in (function, cls):
        for built in (state, slots):
            for accepts in ("plain", "exposed"):
                with pytest.raises(PolicyError):
                    load(b"\x80\x05" + target + built + pickle.BUILD + b".", accepts)
    with pytest.raises(PolicyError):
        load(b"\x80\x05" + function + text("x") + pickle.APPEND + b".", "exposed")


def test_sizes_in_opcodes_allocate_nothing():
    bombs = [
        b"\x80\x05N" + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f.",
        *(b"\x80\x05" + opcode + struct.pack("<Q", 1 << 40) + b"." for opcode in (b"\x8e", b"\x96", b"\x8d")),
        *(b"\x80\x05" + opcode + b"\xff\xff\xff\x7f." for opcode in (b"B", b"X", b"\x8b")),
        b"\x80\x05" + pickle.FRAME + struct.pack("<Q", 1 << 60),
        b"\x80\x05N" + pickle.LONG_BINGET + b"\xff\xff\xff\xff.",
    ]
    tracemalloc.start()
    try:
        for bomb in bombs:
            with pytest.raises(PolicyError, match="malformed|cut off|opcode"):
                load(bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_depth_is_bounded():
    def nested(opcode: bytes, levels: int) -> bytes:
        return b"\x80\x05" + b")" + opcode * levels + b"."

    assert load(nested(pickle.TUPLE1, 7), max_depth=7) == ((((((((),),),),),),),)
    for levels in (8, 1_000_000):
        with pytest.raises(PolicyError, match="max_depth=7"):
            load(nested(pickle.TUPLE1, levels), max_depth=7)
    with pytest.raises(PolicyError, match="max_depth"):
        load(b"\x80\x05" + b"](" * 100_000 + b"e" * 100_000 + b".")
    deep = ()
    for _ in range(100):
        deep = [deep]
    with pytest.raises(PolicyError, match="max_depth=64"):
        round_trip(deep)
    assert round_trip(deep, max_depth=101) == deep


def test_the_number_of_items_is_bounded():
    assert round_trip([None] * 100, max_operations=200) == [None] * 100
    with pytest.raises(PolicyError, match="max_operations=200"):
        round_trip([None] * 200, max_operations=200)


def test_hashes_take_no_time():
    twice = b"\x80\x05)" + b"".join(b"\x94h" + bytes([level]) + pickle.TUPLE2 for level in range(60))
    for put in (b"}" + twice[2:] + b"Ns.", b"(" + twice[2:] + pickle.FROZENSET + b"."):
        with pytest.raises(PolicyError, match="max_operations"):
            load(b"\x80\x05" + put)
    assert round_trip(dict.fromkeys(range(5000)))
    with pytest.raises(PolicyError, match="1000 keys"):
        round_trip({index * ((1 << 61) - 1) for index in range(5000)})


def test_what_occurs_several_times_is_counted_each_time():
    """Hashing or printing a tuple that has the next one twice on each level does not end."""
    twice = b")" + b"".join(b"\x94h" + bytes([level]) + pickle.TUPLE2 for level in range(60))
    with pytest.raises(PolicyError, match="more than max_operations=1048576 values, if those that"):
        load(b"\x80\x05" + twice + b".")
    assert round_trip([(1, 2)] * 10, max_operations=30) == [(1, 2)] * 10
    with pytest.raises(PolicyError, match="in several places are counted"):
        round_trip([[1, 2, 3]] * 10, max_operations=35)


@pytest.mark.parametrize("name", ["LossCause", "WorkerNameError", "StoreTimeoutError"])
def test_no_constructor_of_gradwire_runs(name):
    """They print what they are given."""
    named = text("gradwire.errors") + text(name) + pickle.STACK_GLOBAL
    with pytest.raises(PolicyError, match="not exposed|its 'gradwire.errors.LossCause' is malformed"):
        load(b"\x80\x05" + named + b"]K\x01" + pickle.TUPLE2 + pickle.REDUCE + b".")
    assert round_trip(LossCause.EXIT) is LossCause.EXIT


def test_cycles_are_refused():
    cycle: list = []
    cycle.append([cycle])
    loop: list = []
    loop.append(loop)
    itself: dict = {}
    itself["key"] = itself
    for value in (cycle, loop, itself):
        with pytest.raises(PolicyError, match="contains itself"):
            round_trip(value)


@given(st.binary(max_size=200))
def test_any_bytes(data):
    for accepts in ("plain", "exposed"):
        for prefix in (b"", b"\x80\x05"):
            with contextlib.suppress(PolicyError):
                load(prefix + data, accepts)


@given(st.data())
def test_damaged_pickles(data):
    value = (
        echo,
        ([1, "two", {"three": (4.0, None)}, {5}, torch.ones(2)],),
        {"x": torch.float32, "y": ValueError("z")},
    )
    body = bytearray(Packer().pack(value, "the value").body)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PolicyError):
        load(bytes(body))


def test_refusals_are_counted_by_sender():
    restricted = reader()
    for _ in range(3):
        with pytest.raises(PolicyError):
            restricted.load(PEER, pickle.dumps(print))
    assert restricted.refused == {"peer": 3}
    assert restricted.load(ME, pickle.dumps(print)) is print  # from this worker itself


def test_names_in_errors_are_escaped_and_short():
    with pytest.raises(PolicyError) as caught:
        load(
            b"\x80\x05"
            + text("evil\nlog line")
            + pickle.BINUNICODE
            + struct.pack("<I", 9000)
            + b"x" * 9000
            + b"\x93."
        )
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_each_caller_has_its_policy():
    policy = rpc.Policy(
        accepts="plain", callers={"admin": rpc.Policy(), "web*": rpc.Policy(accepts="exposed"), "w*": rpc.Policy()}
    )
    assert policy.of("admin").accepts == "anything"
    assert policy.of("web3").accepts == "exposed"
    assert policy.of("worker").accepts == "anything"
    assert policy.of("other").accepts == "plain"
    assert not rpc.Policy().restricts
    assert rpc.Policy(callers={"w": policy.of("web1")}).restricts


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"accepts": "all"}, "accepts is 'all'"),
        ({"exposed": "torch.add"}, "exposed is 'torch.add': give a list"),
        ({"exposed": ["add"]}, "exposed has 'add'"),
        ({"exposed": ["a..b"]}, r"exposed has 'a\.\.b'"),
        ({"callers": {"w": "plain"}}, "callers has 'w'"),
        ({"callers": {"w": rpc.Policy(callers={"v": rpc.Policy()})}}, "that has callers itself"),
        ({"max_depth": 0}, "max_depth is 0"),
        ({"max_operations": True}, "max_operations is True"),
    ],
)
def test_wrong_policies(options, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        rpc.Policy(**options)


def test_what_cannot_be_exposed():
    with pytest.raises(TypeError, match="list its name in `exposed`"):
        rpc.expose(len)
    with pytest.raises(TypeError, match="give a function or a class"):
        rpc.expose(3)
    with pytest.raises(TypeError, match="policy is 'plain': give a Policy"):
        rpc.RpcBackendOptions(policy="plain")


def short(text: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()


def exception_with(name: str) -> bytes:
    """Pickles a ValueError with an exposed function as an attribute; the pickle goes on after it."""
    error = pickle.PROTO + b"\x04" + short("builtins") + short("ValueError") + pickle.STACK_GLOBAL + b")R"
    return error + b"}" + short(name) + short(MODULE) + short("echo") + pickle.STACK_GLOBAL + b"sb"


@pytest.mark.parametrize("name", ["extend", "with_traceback", "__reduce_ex__"])
def test_an_exception_has_no_methods_of_its_own(name):
    with pytest.raises(PolicyError):
        load(exception_with(name) + b"(K\x01K\x02e.")
    if name != "extend":  # which exceptions do not have
        with pytest.raises(PolicyError, match="an attribute in place of a method"):
            load(exception_with(name) + b".")
