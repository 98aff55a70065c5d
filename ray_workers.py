"""The actors of `launch.ray`: the process of a rank, and one that hosts the store of all ranks."""

import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from .c10d.addresses import format_address
from .c10d.security import Credentials
from .c10d.stores.tcp import TCPStore
from .logs import set_levels_from_environment

__all__ = ["End", "Place", "RankActor", "StoreActor", "forwarded_variables"]

_OF_ONE_PROCESS = (
    "GRADWIRE_ADVERTISED_HOST",
    "GRADWIRE_HOST",
    "GRADWIRE_SPAWN_STORE",
    "GRADWIRE_STORE",
    "GRADWIRE_TOKEN",
    "GRADWIRE_TOKEN_FILE",
    "GRADWIRE_WORKER_NAME",
)
"""What the caller's environment says of its own process or host, or the job says otherwise."""

_NOT_OF_THE_NODE = (
    *(name for name in _OF_ONE_PROCESS if name not in ("GRADWIRE_ADVERTISED_HOST", "GRADWIRE_HOST")),
    "GRADWIRE_CA",
    "GRADWIRE_CERTIFICATE",
    "GRADWIRE_INSECURE",
    "GRADWIRE_KEY",
    "GRADWIRE_LOG",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""What a process does not take from the environment of its node: that of whoever has started Ray there."""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where the process of a rank runs.

    node: Ray's id of the node.
    host: the address of the node.
    pid: the process id.
    """

    node: str
    host: str
    pid: int


@final
@dataclass(frozen=True, slots=True)
class End:
    """How the function of a rank has ended.

    status: the exit status of the process: 0 if the function has returned.
    traceback: of what it raised; empty if it raised nothing, or SystemExit.
    """

    status: int = 0
    traceback: str = ""


def forwarded_variables(credentials: Credentials | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the caller that all processes of a job get, with its credentials.

    Args:
        credentials: those of the job; None for the certificates that the environment names.
        environment: that of the caller.
    """
    own = {
        name: value
        for name, value in environment.items()
        if name.startswith("GRADWIRE_") and name not in _OF_ONE_PROCESS
    }
    return (
        own if credentials is None or credentials.token is None else {**own, "GRADWIRE_TOKEN": credentials.token}
    )


def _set_environment(variables: Mapping[str, str]) -> None:
    for name in _NOT_OF_THE_NODE:
        os.environ.pop(name, None)
    os.environ.update(variables)
    set_levels_from_environment()  # gradwire has been imported with the node's


class StoreActor:
    """Hosts the store of a job, which lets in those who have the job's credentials."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        import ray

        _set_environment(variables)
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, credentials=Credentials.from_environment())

    def address(self) -> str:
        """Returns host:port of the store."""
        return format_address(self._store.host, self._store.port)


class RankActor:
    """The process of a rank. It runs one function, on its main thread."""

    def __init__(self, rank: int) -> None:
        import ray

        self._rank = rank
        node = ray.get_runtime_context().get_node_id()
        self._place = Place(node, ray.util.get_node_ip_address(), os.getpid())
        self._reserved: socket.socket | None = None

    def __repr__(self) -> str:  # Ray writes it before each line that the process prints
        return f"rank {self._rank}"

    def place(self) -> Place:
        """Returns where this process runs."""
        return self._place

    def reserve_port(self) -> int:
        """Returns a port which programs that take any free port do not get until this process ends."""
        family = socket.AF_INET6 if ":" in self._place.host else socket.AF_INET
        self._reserved = socket.socket(family)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as those do that may listen on it
        self._reserved.bind((self._place.host, 0))
        port: int = self._reserved.getsockname()[1]
        return port

    def run(self, fn: Callable[..., object], args: tuple[Any, ...], variables: Mapping[str, str]) -> End:
        """Runs `fn(rank, *args)` with these environment variables, as a process of its own would."""
        _set_environment(variables)
        try:
            fn(self._rank, *args)
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                return End(error.code or 0)
            print(error.code, file=sys.stderr)
            return End(1)
        except BaseException:
            return End(1, traceback.format_exc())
        return End()
