"""Imports gRPC, before anything else does, without its handlers of forks.

With them gRPC prints a line whenever a process forks in which it is busy, such as one that starts the workers of a
DataLoader. They would let a child go on with the parent's connections, which gradwire never does. Who needs them
sets GRPC_ENABLE_FORK_SUPPORT, which gRPC reads when it is imported, or imports gRPC before gradwire.
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
        del os.environ[_VARIABLE]  # it is not for the processes that this one starts
