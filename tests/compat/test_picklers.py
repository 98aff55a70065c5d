"""Picklers that a program gives to torch: `_use_rpc_pickler`, and `_register_reducer` of torch's own."""

import io
import sys
from typing import Any

import cloudpickle
import pytest
import torch
from gradwire import rpc
from gradwire.net.security import Audit
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.wire.plain_pickle import RestrictedReader
from torch.distributed.rpc.internal import _InternalRPCPickler

from tests.compat.test_names import on_torch_names, torch_workers  # noqa: F401 - a fixture
from tests.remote_functions import add, assert_clean, identity


class Recorder(_InternalRPCPickler):
    """As programs write them: torch's pickler, and something more."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def serialize(self, obj):
        self.calls.append(obj.func.__name__)
        return super().serialize(obj)


class CodePickler(_InternalRPCPickler):
    """Sends functions by value."""

    def serialize(self, obj):
        tensors, stream = [], io.BytesIO()
        pickler = cloudpickle.Pickler.__new__(cloudpickle.Pickler)
        pickler.dispatch_table = {
            **cloudpickle.Pickler.dispatch_table,
            torch.Tensor: lambda tensor: tensors.append(tensor) or (receive_tensor, (len(tensors) - 1,)),
            torch.distributed.rpc.PyRRef: lambda reference: (receive_reference, (reference._serialize(),)),
        }
        pickler.__init__(stream, protocol=5)
        pickler.dump(obj)
        return stream.getvalue(), tensors


def receive_tensor(index):
    return _InternalRPCPickler._tensor_receiver(index)


def receive_reference(fork):
    return torch.distributed.rpc.PyRRef._deserialize(fork)


class Temperature:
    def __init__(self, degrees):
        self.degrees = degrees
        self.sensor = lambda: degrees  # which does not pickle


def in_kelvin(temperature):
    return Temperature, (temperature.degrees + 273,)


class Holder:
    """Has a reference, and pickles it as torch's RemoteModule does."""

    def __init__(self, reference):
        self.reference = reference


def reduce_holder(holder):
    return receive_holder, (holder.reference._serialize(),)


def receive_holder(fork):
    return Holder(receive_reference(fork))


def local_sum(x, reference):
    return x.sum() + reference.local_value()


@pytest.fixture
def pair(torch_workers):  # noqa: F811
    """Two workers that have joined by torch's names; they keep nothing in the end."""
    started = torch_workers(2)
    yield started
    for worker in started:
        worker.run(on_torch_names, lambda _: assert_clean())


def test_the_pickler_in_use_pickles_calls_of_python_functions(pair):
    def check(torch_rpc):
        recorder = Recorder()
        with torch_rpc.api._use_rpc_pickler(recorder):
            assert torch_rpc.rpc_sync("worker1", add, (1, 2)) == 3
            assert torch_rpc.rpc_async("worker1", add, args=(1,), kwargs={"b": 5}).wait() == 6
            reference = torch_rpc.remote("worker1", identity, (7,))
            assert reference.to_here() == 7
            assert torch_rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]  # not this one
        assert torch_rpc.rpc_sync("worker1", add, (1, 2)) == 3
        return recorder.calls

    assert pair[0].run(on_torch_names, check) == ["add", "add", "identity"]


def test_tensors_references_and_gradients_travel_with_it(pair):
    def check(torch_rpc):
        autograd = torch.distributed.autograd
        weight, large = torch.ones(3, requires_grad=True), torch.ones(300, 1000)
        with torch_rpc.api._use_rpc_pickler(Recorder()):
            reference = torch_rpc.remote("worker1", identity, (torch.tensor(4.0),))
            assert torch.equal(torch_rpc.rpc_sync("worker1", identity, (large,)), large)
            assert torch_rpc.rpc_sync("worker1", identity, (reference,)).to_here() == 4
            with autograd.context() as context:
                result = torch_rpc.rpc_sync("worker1", local_sum, (weight, reference))
                autograd.backward(context, [result])
                return result.item(), autograd.get_gradients(context)[weight].tolist()

    assert pair[0].run(on_torch_names, check) == (7.0, [1, 1, 1])


