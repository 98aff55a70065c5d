"""Anomaly mode, activation checkpointing and autocast across workers."""

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import RemoteError
from gradwire.rpc.contracts.messages import Outgoing
from gradwire.rpc.peers.peer import Peer
from gradwire.rpc.requests.server import Server
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import remote_functions
from tests.autograd.test_features import leaf
from tests.remote_functions import set_event, wait_for


def anomaly_here() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def undefined_gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(x * 0) * 0


class Anomaly(torch.autograd.Function):
    """Records the anomaly mode in which its backward runs."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        remote_functions.kept.append(anomaly_here())
        return gradient


def note_anomaly(x: torch.Tensor) -> torch.Tensor:
    return Anomaly.apply(x)


def kept() -> list[object]:
    return remote_functions.kept


def test_calls_and_passes_run_in_the_callers_anomaly_mode(three_workers):
    def check() -> None:
        x = leaf()
        with autograd.context() as context_id:
            for check_nan in (True, False):
                with torch.autograd.set_detect_anomaly(True, check_nan=check_nan):
                    assert rpc.rpc_sync("worker1", anomaly_here) == (True, check_nan)
                    loss = rpc.rpc_sync("worker1", note_anomaly, (x,)).sum()
                    autograd.backward(context_id, [loss])
                assert rpc.rpc_sync("worker1", anomaly_here)[0] is False
            autograd.backward(context_id, [rpc.rpc_sync("worker1", note_anomaly, (x,)).sum()])
        modes = rpc.rpc_sync("worker1", kept)
        assert modes[:2] == [(True, True), (True, False)]
        assert modes[2][0] is False
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", undefined_gradient, (x,)).sum()
            autograd.backward(context_id, [loss], retain_graph=True)
            assert autograd.get_gradients(context_id)[x].isnan().all()
            with (
                torch.autograd.set_detect_anomaly(True),
                pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values") as caught,
            ):
                autograd.backward(context_id, [loss])
            cause = caught.value.__cause__
            assert isinstance(cause, RemoteError)
            assert cause.worker == "worker1"

    three_workers[0].run(check)


def hold_after_an_answer() -> None:
    """Has the thread that answers the next call in anomaly mode wait for an event when the answer is sent."""
    send = Server._send_answer

    def send_and_wait(server: Server, source: Peer, answer: Outgoing) -> None:
        send(server, source, answer)
        if answer.reply_to is not None and answer.reply_to.envelope.autograd.anomaly:
            Server._send_answer = send
            wait_for("go on")

    Server._send_answer = send_and_wait


def test_the_mode_of_a_call_ends_before_its_answer(three_workers):
    """torch has one mode for all threads, and the next call may run before that of this one has gone on."""

    def check() -> None:
        rpc.rpc_sync("worker1", hold_after_an_answer)
        with autograd.context():
            with torch.autograd.set_detect_anomaly(True):
                assert rpc.rpc_sync("worker1", anomaly_here) == (True, True)
            assert rpc.rpc_sync("worker1", anomaly_here)[0] is False
        rpc.rpc_sync("worker1", set_event, ("go on",))

    three_workers[0].run(check)


def checkpointed(x: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
    return checkpoint(through_worker2, x, use_reentrant=use_reentrant)


def through_worker2(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", torch.sin, (x,)).exp()


def test_activation_checkpointing(three_workers):
    """A checkpointed function may call another worker; the recomputation calls it again."""

    def check() -> None:
        x = leaf()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", checkpointed, (x, False)).sum()
            autograd.backward(context_id, [loss])
            expected = torch.autograd.grad(x.sin().exp().sum(), x)[0]
            assert torch.allclose(autograd.get_gradients(context_id)[x], expected)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", checkpointed, (x, True)).sum()
            with pytest.raises(RuntimeError, match="use_reentrant=False"):
                autograd.backward(context_id, [loss])

    three_workers[0].run(check)


def with_autocast(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, bool]:
    outside = torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = nn.functional.linear(x, weight)
    return y, outside


def test_autocast_does_not_apply_to_called_functions(three_workers):
    def check() -> None:
        x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
        with autograd.context() as context_id:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y, outside = rpc.rpc_sync("worker1", with_autocast, (x, weight))
            assert y.dtype == torch.bfloat16
            assert not outside
            autograd.backward(context_id, [y.sum()])
            found = autograd.get_gradients(context_id)
            assert found[x].dtype == torch.float32
            assert torch.equal(found[weight], torch.full((3, 4), 2.0))

    three_workers[0].run(check)
