"""Where a group's store is, and which rank this process has: from a rendezvous URL, arguments and the environment.

Launchers tell a process its rank and the world size by environment variables, each by its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final
from urllib.parse import parse_qsl, unquote, urlsplit

from ...errors import RendezvousError
from ...net.security import Credentials

__all__ = [
    "SPAWN_STORE_HOST",
    "LaunchedProcess",
    "SpawnStore",
    "StoreAddress",
    "find_launched_process",
    "parse_url",
]

_EXAMPLES = {
    "env": "env://",
    "tcp": "tcp://host:port?rank=0&world_size=2",
    "file": "file:///absolute/path?rank=0&world_size=2",
    "store": "store://host:port?rank=0&world_size=2",
}

_STORE_VARIABLE = "GRADWIRE_STORE"

SPAWN_STORE_HOST = "127.0.0.1"
"""The address of the store, and MASTER_ADDR of the processes."""

_SPAWN_STORE_VARIABLE = "GRADWIRE_SPAWN_STORE"

_TRUE_VALUES = {"true", "1"}
"""torchrun sets the variable to "True"; people also set it to "1"."""

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""The rank, in the containers of an Indexed Job of Kubernetes. They are not told how many there are."""

_MPI_VARIABLES = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
"""Rank and world size under the mpiexec of MPICH and of Open MPI."""

_SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS")

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Slurm's numbers of steps from here on are not of srun: batch scripts, and the shell that salloc starts."""