def test_a_pickler_that_sends_code(pair):
    def check(torch_rpc):
        reference = torch_rpc.remote("worker1", list, ([5],))
        weight = torch.full((2,), 3.0)
        with torch_rpc.api._use_rpc_pickler(CodePickler()):
            return torch_rpc.rpc_sync("worker1", lambda: weight.sum().item() + reference.local_value()[0])

    assert pair[0].run(on_torch_names, check) == 11.0


@pytest.mark.parametrize("own", [False, True])
def test_registered_reducers(pair, own):
    def check(torch_rpc):
        pickler = Recorder() if own else torch_rpc.internal._internal_rpc_pickler
        pickler._register_reducer(Temperature, in_kelvin)
        pickler._register_reducer(Holder, reduce_holder)
        with torch_rpc.api._use_rpc_pickler(pickler):
            assert torch_rpc.rpc_sync("worker1", degrees_of, (Temperature(7),)) == 280
            holder = Holder(torch_rpc.remote("worker1", list, ([3],)))
            return torch_rpc.rpc_sync("worker1", value_of, (holder,))

    assert pair[0].run(on_torch_names, check) == [3]


def degrees_of(temperature):
    return temperature.degrees


def value_of(holder):
    return holder.reference.local_value()


def answer_with_temperature():
    torch.distributed.rpc.internal._internal_rpc_pickler._register_reducer(Temperature, in_kelvin)
    return Temperature(1)


def test_registered_reducers_pickle_answers_too(pair):
    def check(torch_rpc):
        return torch_rpc.rpc_sync("worker1", answer_with_temperature).degrees

    assert pair[0].run(on_torch_names, check) == 274


def test_the_callee_deserializes_with_the_pickler_of_its_module(pair):
    a, b = pair

    class Doubling(_InternalRPCPickler):
        def deserialize(self, binary_data, tensor_table):
            call = super().deserialize(binary_data, tensor_table)
            return call._replace(args=tuple(2 * each for each in call.args))

    b.run(lambda: setattr(sys.modules["torch.distributed.rpc.internal"], "_internal_rpc_pickler", Doubling()))

    def check(torch_rpc):
        with torch_rpc.api._use_rpc_pickler(Recorder()):
            return torch_rpc.rpc_sync("worker1", add, (1, 2))

    assert a.run(on_torch_names, check) == 6


def test_what_is_wrong_is_said(pair):
    def check(torch_rpc):
        class Text:
            def serialize(self, obj):
                return "text"

        class Raises:
            def serialize(self, obj):
                raise ValueError("odd")

        with torch_rpc.api._use_rpc_pickler(Text()), pytest.raises(TypeError, match="serialize of Text has"):
            torch_rpc.rpc_sync("worker1", add, (1, 2))
        with torch_rpc.api._use_rpc_pickler(Raises()), pytest.raises(ValueError, match="odd"):
            torch_rpc.remote("worker1", add, (1, 2))
        with torch_rpc.api._use_rpc_pickler(CodePickler()):
            gone = type("Gone", (), {})
            gone.__module__ = "tests.remote_functions"
            vars(sys.modules["tests.remote_functions"])["Gone"] = gone
            with pytest.raises(RuntimeError, match="Gone"):
                torch_rpc.rpc_sync("worker1", gone)
        reference = torch_rpc.remote("worker1", list)
        with pytest.raises(RuntimeError, match="cannot be serialized outside a call"):
            torch_rpc.internal.serialize(reference)
        with pytest.raises(RuntimeError, match="cannot be deserialized"):
            torch_rpc.PyRRef._deserialize(b"bytes")

    pair[0].run(on_torch_names, check)


def test_a_policy_refuses_calls_that_a_programs_pickler_has_made(torch_workers):  # noqa: F811
    a, b = torch_workers(2)

    def restrict(_):
        agent: Any = current_agent()
        reader = RestrictedReader(agent.info, rpc.Policy(accepts="plain"), Audit(agent.info.name))
        agent._codec.values.unpack = reader.read

    b.run(on_torch_names, restrict)

    def check(torch_rpc):
        with (
            torch_rpc.api._use_rpc_pickler(Recorder()),
            pytest.raises(RuntimeError, match=r"extensions\._load_call.* which is not exposed"),
        ):
            torch_rpc.rpc_sync("worker1", add, (1, 2))

    a.run(on_torch_names, check)
