"""Contexts end on workers that a call has reached through a worker which has died since."""

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.rpc.contracts.agent import current_agent

from tests.remote_functions import assert_clean, multiply, wait_until

opened = []


def relay(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", multiply, (x, x))


def open_context() -> None:
    context = autograd.context()
    context.__enter__()
    opened.append(context)
    rpc.rpc_sync("worker1", relay, (torch.ones(3, requires_grad=True),))


def end_context() -> None:
    opened.pop().__exit__(None, None, None)


def notice_loss() -> None:
    wait_until(lambda: current_agent().end_of(1) is not None)


@pytest.mark.parametrize("ends_before", [True, False])
def test_the_relay_dies(workers, ends_before):
    a, b, c = workers.rpc(3)
    a.run(open_context)
    b.kill()
    if not ends_before:
        workers.each([a, c], notice_loss)
    a.run(end_context)
    c.run(notice_loss)
    workers.each([a, c], assert_clean)
