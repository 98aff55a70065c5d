"""Starts the processes of a program on the nodes of a Ray cluster, and starts those again that fail.

Each rank is the process of an actor; another actor hosts the store of all ranks.
"""

import itertools
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ..c10d.stores.tcp import TCPStore
from ..logs import set_levels_from_environment
from ..net.addresses import format_address
from ..net.security import Credentials
from .hosting import credentials_or_token
from .supervisor import TRACEBACK, Backoff, History, error_line

__all__ = [
    "STRATEGIES",
    "End",
    "LaunchSpec",
    "RankActor",
    "StoreActor",
    "run_on_ray",
]

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

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""How Ray may distribute the processes of a job over nodes."""

RECHECK_S = 1.0
"""Seconds between looks at where rank 0 will be, while other processes wait for its address."""


@final
@dataclass(frozen=True, slots=True)
class _Location:
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


def _forwarded_variables(credentials: Credentials) -> dict[str, str]:
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

    def locate(self, port: int | None = None) -> _Location:
        """Returns where this process runs.

        Args:
            port: the one to reserve for this process; 0, or if it is taken, any; None for none. Programs that take
                any free port do not get it until this process ends.
        """
        import ray

        host = ray.util.get_node_ip_address()
        node = ray.get_runtime_context().get_node_id()
        return _Location(host, os.getpid(), node, 0 if port is None else self._reserve(host, port))

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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What `launch.ray` was asked for; see there."""

    fn: Callable[..., object]
    nprocs: int
    args: tuple[Any, ...]
    grace_period: float
    restarts: int
    backoff: Backoff
    resources: Mapping[str, float]
    strategy: str
    placement_timeout_s: float
    runtime_env: dict[str, Any] | None


@dataclass(slots=True, kw_only=True)
class _Rank(History):
    """The process of a rank and what has become of it.

    pending: the answer that is awaited from it: its location, the end of its function, or its exit; None before a
        restart, and before it gets its function.
    location: None until it has answered.
    end: how its function has ended, once it has.
    node: Ray's id of the node on which it runs, or will when it is started again.
    local_rank: its number among the processes of its node.
    """

    number: int
    actor: Any = None
    pending: Any = None
    location: _Location | None = None
    end: End | None = None
    node: str = ""
    local_rank: int = -1

    @property
    def has_succeeded(self) -> bool:
        """Whether its function has returned."""
        return self.end is not None and self.end.status == 0

    @property
    def is_resting(self) -> bool:
        """Whether it has no process, and is to be started again."""
        return self.pending is None and self.location is None and self.end is None

    @property
    def awaits_function(self) -> bool:
        """Whether its process is there, and has not been given its function yet."""
        return self.pending is None and self.location is not None and self.end is None

    def describe(self) -> str:
        where = f" (pid {self.location.pid} on {self.location.host})" if self.location is not None else ""
        return f"process {self.number}{where}"


