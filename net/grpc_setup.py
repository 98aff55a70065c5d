"""Imports gRPC with its fork handlers disabled.

With fork handlers, gRPC prints a line whenever a process with gRPC activity forks, for example to start the
workers of a DataLoader. The handlers let a forked child reuse the parent's connections, which gradwire never does.
gRPC reads GRPC_ENABLE_FORK_SUPPORT once, when it is imported. A program that needs the handlers sets that variable
itself or imports grpc before gradwire.
"""

import os

__all__: list[str] = []

_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"

if _VARIABLE in os.environ:
    import grpc
else:
    os.environ[_VARIABLE] = "0"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_VARIABLE]  # child processes must not inherit it
