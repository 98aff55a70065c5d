"""A pass whose gradients a worker does not accept, or cannot read, fails at its caller before any timeout."""

from collections.abc import Callable

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.autograd import backward_pass, gradient_sender
from gradwire.autograd.extension import Autograd
from gradwire.errors import AutogradError, PolicyError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.contracts.messages import MessageType, UnwantedMessageError
from gradwire.rpc.wire import pickling

from tests.autograd.test_ends_of_passes import one_more, relay
from tests.remote_functions import assert_clean, multiply, wait_until
from tests.rpc.wire.policy_functions import Attack

TIMEOUT = 30.0
"""Seconds that gates would wait for the gradients."""


def post_in_place_of_gradients(make: Callable[[], object]) -> None:
    """Has this worker send something else in its GRADIENTS messages."""
    post = gradient_sender.post_gradients
    gradient_sender.post_gradients = lambda agent, context_id, pass_id, send, _gradients: post(
        agent, context_id, pass_id, send, [make()]
    )


def compress_to(make: Callable[[], object]) -> None:
    """Has this worker send something else with its BACKWARD messages."""
    backward_pass.compress = lambda _gradients: [make()]


def run_pass(make_loss: Callable[[torch.Tensor], torch.Tensor]) -> Exception:
    """Returns the error of a pass."""
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = make_loss(x)
        with pytest.raises(RuntimeError) as caught:
            autograd.backward(context_id, [loss.sum()], timeout=TIMEOUT)
    return caught.value


@pytest.fixture
def folder(tmp_path):
    """The folder that attacks make."""
    yield tmp_path / "made"
    assert not (tmp_path / "made").exists()


def between(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker1", relay, (x, "worker2", "go on"))


def to_worker2_twice(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", multiply, (x, x)) + rpc.rpc_sync("worker2", multiply, (x, x))


@pytest.mark.parametrize(
    ("make_loss", "refusing"), [(between, "worker1"), (to_worker2_twice, "worker0")], ids=["between", "caller"]
)
def test_refused_gradients_fail_the_pass_at_its_caller(workers, folder, make_loss, refusing):
    started = workers.rpc(3, policy=rpc.Policy(callers={"worker2": rpc.Policy(accepts="plain")}))
    started[2].run(post_in_place_of_gradients, lambda: Attack(str(folder)))
    error = started[0].run(run_pass, make_loss)
    assert isinstance(error, PolicyError)
    assert (error.worker, error.caller, error.name) == (
        refusing,
        "worker2",
        "tests.rpc.wire.policy_functions.attack_others",
    )
    workers.each(started, assert_clean)


def test_a_refused_request_fails_the_pass_at_its_caller(workers, folder):
    plain = rpc.Policy(accepts="plain", exposed=["torch.mul"])
    started = workers.rpc(2, policy=rpc.Policy(callers={"worker0": plain}))
    started[0].run(compress_to, lambda: Attack(str(folder)))
    error = started[0].run(run_pass, lambda x: rpc.rpc_sync("worker1", torch.mul, (x, 2)))
    assert isinstance(error, PolicyError)
    assert (error.worker, error.caller) == ("worker1", "worker0")
    workers.each(started, assert_clean)


def test_unreadable_gradients_fail_the_pass_at_its_caller(workers):
    started = workers.rpc(3)
    started[2].run(post_in_place_of_gradients, Unreadable)
    error = started[0].run(run_pass, between)
    assert isinstance(error, AutogradError)
    text = "worker 'worker1' cannot read the gradients that worker 'worker2' has sent: ZeroDivisionError"
    assert str(error).startswith(text)
    started[0].run(one_more, "worker1")


class Unreadable:
    def __reduce__(self):
        return divmod, (1, 0)


def post_gradients(sender, receiver, value: object, **header: int) -> None:
    sender.post(
        receiver.info,
        MessageType.GRADIENTS,
        value,
        header=lambda envelope: envelope.gradients.CopyFrom(agent_pb2.GradientsHeader(**header)),
    )


def test_gradients_that_fail_before_their_pass_begins(agents):
    a, b = agents(2)
    with holder.using(a), autograd.context() as identifier:
        x = torch.ones(3, requires_grad=True)
        y = rpc.rpc_sync(b.info, torch.mul, (x, 2))
        part = a.extension(Autograd).contexts.get(identifier)
        post_gradients(b, a, Unreadable(), context_id=identifier, caller=a.info.id, pass_number=1)
        wait_until(lambda: part.passes._passes)
        with pytest.raises(AutogradError, match="'agent0' cannot read the gradients that worker 'agent1'"):
            autograd.backward(identifier, [y.sum()])
        autograd.backward(identifier, [y.sum()])


def test_gradients_of_others_are_not_unpickled(agents, monkeypatch):
    """Whose they are is in the header, which is compared with the sender first."""
    a, b, c = agents(3)
    read: list[object] = []
    loads = pickling.pickle.loads
    monkeypatch.setattr(pickling.pickle, "loads", lambda body: read.append(value := loads(body)) or value)
    with holder.using(a), autograd.context() as identifier:
        x = torch.ones(3, requires_grad=True)
        rpc.rpc_sync(b.info, torch.mul, (x, 2))
        errors: list[BaseException] = []
        a._server._answer_error = lambda _source, _request, error, **_: errors.append(error)
        for sender, wrong in (
            (c, {"context_id": identifier}),
            (b, {"context_id": identifier, "message_id": 7}),
            (b, {"context_id": identifier, "caller": 77}),
            (b, {"context_id": identifier + 1}),
        ):
            post_gradients(sender, a, "marked", **wrong)
        wait_until(lambda: len(errors) == 4)
        assert {type(error) for error in errors} == {AutogradError, UnwantedMessageError}
        assert "marked" not in read
        assert not a.extension(Autograd).contexts.get(identifier).passes._passes