def run_on_ray(spec: LaunchSpec) -> None:
    """Runs a job on the cluster to which this process is connected, or is connected now, until it has ended."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("launch.ray needs Ray: pip install ray", name="ray") from error
    variables = _forwarded_variables(credentials_or_token())
    was_connected = ray.is_initialized()
    if not was_connected:
        ray.init()
    try:
        with _reserve(spec) as group:
            supervisor = _Supervisor(spec, group, variables)
            try:
                supervisor.run()
            finally:
                supervisor.kill_all()
    finally:
        if not was_connected:
            ray.shutdown()


@contextmanager
def _reserve(spec: LaunchSpec) -> Iterator[Any]:
    """Context manager that reserves the resources of all ranks: a placement group with a bundle for each rank.

    Raises:
        TimeoutError: the cluster has not had them for `placement_timeout_s`.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([dict(spec.resources)] * spec.nprocs, strategy=spec.strategy)
    try:
        try:
            ray.get(group.ready(), timeout=spec.placement_timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(
                f"the Ray cluster has not had {dict(spec.resources)} for each of {spec.nprocs} processes "
                f"({spec.strategy}) for {spec.placement_timeout_s:g} s; it has {ray.cluster_resources()}, and "
                f"{ray.available_resources()} are free: ask for less, add nodes, or raise placement_timeout_s"
            ) from None
        yield group
    finally:
        remove_placement_group(group)


class _Supervisor:
    """Waits for the processes of a job, and starts those again that fail."""

    def __init__(self, spec: LaunchSpec, group: Any, variables: Mapping[str, str]) -> None:
        """Starts nothing yet; `group` has the resources of the ranks, and all processes get `variables`."""
        import ray

        self._ray = ray
        self._spec = spec
        self._group = group
        self._variables = dict(variables)
        self._ranks = [_Rank(number=number) for number in range(spec.nprocs)]
        self._master_node = ""
        """The node of MASTER_ADDR."""
        self._store: Any = None

    def run(self) -> None:
        """Runs all ranks to their ends.

        Raises:
            ProcessRaisedException: a function raised once more than its process is restarted.
            ProcessExitedException: the same for a process that ended otherwise.
        """
        self._store = self._start_store()
        self._variables["GRADWIRE_STORE"] = self._ray.get(self._store.address.remote())
        for rank in self._ranks:
            self._start(rank)
        while any(rank.pending is not None or rank.end is None for rank in self._ranks):
            self._wait_and_handle()

    def kill_all(self) -> None:
        """Kills all processes that are left."""
        alive = [rank.actor for rank in self._ranks if rank.pending is not None or rank.awaits_function]
        for actor in [*alive, self._store]:
            if actor is not None:
                with suppress(self._ray.exceptions.RayError):
                    self._ray.kill(actor)

    def _start_store(self) -> Any:
        """Starts the host of the store, on the node of this process."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self._ray.get_runtime_context().get_node_id()
        here = NodeAffinitySchedulingStrategy(node, soft=False)  # if soft, any node will do for it
        actor = self._ray.remote(StoreActor).options(
            num_cpus=0, scheduling_strategy=here, runtime_env=self._spec.runtime_env
        )
        return actor.remote(self._variables)

    def _start(self, rank: _Rank) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self._spec.resources)
        actor = self._ray.remote(RankActor).options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank.number),
            runtime_env=self._spec.runtime_env,
        )
        rank.started = time.monotonic()
        rank.actor = actor.remote(rank.number)
        port = int(self._variables.get("MASTER_PORT", "0")) if rank.number == 0 else None
        rank.pending = rank.actor.locate.remote(port)

    def _wait_and_handle(self) -> None:
        """Waits until a process has answered, or is to be started again, and does what comes next."""
        pending = {rank.pending: rank for rank in self._ranks if rank.pending is not None}
        resting = [rank for rank in self._ranks if rank.is_resting]
        pause = max(0.0, min((rank.started for rank in resting), default=math.inf) - time.monotonic())
        if any(rank.awaits_function for rank in self._ranks):
            pause = min(pause, RECHECK_S)
        if pending:
            done, _ = self._ray.wait(list(pending), timeout=None if pause == math.inf else pause)
        else:
            done = []
            time.sleep(pause)
        for ref in done:
            self._on_answer(pending[ref])
        for rank in resting:
            if rank.started <= time.monotonic():
                self._start(rank)
        self._run_functions()

    def _on_answer(self, rank: _Rank) -> None:
        """Handles what a process has answered: where it is, how its function has ended, or nothing any more."""
        exceptions = self._ray.exceptions
        try:
            answer = self._ray.get(rank.pending)
        except exceptions.RayTaskError as error:  # the process lives; its function has not begun
            is_unpickling = isinstance(error.cause, exceptions.RaySystemError)
            context = " when it unpickled its function and arguments" if is_unpickling else " when it started"
            answer = End(1, error.traceback_str, context)
        except exceptions.RayError as error:  # also when it has exited because it was asked to
            if getattr(error, "actor_init_failed", False) or TRACEBACK in str(
                error
            ):  # gradwire may be missing there
                rank.end = End(1, str(error), " when it started")
            self._on_exit(rank, error)
            return
        if isinstance(answer, _Location):
            rank.location, rank.pending = answer, None
            if answer.port:
                self._variables.update(MASTER_ADDR=answer.host, MASTER_PORT=str(answer.port))
                self._master_node = answer.node
        elif isinstance(answer, End):
            rank.end = answer
            rank.pending = rank.actor.__ray_terminate__.remote()  # runs the exit handlers
        else:
            self._on_exit(rank, None)

    def _run_functions(self) -> None:
        """Has the processes that are there run their functions, if MASTER_ADDR is or will stay that of rank 0."""
        ready = [rank for rank in self._ranks if rank.awaits_function]
        if not ready:
            return
        self._locate_ranks()
        master = self._ranks[0]
        if not master.has_succeeded and master.node != self._master_node:
            return  # until rank 0 has answered from its new node
        for rank in ready:
            rank.pending = rank.actor.run.remote(self._spec.fn, self._spec.args, self._environment(rank))

    def _locate_ranks(self) -> None:
        """Notes on which nodes the ranks are, and gives those that are new there the first free local ranks."""
        from ray.util.placement_group import placement_group_table

        # If a node is gone, Ray finds another one, which takes a moment.
        nodes: Mapping[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        moved = [rank for rank in self._ranks if rank.node != nodes.get(rank.number, "")]
        for rank in moved:
            rank.node, rank.local_rank = nodes.get(rank.number, ""), -1
        for rank in moved:
            used = {each.local_rank for each in self._ranks if each.node == rank.node}
            rank.local_rank = next(number for number in itertools.count() if number not in used)

    def _environment(self, rank: _Rank) -> dict[str, str]:
        return {
            **self._variables,
            "RANK": str(rank.number),
            "WORLD_SIZE": str(self._spec.nprocs),
            "LOCAL_RANK": str(rank.local_rank),
            "LOCAL_WORLD_SIZE": str(sum(each.node == rank.node for each in self._ranks)),
            "TORCHELASTIC_RESTART_COUNT": str(rank.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self._spec.restarts),
        }

    def _on_exit(self, rank: _Rank, error: Exception | None) -> None:
        """Handles the end of a process: nothing if it has succeeded, else a restart, or the end of all."""
        rank.pending = None
        if rank.has_succeeded:
            return
        if rank.restarts == self._spec.restarts:
            self._wait_for_others()
            raise _failure(rank, error)
        how, traceback = _how_it_ended(rank, error)
        rank.note_failure(rank.describe(), how, traceback, self._spec.backoff, self._spec.restarts)
        rank.location = rank.end = None

    def _wait_for_others(self) -> None:
        """Waits until all processes have ended, for `grace_period` at most."""
        left = [rank.pending for rank in self._ranks if rank.pending is not None]
        if left:
            self._ray.wait(left, num_returns=len(left), timeout=self._spec.grace_period)


def _how_it_ended(rank: _Rank, error: Exception | None) -> tuple[str, str]:
    """Returns how a process has failed, in words, and the traceback of what it raised; empty if it did not."""
    if rank.end is not None and rank.end.traceback:
        traceback = rank.end.traceback.rstrip()
        return f"raised {error_line(traceback)}{rank.end.context}", traceback
    if rank.end is not None:
        return f"exited with status {rank.end.status}", ""
    reason = str(error).rpartition("The actor is dead because ")[2].strip() or "it has died"
    detail = reason.rpartition("Worker exit detail: ")[2].partition(". ")[0]
    return f"has died ({detail.splitlines()[0]})", ""


def _failure(rank: _Rank, error: Exception | None) -> Exception:
    """Returns the error of a rank, as `launch.spawn` raises it."""
    pid = rank.location.pid if rank.location is not None else -1
    how, traceback = _how_it_ended(rank, error)
    if rank.end is not None and traceback:
        message = f"\n\n-- {rank.describe()} terminated with the following error{rank.end.context}:\n{traceback}\n"
        return ProcessRaisedException(message, rank.number, pid)
    status = rank.end.status if rank.end is not None else 1
    return ProcessExitedException(f"{rank.describe()} {how}", rank.number, pid, status)
