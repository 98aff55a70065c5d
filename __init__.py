"""RPC and distributed autograd for PyTorch, over gRPC."""

__version__ = "0.1.0"
