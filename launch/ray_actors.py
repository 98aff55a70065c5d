"""The actors of `launch.ray`: the process of a rank, and one that hosts the store of all ranks."""

import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from ..c10d.stores.tcp import TCPStore
from ..logs import set_levels_from_environment
from ..net.addresses import format_address
from ..net.security import Credentials

__all__ = ["End", "Location", "RankActor", "StoreActor", "forwarded_variables"]

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
class Location:
    """Where the process of a rank runs.

    host: the address of its node.
    pid: the process id.
    node: Ray's id of its node.
    port: that is reserved for it; 0 without one.
    """

    host: str
    pid: int
    node: str
    port: int = 0


@final
@dataclass(frozen=True, slots=True)
class End:
    """How the function of a rank has ended, or why it did not begin.

    status: the exit status of the process: 0 if the function has returned.
    traceback: of what was raised; empty if nothing was, or SystemExit.
    context: when it was raised, if not by the function: " when …".
    """

    status: int = 0
    traceback: str = ""
    context: str = ""


def forwarded_variables(credentials: Credentials) -> dict[str, str]:
    """Returns the variables of this process that all processes of a job get, with the token of its credentials."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("GRADWIRE_") and name not in _OF_ONE_PROCESS
    }
    return own if credentials.token is None else {**own, "GRADWIRE_TOKEN": credentials.token}


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
        self._rank = rank
        self._reserved: socket.socket | None = None

    def __repr__(self) -> str:  # Ray writes it before each line that the process prints
        return f"rank {self._rank}"

    def locate(self, port: int | None = None) -> Location:
        """Returns where this process runs.

        Args:
            port: the one to reserve for this process; 0, or if it is taken, any; None for none. Programs that take
                any free port do not get it until this process ends.
        """
        import ray

        host = ray.util.get_node_ip_address()
        node = ray.get_runtime_context().get_node_id()
        return Location(host, os.getpid(), node, 0 if port is None else self._reserve(host, port))

    def _reserve(self, host: str, port: int) -> int:
        self._reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as those do that may listen on it
        try:
            self._reserved.bind((host, port))
        except OSError:
            self._reserved.bind((host, 0))
        reserved: int = self._reserved.getsockname()[1]
        return reserved

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
