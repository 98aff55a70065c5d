"""`pickler="cloudpickle"`: functions and classes by value."""

import sys
import threading
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import PolicyError, RpcError, SerializationError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.remote_functions import add, assert_clean, identity

here: Any = sys
"""What keeps values in a process."""


@pytest.fixture
def pair(workers):
    """Two workers that send code; in the end no reference, call, context or stream may be left."""
    started = workers.rpc(2, pickler="cloudpickle")
    yield started
    workers.each(started, assert_clean)


def call_lambda():
    offset = 3
    return rpc.rpc_sync("worker1", lambda x: x + offset, (4,))


def call_recursive():
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    return rpc.rpc_sync("worker1", factorial, (5,))


def call_class():
    class Local:
        def __init__(self, value):
            self.value = value

        def doubled(self):
            return 2 * self.value

    sent = rpc.rpc_sync("worker1", lambda made: Local(made.doubled()), (Local(3),))
    assert type(sent) is Local
    return sent.value


def call_main():
    main = sys.modules["__main__"]
    exec("LIMIT = 7\ndef limited(x):\n    return min(x, LIMIT)", vars(main))  # noqa: S102
    return rpc.rpc_sync("worker1", main.limited, (10,))


def call_main_by_name():
    main = sys.modules["__main__"]
    exec("def of_a_cell():\n    return 1", vars(main))  # noqa: S102
    advice = "the cells of a notebook are none.*RpcBackendOptions.pickler=.cloudpickle"
    with pytest.raises(SerializationError, match=f"of_a_cell.*{advice}"):
        rpc.rpc_sync("worker1", main.of_a_cell)


def test_without_it_the_error_of_a_function_of_the_program_advises_it(two_workers):
    two_workers[0].run(call_main_by_name)


def answer_function():
    return rpc.rpc_sync("worker1", lambda n: lambda x: x * n, (6,))(7)


def by_remote():
    made = rpc.remote("worker1", lambda: lambda x: x + 1)
    assert rpc.rpc_sync("worker1", lambda ref: ref.local_value()(4), (made,)) == 5
    return made.to_here()(1)


def by_stream():
    def squares(n):
        for i in range(n):
            yield lambda i=i: i * i

    return [each() for each in rpc.rpc_stream("worker1", squares, (4,))]


def by_broadcast():
    large = torch.ones(300, 1000)
    futures = rpc.broadcast_call(["worker0", "worker1"], lambda x, y: float(x.sum()) + y, (large, 1))
    return [future.wait() for future in futures]


def by_async_execution():
    @rpc.functions.async_execution
    def later(x):
        return rpc.rpc_async("worker0", lambda: x + 1)

    return rpc.rpc_sync("worker1", later, (1,))


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (call_lambda, 7),
        (call_recursive, 120),
        (call_class, 6),
        (call_main, 7),
        (answer_function, 42),
        (by_remote, 2),
        (by_stream, [0, 1, 4, 9]),
        (by_broadcast, [300001.0, 300001.0]),
        (by_async_execution, 2),
    ],
)
def test_code_travels(pair, check, expected):
    assert pair[0].run(check) == expected


def test_errors_of_local_classes_arrive_as_themselves(pair):
    def check():
        class OddError(Exception):
            def __init__(self, number):
                super().__init__(number)
                self.explain = lambda: f"{number} is odd"

        def fail(number):
            raise OddError(number)

        def fail_in_a_stream():
            yield 1
            raise OddError(5)

        with pytest.raises(OddError) as caught:
            rpc.rpc_sync("worker1", fail, (3,))
        assert caught.value.explain() == "3 is odd"
        with pytest.raises(OddError) as caught:
            rpc.remote("worker1", fail, (7,)).to_here()
        assert caught.value.explain() == "7 is odd"
        with pytest.raises(OddError) as caught:
            list(rpc.rpc_stream("worker1", fail_in_a_stream))
        return caught.value.explain()

    assert pair[0].run(check) == "5 is odd"


def test_what_can_be_imported_is_still_named(pair):
    def check():
        assert rpc.rpc_sync("worker1", identity, (add,)) is add
        assert rpc.rpc_sync("worker1", identity, (nn.Linear,)) is nn.Linear

    pair[0].run(check)


def test_tensors_of_closures_are_not_in_the_pickle(pair):
    def check():
        weight = torch.randn(300, 1000)
        sent = rpc.rpc_sync("worker1", lambda x: float((weight * x).sum()), (2,))
        assert sent == pytest.approx(float((weight * 2).sum()))

    pair[0].run(check)
    body = len(cloudpickle.dumps(lambda: None))

    def pack():
        from gradwire.rpc.wire.pickling import Packer

        weight, tied = torch.randn(300, 1000), nn.Linear(3, 3)
        packed = Packer("cloudpickle").pack((lambda: (weight, tied), (), {}), "the call")
        return len(packed.body), [tuple(each.shape) for each in packed.tensors]

    nbytes, shapes = pair[0].run(pack)
    assert nbytes < body + 2000
    assert (300, 1000) in shapes


def test_gradients_flow_through_closures(pair):
    def check():
        with autograd.context() as context:
            weight = torch.ones(3, requires_grad=True)
            result = rpc.rpc_sync("worker1", lambda x: (weight * x).sum(), (torch.full((3,), 2.0),))
            autograd.backward(context, [result])
            return autograd.get_gradients(context)[weight].tolist()

    assert pair[0].run(check) == [2, 2, 2]


