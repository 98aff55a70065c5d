"""What torch.futures does with futures that fail."""

from collections.abc import Sequence
from typing import Any

import torch

from ..rpc.wait_all import wait_for_futures

__all__ = ["wait_all"]


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """The values of all futures; raises the error of one that fails, without waiting for the others any longer.

    As torch.futures says of its function. But a future that Python has failed, as gradwire's are, has a value in
    the eyes of torch's C++, which therefore waits for the others.
    """
    wait_for_futures(futures)
    return [future.wait() for future in futures]
