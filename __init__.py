"""RPC and distributed autograd for PyTorch, over gRPC."""

from . import autograd, c10d, launch, nn, optim, rpc, rref
from . import grpc_setup as grpc_setup  # isort: split  # before any other import of grpc
from .errors import GradwireError

__all__ = ["GradwireError", "autograd", "c10d", "launch", "nn", "optim", "rpc", "rref"]

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