def test_a_reference_in_a_closure_keeps_its_value_alive(pair):
    a, b = pair

    def check():
        def send():
            held = rpc.remote("worker1", lambda: [1])
            return rpc.rpc_sync("worker1", lambda: lambda: held)

        here.kept = send()  # from here on the only one who refers to it
        return here.kept().to_here()

    def use():
        assert here.kept().to_here() == [1]
        del here.kept

    assert a.run(check) == [1]
    a.run(use)

    def keep_there():
        reference = rpc.remote("worker0", lambda: [2])

        def keep():
            here.kept = lambda: reference.to_here()

        rpc.rpc_sync("worker1", keep)

    a.run(keep_there)
    assert b.run(lambda: here.kept()) == [2]
    b.run(lambda: delattr(here, "kept"))


def test_what_does_not_pickle_is_named(pair):
    def check():
        lock = threading.Lock()
        with pytest.raises(SerializationError, match="lock") as caught:
            rpc.rpc_sync("worker1", lambda: lock)
        assert caught.value.path == "the function.__closure__ lock"

    pair[0].run(check)


def test_without_the_option_the_error_names_it(two_workers):
    def check():
        with pytest.raises(SerializationError, match='pickler="cloudpickle"'):
            rpc.rpc_sync("worker1", lambda: 1)

    two_workers[0].run(check)


@pytest.mark.parametrize("accepts", ["exposed", "plain"])
def test_policies_refuse_code(workers, accepts):
    policy = rpc.Policy(accepts=accepts, exposed=("tests.remote_functions.*", "cloudpickle.cloudpickle.*"))
    a, b = workers.rpc(2, pickler="cloudpickle", policy=policy)

    def check():
        def mark():
            here.ran = True

        for call in (rpc.rpc_sync, lambda *given: rpc.remote(*given).to_here()):
            with pytest.raises(PolicyError, match="it has code"):
                call("worker1", mark)
            with pytest.raises(PolicyError, match="top level of a module"):
                call("worker1", identity, (mark,))
        with pytest.raises(PolicyError, match="it has code"):
            list(rpc.rpc_stream("worker1", mark))
        assert rpc.rpc_sync("worker1", add, (1, 2)) == 3

    a.run(check)
    assert not b.run(lambda: hasattr(here, "ran"))
    assert b.run(lambda: rpc.debug_info()["refused_messages"]["worker0"]) == 5


def test_a_worker_without_cloudpickle(workers):
    (worker,) = workers(1)

    def check():
        sys.modules["cloudpickle"] = None
        with pytest.raises(RpcError, match=r"pip install cloudpickle"):
            rpc.RpcBackendOptions(pickler="cloudpickle")
        with pytest.raises(ValueError, match="'dill': give one of"):
            rpc.RpcBackendOptions(pickler="dill")

    worker.run(check)


def join(url, rank, pickler):
    options = rpc.RpcBackendOptions(init_method=url, pickler=pickler)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)


def test_a_callee_needs_cloudpickle_but_not_the_option(workers, tmp_path):
    a, b = workers(2)
    joining = [
        each.start(join, f"file://{tmp_path}/rendezvous", rank, pickler)
        for rank, (each, pickler) in enumerate([(a, "cloudpickle"), (b, "pickle")])
    ]
    for each in joining:
        each.result()

    def check():
        assert rpc.rpc_sync("worker1", lambda: 1) == 1
        with pytest.raises(SerializationError, match="the result"):  # the callee's pickler decides about that
            rpc.rpc_sync("worker1", lambda: lambda: 1)

    a.run(check)

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "cloudpickle":
                raise ModuleNotFoundError("No module named 'cloudpickle'", name=name)

    def forget():
        for name in [each for each in sys.modules if each.partition(".")[0] == "cloudpickle"]:
            del sys.modules[name]
        sys.meta_path.insert(0, Finder())

    def fail():
        with pytest.raises(SerializationError, match=r"'worker1' has no cloudpickle: pip install"):
            rpc.rpc_sync("worker1", lambda: 1)

    b.run(forget)
    a.run(fail)


def module_level(x):
    return x


VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(captured=VALUES, rows=st.integers(0, 80), with_reference=st.booleans())
def test_what_a_closure_captures_arrives(captured, rows, with_reference):
    """Packs and unpacks without workers: the namespaces of one message do not leak into the next."""
    from gradwire.rpc.contracts.extension import Extension
    from gradwire.rpc.wire.pickling import Packer, unpickle

    class Reference:
        def __reduce__(self):
            raise AssertionError("references are not pickled")

    class References(Extension):
        reference_type = Reference

        def __init__(self):
            """Needs no agent."""

    packer = Packer("cloudpickle")
    packer.add(References())
    for part in range(2):
        tensor, reference = torch.arange(rows * 100), Reference() if with_reference else None
        packed = packer.pack(lambda: (captured, tensor, reference, module_level, part), "it")  # noqa: B023
        arrived = unpickle(packed.body, packed.tensors, packed.references)()
        assert arrived[0] == captured
        assert torch.equal(arrived[1], tensor)
        assert arrived[2] is reference
        assert arrived[3] is module_level
        assert arrived[4] == part
        assert len(packed.references) == with_reference


def test_namespaces_of_messages_are_apart():
    from gradwire.rpc.wire.pickling import Packer

    packer, bodies = Packer("cloudpickle"), []
    for number in range(3):
        module: Any = ModuleType(f"made{number}")
        exec("def read():\n    return NUMBER", vars(module))  # noqa: S102
        module.NUMBER = number
        bodies.append(packer.pack(module.read, "it").body)
        del module
    assert [cloudpickle.loads(body)() for body in bodies] == [0, 1, 2]