@final
@dataclass(frozen=True, slots=True)
class SpawnStore:
    """A TCPStore that the process which called `spawn` hosts at `SPAWN_STORE_HOST`.

    port: the port of the store.
    master_port: MASTER_PORT of the processes, at which this store is not. A process with another one has been
        started by something else since, such as a torchrun that one of them runs.
    token: the token of the store; None if it has the certificates in the environment.
    """

    port: int
    master_port: int
    token: str | None = field(repr=False)

    @property
    def credentials(self) -> Credentials | None:
        """Those of the store; None for those in the environment."""
        return None if self.token is None else Credentials(token=self.token)

    def to_environment(self) -> dict[str, str]:
        """Returns the environment variables by which a process learns of the store."""
        return {
            "MASTER_ADDR": SPAWN_STORE_HOST,
            "MASTER_PORT": str(self.master_port),
            _SPAWN_STORE_VARIABLE: f"{self.port} {self.master_port} {self.token or ''}",
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "SpawnStore | None":
        """Returns the store of which environment variables tell; None if there is none."""
        if not (text := environment.get(_SPAWN_STORE_VARIABLE)):
            return None
        try:
            port, master_port, token = text.split(" ")
            found = cls(int(port), int(master_port), token or None)
        except ValueError:  # without its text, which has a token
            raise RendezvousError(
                f"{_SPAWN_STORE_VARIABLE} in the environment is not what gradwire.launch.spawn has set"
            ) from None
        return found if environment.get("MASTER_PORT") == master_port else None


@final
@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address of a group's store, and this worker's rank and the world size as far as they are known.

    url: for messages.
    scheme: `"env"`, `"tcp"`, `"file"`, `"store"`, or `"given"` for a store that the caller has.
    rank, world_size: -1 while unknown.
    host, port: of a TCP store.
    path: of a file store.
    launcher_attempt: how often torchrun has restarted the group, if its store is to be used; else None.
    spawn_store: the store of the processes that `gradwire.launch.spawn` has started, if it is to be used.
    runs: whether it is a gradwire store that runs already, as a process of its own.
    """

    url: str
    scheme: str
    rank: int = -1
    world_size: int = -1
    host: str = ""
    port: int = 0
    path: str | None = None
    launcher_attempt: str | None = None
    spawn_store: SpawnStore | None = None
    runs: bool = False

    @property
    def hosts_store(self) -> bool:
        """Whether this worker hosts the TCP store."""
        has_host = self.runs or self.launcher_attempt is not None or self.spawn_store is not None
        return self.rank == 0 and bool(self.host) and not has_host

    def with_identity(self, rank: int | None, world_size: int | None) -> "StoreAddress":
        """Adds the rank and world size that the caller has passed; -1 or None for those not passed."""
        return replace(
            self,
            rank=self._combine("rank", self.rank, rank),
            world_size=self._combine("world_size", self.world_size, world_size),
        )

    def from_environment(self, environment: Mapping[str, str], *, dynamic: bool = False) -> "StoreAddress":
        """Completes an `env://` address from environment variables; returns other addresses unchanged.

        RANK and WORLD_SIZE are optional if the group may be dynamic. If the caller has passed neither rank nor
        world size, those that other launchers say count too: see `find_launched_process`.
        """
        if self.scheme != "env":
            return self
        if self.rank < 0 and self.world_size < 0:
            environment = {**environment, **_launcher_variables(environment)}
        running = environment.get(_STORE_VARIABLE, "")
        needed = {
            "RANK": self.rank < 0,
            "WORLD_SIZE": self.world_size < 0,
            "MASTER_ADDR": not running,
            "MASTER_PORT": not running,
        }
        optional = ("RANK", "WORLD_SIZE") if dynamic else ()
        missing = [n for n, wanted in needed.items() if wanted and not environment.get(n) and n not in optional]
        if missing:
            raise RendezvousError(
                f"{self.url} needs the environment variables {', '.join(missing)}, which are not set: set "
                "them (docs/launch.md says how under Slurm, mpiexec and Kubernetes), start the workers with "
                "gradwire spawn or torchrun, or give another URL (or rank= and world_size=)"
            )
        address = replace(
            self,
            rank=_integer_variable("RANK", environment) if self.rank < 0 else self.rank,
            world_size=_integer_variable("WORLD_SIZE", environment) if self.world_size < 0 else self.world_size,
        )
        launched = environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in _TRUE_VALUES
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0") if launched else None
        if running:
            host, _, port = running.rpartition(":")
            number = _port(port, f"{_STORE_VARIABLE}={running}")
            return replace(address, host=host.strip("[]"), port=number, launcher_attempt=attempt, runs=True)
        if (spawn_store := SpawnStore.from_environment(environment)) is not None:
            return replace(address, host=SPAWN_STORE_HOST, port=spawn_store.port, spawn_store=spawn_store)
        return replace(
            address,
            host=environment["MASTER_ADDR"],
            port=_port(environment["MASTER_PORT"], f"MASTER_PORT={environment['MASTER_PORT']}"),
            launcher_attempt=attempt,
        )

    def checked(self, *, dynamic: bool = False) -> "StoreAddress":
        """Returns this address after checking rank and world size, which only dynamic groups may not have."""
        if dynamic and self.world_size == -1:
            return self
        unknown = [name for name in ("rank", "world_size") if getattr(self, name) < 0]
        if unknown:
            alternative = "" if self.scheme == "given" else f", or use {_EXAMPLES[self.scheme]}"
            raise RendezvousError(
                f"{self.url} does not say {' and '.join(unknown)}: "
                f"pass {' and '.join(f'{name}=' for name in unknown)}{alternative}"
            )
        if not 0 <= self.rank < self.world_size:
            raise RendezvousError(
                f"rank {self.rank} does not fit into world_size {self.world_size}: ranks are 0 to world_size - 1"
            )
        return self

    def _combine(self, name: str, in_url: int, given: object) -> int:
        if given is None or given == -1:
            return in_url
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise RendezvousError(f"{name} is {given!r}: give an int of 0 or more")
        if in_url not in (-1, given):
            raise RendezvousError(
                f"{self.url} says {name}={in_url} and the argument says {name}={given}: drop one of them"
            )
        return given


def parse_url(url: str) -> StoreAddress:
    """Parses a rendezvous URL. Raises RendezvousError, which shows the valid forms, for others."""
    try:
        parts = urlsplit(url)
        scheme = parts.scheme
    except ValueError as error:
        raise _malformed(url, str(error)) from None
    if scheme not in _EXAMPLES:
        raise _malformed(url, f"it has no scheme of {', '.join(_EXAMPLES)}")
    if parts.fragment:
        raise _malformed(url, "it has a #fragment", scheme)
    numbers = _numbers(url, scheme, parts.query)
    address = StoreAddress(url, scheme, numbers.get("rank", -1), numbers.get("world_size", -1))
    if scheme == "env":
        if parts.netloc or parts.path:
            raise _malformed(url, "nothing but a query may follow env://", scheme)
        return address
    if scheme == "file":
        if parts.netloc:
            raise _malformed(url, "its path is not absolute, which takes three slashes", scheme)
        path = unquote(parts.path)
        if not path.startswith("/") or path.endswith("/") or "\0" in path:
            raise _malformed(url, "it names no file by an absolute path", scheme)
        return replace(address, path=path)
    if parts.path not in ("", "/") or parts.username is not None:
        raise _malformed(url, "it has more than a host and a port", scheme)
    if not parts.hostname:
        raise _malformed(url, "it has no host", scheme)
    port_text = parts.netloc.rpartition(":")[2] if not parts.netloc.endswith("]") else ""
    if port_text in ("", parts.netloc):
        raise _malformed(url, "it has no port", scheme)
    return replace(address, host=parts.hostname, port=_port(port_text, url), runs=scheme == "store")


def _numbers(url: str, scheme: str, query: str) -> dict[str, int]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=8)
    except ValueError as error:
        raise _malformed(url, str(error), scheme) from None
    numbers: dict[str, int] = {}
    for name, text in pairs:
        if name not in ("rank", "world_size"):
            raise _malformed(url, f"{name!r} is not known", scheme)
        if name in numbers:
            raise _malformed(url, f"{name} is given twice", scheme)
        if not (text.isascii() and text.isdigit()):
            raise _malformed(url, f"{name}={text} is not a number of 0 or more", scheme)
        numbers[name] = int(text)
    return numbers


def _port(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise RendezvousError(
            f"{where!r} has the port {text!r}: it must be a number from 1 to 65535, the same on every worker, as "
            f"in {_EXAMPLES['tcp']}"
        )
    return int(text)


def _malformed(url: str, problem: str, scheme: str | None = None) -> RendezvousError:
    forms = [_EXAMPLES[scheme]] if scheme else list(_EXAMPLES.values())
    return RendezvousError(f"the rendezvous URL {url!r} is wrong: {problem}. Write it as {' or '.join(forms)}")


@final
@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """What the launcher of a process says of it.

    rank: from 0 to world_size - 1.
    world_size: number of processes.
    """

    rank: int
    world_size: int


def find_launched_process(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Returns what the launcher of a process says of it; None if no launcher has started it.

    RANK and WORLD_SIZE come first, which torchrun and `gradwire spawn` set; then those of `_launcher_variables`.

    Raises:
        RendezvousError: one of a pair is missing, or they are no rank and size; or the process runs in the batch
            script of a Slurm job of several tasks, not by srun.
    """
    complete = {**environment, **_launcher_variables(environment)}
    values = {name: _integer_variable(name, complete) for name in ("RANK", "WORLD_SIZE")}
    rank, world_size = values.values()
    if rank < 0 and world_size < 0:
        return None
    for name, value in values.items():
        if value < 0:
            raise RendezvousError(
                f"the environment has {'WORLD_SIZE' if name == 'RANK' else 'RANK'} and no {name}: set both, or "
                "start the program by a launcher that does, such as torchrun"
            )
    if rank >= world_size:
        raise RendezvousError(f"the environment says rank {rank} of {world_size}: ranks are 0 to {world_size - 1}")
    return LaunchedProcess(rank, world_size)


def _launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns RANK and WORLD_SIZE as far as a launcher says them by other variables, and they are not set.

    mpiexec comes before Slurm, since it starts its processes by srun in a Slurm job.
    """
    if environment.get("RANK"):
        return {}
    if environment.get("WORLD_SIZE"):
        return {"RANK": environment[INDEX_VARIABLE]} if environment.get(INDEX_VARIABLE) else {}
    for variables in _MPI_VARIABLES:
        if environment.get(variables[0]):
            return _pair(variables, environment)
    if environment.get(_SLURM_VARIABLES[0]):
        if 0 <= _integer_variable("SLURM_STEP_ID", environment) < _FIRST_SPECIAL_STEP:
            return _pair(_SLURM_VARIABLES, environment)
        if (tasks := _integer_variable(_SLURM_VARIABLES[1], environment)) > 1:
            raise RendezvousError(
                f"this process runs in the batch script or the shell of a Slurm job of {tasks} tasks, once for "
                "all of them: start the program by srun there, or set RANK and WORLD_SIZE"
            )
    return {}


def _pair(variables: tuple[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    for name in variables:
        if _integer_variable(name, environment) < 0:
            raise RendezvousError(
                f"the environment has {variables[0]} and no {name}: tell the launcher how many processes to "
                "start, as by srun --ntasks=4, or set RANK and WORLD_SIZE"
            )
    return {"RANK": environment[variables[0]], "WORLD_SIZE": environment[variables[1]]}


def _integer_variable(name: str, environment: Mapping[str, str]) -> int:
    """Returns the number in an environment variable; -1 if it is not set. Raises RendezvousError for others."""
    text = environment.get(name)
    if not text:
        return -1
    if not (text.isascii() and text.strip().isdigit()):
        raise RendezvousError(f"the environment has {name}={text}: set it to a number of 0 or more")
    return int(text)
