"""Replaces torch.futures.wait_all, so that it fails as soon as one future fails."""

from collections.abc import Sequence
from typing import Any

import torch

from ..rpc.calls.wait_all import wait_for_futures

__all__ = ["wait_all"]


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """Returns the values of all futures, or raises the error of the first that fails as soon as it fails.

    torch documents the same of its own function. But torch's C++ takes a future that Python code has failed, as
    gradwire's are, for a successful one, and goes on waiting.
    """
    wait_for_futures(futures)
    return [future.wait() for future in futures]
