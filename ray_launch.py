"""Starts the processes of a program on the nodes of a Ray cluster, and starts those again that fail."""

import itertools
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, final

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from .c10d.security import Credentials
from .ray_workers import End, Place, RankActor, StoreActor, forwarded_variables
from .supervisor import Backoff

__all__ = ["STRATEGIES", "LaunchSpec", "run_on_ray"]

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""How Ray may distribute the processes of a job over nodes."""

TOKEN_BYTES = 32

log = logging.getLogger(__name__)


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
    runtime_env: Mapping[str, Any] | None


@dataclass(slots=True)
class _Rank:
    """The process of a rank and what has become of it.

    pending: what it is asked for now: its place, its function, or to exit; None before a restart.
    end: how its function has ended, once it has.
    local_rank: its number among the processes of its node.
    starts: when it was started, or is to be started again.
    """

    number: int
    actor: Any = None
    pending: Any = None
    place: Place | None = None
    end: End | None = None
    local_rank: int = -1
    starts: float = field(default_factory=time.monotonic)
    restarts: int = 0
    pause: float | None = None

    def describe(self) -> str:
        where = f" (pid {self.place.pid} on {self.place.host})" if self.place is not None else ""
        return f"process {self.number}{where}"


def run_on_ray(spec: LaunchSpec) -> None:
    """Runs a job on the cluster to which this process is connected, or is connected now, until it has ended."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("launch.ray needs Ray: pip install gradwire[ray]", name="ray") from error
    credentials = Credentials.from_environment() or Credentials(token=secrets.token_urlsafe(TOKEN_BYTES))
    was_connected = ray.is_initialized()
    if not was_connected:
        ray.init()
    try:
        with _placement(spec) as place:
            supervisor = _Supervisor(spec, place, forwarded_variables(credentials, os.environ))
            try:
                supervisor.run()
            finally:
                supervisor.kill_all()
    finally:
        if not was_connected:
            ray.shutdown()


