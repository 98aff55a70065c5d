"""Functions that the tests of broadcast_call share."""

import torch
from gradwire import rpc

MIB = 2**20
LARGE = 2 * MIB
"""Elements of a tensor of 8 MiB, which takes an engine several rounds."""

OTHERS = ["worker1", "worker2", "worker3"]

BETWEEN_HOSTS = ("tcp", "grpc")
"""The transports with which workers of one host broadcast by a process group, as workers on several hosts do."""

ONE_HOST = ("unix", "grpc")
"""The transports with which they share memory."""


def each_result(names, function, args=(), kwargs=None):
    return [future.wait() for future in rpc.broadcast_call(names, function, args, kwargs)]


def bytes_sent() -> int:
    return rpc.debug_info()["bytes_sent"]


def group_count() -> int:
    return rpc.debug_info()["broadcast_groups"]


def total(tensor: torch.Tensor) -> float:
    return float(tensor.double().sum())


def ramp(elements: int = LARGE) -> torch.Tensor:
    return torch.arange(elements, dtype=torch.float32) % 1000
