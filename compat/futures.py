"""What torch.futures does with futures that fail."""

import concurrent.futures
import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ..rpc.agent import holder
from ..rpc.futures import when_done

__all__ = ["wait_all"]


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """The values of all futures; raises the error of one that fails, without waiting for the others any longer.

    As torch.futures says of its function. But a future that Python has failed, as gradwire's are, has a value in
    the eyes of torch's C++, which therefore waits for the others.
    """
    outcomes = [when_done(future) for future in futures]
    agent = holder.get()
    with contextlib.nullcontext() if agent is None else agent.blocking():
        concurrent.futures.wait(outcomes, return_when=concurrent.futures.FIRST_EXCEPTION)
    for future, outcome in zip(futures, outcomes, strict=True):
        if outcome.done() and outcome.exception() is not None:
            future.wait()
    return [future.wait() for future in futures]