@contextmanager
def _placement(spec: LaunchSpec) -> Iterator[Callable[[int], Any]]:
    """Context manager that reserves the resources of all ranks; its value returns the place of a rank.

    Raises:
        TimeoutError: the cluster has not had them for `placement_timeout_s`.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

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
        yield lambda rank: PlacementGroupSchedulingStrategy(group, rank)
    finally:
        remove_placement_group(group)


class _Supervisor:
    """Waits for the processes of a job, and starts those again that fail."""

    def __init__(self, spec: LaunchSpec, place: Callable[[int], Any], variables: Mapping[str, str]) -> None:
        """Starts nothing yet.

        Args:
            spec: what to run.
            place: returns where Ray is to run a rank.
            variables: environment variables of all processes.
        """
        import ray

        self._ray = ray
        self._spec = spec
        self._place = place
        self._variables = dict(variables)
        self._ranks = [_Rank(number) for number in range(spec.nprocs)]
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
        for rank in self._ranks:  # all of them, so that each is told how many are on its node
            with suppress(self._ray.exceptions.RayError):  # it has died, and fails below
                self._learn(rank, self._ray.get(rank.pending))
        if (place := self._ranks[0].place) is not None:
            with suppress(self._ray.exceptions.RayError):
                port = self._ray.get(self._ranks[0].actor.reserve_port.remote())
                self._variables.update(MASTER_ADDR=place.host, MASTER_PORT=str(port))
        while any(rank.pending is not None or rank.end is None for rank in self._ranks):
            self._wait_and_handle()

    def kill_all(self) -> None:
        """Kills all processes that are left."""
        for actor in [*(rank.actor for rank in self._ranks if rank.pending is not None), self._store]:
            if actor is not None:
                with suppress(self._ray.exceptions.RayError):
                    self._ray.kill(actor)

    def _start_store(self) -> Any:
        """Starts the host of the store, which is on the node of this process, if that is one of the cluster's."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self._ray.get_runtime_context().get_node_id()
        here = NodeAffinitySchedulingStrategy(node, soft=True)
        actor = self._ray.remote(StoreActor).options(
            num_cpus=0, scheduling_strategy=here, runtime_env=self._runtime_env()
        )
        return actor.remote(self._variables)

    def _start(self, rank: _Rank) -> None:
        resources = dict(self._spec.resources)
        actor = self._ray.remote(RankActor).options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            scheduling_strategy=self._place(rank.number),
            runtime_env=self._runtime_env(),
        )
        rank.starts = time.monotonic()
        rank.place = rank.end = None
        rank.actor = actor.remote(rank.number)
        rank.pending = rank.actor.place.remote()

    def _runtime_env(self) -> dict[str, Any] | None:
        return dict(self._spec.runtime_env) if self._spec.runtime_env is not None else None

    def _wait_and_handle(self) -> None:
        """Waits until something is done, or a process is to be started again, and goes on from there."""
        pending = {rank.pending: rank for rank in self._ranks if rank.pending is not None}
        resting = [rank for rank in self._ranks if rank.pending is None and rank.end is None]
        pause = max(0.0, min((rank.starts for rank in resting), default=math.inf) - time.monotonic())
        if pending:
            done, _ = self._ray.wait(list(pending), timeout=None if pause == math.inf else pause)
        else:
            done = []
            time.sleep(pause)
        for ref in done:
            self._go_on(pending[ref])
        for rank in resting:
            if rank.starts <= time.monotonic():
                self._start(rank)

    def _go_on(self, rank: _Rank) -> None:
        """Has a rank do what comes next, after what it was asked for is done."""
        exceptions = self._ray.exceptions
        try:
            result = self._ray.get(rank.pending)
        except exceptions.RayError as error:  # also when it has exited because it was asked to
            self._on_exit(rank, error)
            return
        if isinstance(result, Place):
            self._learn(rank, result)
            rank.pending = rank.actor.run.remote(self._spec.fn, self._spec.args, self._environment(rank))
        elif isinstance(result, End):
            rank.end = result
            rank.pending = rank.actor.__ray_terminate__.remote()  # runs the exit handlers
        else:
            self._on_exit(rank, None)

    def _learn(self, rank: _Rank, place: Place) -> None:
        """Notes where a rank runs, and gives it the first number that is free there."""
        if rank.place is None:
            rank.place = place
            used = {each.local_rank for each in self._neighbours(rank) if each is not rank}
            rank.local_rank = next(number for number in itertools.count() if number not in used)

    def _neighbours(self, rank: _Rank) -> Sequence[_Rank]:
        """Returns the ranks whose processes are on the same node."""
        node = rank.place.node if rank.place is not None else None
        return [each for each in self._ranks if each.place is not None and each.place.node == node]

    def _environment(self, rank: _Rank) -> dict[str, str]:
        return {
            **self._variables,
            "RANK": str(rank.number),
            "WORLD_SIZE": str(self._spec.nprocs),
            "LOCAL_RANK": str(rank.local_rank),
            "LOCAL_WORLD_SIZE": str(len(self._neighbours(rank))),
            "TORCHELASTIC_RESTART_COUNT": str(rank.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self._spec.restarts),
        }

    def _on_exit(self, rank: _Rank, error: Exception | None) -> None:
        """Handles the end of a process: nothing if it has succeeded, else a restart, or the end of all."""
        rank.pending = None
        if rank.end is not None and rank.end.status == 0:
            return
        if rank.restarts == self._spec.restarts:
            self._give_the_others_time()
            raise _failure(rank, error)
        how, traceback = _how_it_ended(rank, error)
        rank.pause = self._spec.backoff.next_pause(rank.pause, time.monotonic() - rank.starts)
        rank.restarts += 1
        rank.starts = time.monotonic() + rank.pause
        if traceback:
            log.info("process %d raised\n%s", rank.number, traceback)
        log.warning(
            "%s %s; it is started again in %g s (restart %d of %d)",
            rank.describe(),
            how,
            rank.pause,
            rank.restarts,
            self._spec.restarts,
        )
        rank.end = None

    def _give_the_others_time(self) -> None:
        left = [rank.pending for rank in self._ranks if rank.pending is not None]
        if left:
            self._ray.wait(left, num_returns=len(left), timeout=self._spec.grace_period)


def _how_it_ended(rank: _Rank, error: Exception | None) -> tuple[str, str]:
    """Returns how a process has failed, in words, and the traceback of what it raised; empty if it did not."""
    if rank.end is not None and rank.end.traceback:
        traceback = rank.end.traceback.rstrip()
        lines = traceback.rpartition("Traceback (most recent call last):\n")[2].splitlines()
        return "raised " + next((line for line in lines if not line.startswith(" ")), lines[-1]), traceback
    if rank.end is not None:
        return f"exited with status {rank.end.status}", ""
    reason = str(error).rpartition("The actor is dead because ")[2].strip() or "it has died"
    detail = reason.rpartition("Worker exit detail: ")[2].partition(". ")[0]
    return f"has died ({detail.splitlines()[0]})", ""


def _failure(rank: _Rank, error: Exception | None) -> Exception:
    """Returns the error of a rank, as `launch.spawn` raises it."""
    pid = rank.place.pid if rank.place is not None else -1
    how, traceback = _how_it_ended(rank, error)
    if traceback:
        message = f"\n\n-- {rank.describe()} terminated with the following error:\n{traceback}\n"
        return ProcessRaisedException(message, rank.number, pid)
    status = rank.end.status if rank.end is not None else 1
    return ProcessExitedException(f"{rank.describe()} {how}", rank.number, pid, status)
