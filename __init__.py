"""RPC and distributed autograd for PyTorch, by gRPC, sockets and shared memory."""

# Before anything else imports grpc.
from . import grpc_setup as grpc_setup  # isort: split

from . import autograd, c10d, launch, nn, optim, rpc, rref
from .errors import GradwireError, Outcome

__all__ = ["GradwireError", "Outcome", "autograd", "c10d", "launch", "nn", "optim", "rpc", "rref"]

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
