"""Starts several processes of a script: on this host, or on the nodes of a Ray cluster.

    def work(rank: int, text: str) -> None:
        rpc.init_rpc(f"worker{rank}")          # reads rank, world size and store from the environment
        ...
        rpc.shutdown()

    if __name__ == "__main__":
        launch.spawn(work, 4, ("hello",))

Each process gets the environment variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT), so the same function also runs under torchrun, with gradwire or torch.distributed.

With `restarts`, a process that dies is started again under its rank, with the same variables; torchrun's
TORCHELASTIC_RESTART_COUNT says how often it has been, and TORCHELASTIC_MAX_RESTARTS how often it can be.

gradwire's functions meet at a store that this process hosts. It lets in those who have a token, which each `spawn`
makes and gives to its processes in memory; or, if the environment has credentials, those who have these. torch's
own functions do not use it: with them rank 0 hosts a store at MASTER_PORT, which lets everybody in.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessContext, start_processes

from ..c10d.rendezvous.url import LaunchedProcess, find_launched_process
from ..torch_internals import set_parent_death_signal
from .hosting import hosted_spawn_store, worker_environment
from .supervisor import Backoff, supervise

__all__ = ["Backoff", "LaunchedProcess", "ray", "spawn", "this_process"]

DEFAULT_BACKOFF = Backoff()


def spawn(
    fn: Callable[..., object],
    nprocs: int,
    args: tuple[Any, ...] = (),
    *,
    start_method: str = "spawn",
    grace_period: float = 10.0,
    restarts: int = 0,
    backoff: Backoff = DEFAULT_BACKOFF,
) -> None:
    """Runs `fn(rank, *args)` in `nprocs` new processes on this host and waits for them.

    A process fails if `fn` raises, if it exits with a nonzero status, or if it is killed. It is started again, up
    to `restarts` times for each rank, while the others go on; a warning in the log says so in one line.

    When one fails that is not started again, the others have `grace_period` seconds to exit on their own, for
    example to report the lost worker. Those that are left get SIGTERM, and after another `grace_period` SIGKILL.
    On any other exception here, such as KeyboardInterrupt, all of them get SIGTERM at once, and SIGKILL after
    `grace_period`. All of them die with this process.

    Args:
        fn: a function at the top level of a module or of the program, so that the new processes can import it. One
            of a notebook or a prompt is not there for them, unless they are forked.
        nprocs: the number of processes.
        args: arguments of `fn` after the rank; they are pickled.
        start_method: `"spawn"`, `"forkserver"` or `"fork"`, as in multiprocessing.
        grace_period: see above, in seconds.
        restarts: how often the process of each rank is started again when it has failed.
        backoff: the pauses before that.

    Raises:
        ValueError: `nprocs`, `grace_period` or `restarts` is out of range, or new processes cannot import `fn`.
        TypeError: `args` is no tuple or list.
        CredentialsError: the credentials in the environment are not valid.
        torch.multiprocessing.ProcessRaisedException: `fn` raised; the message has the first process's traceback.
        torch.multiprocessing.ProcessExitedException: a process was killed, or exited with a nonzero status.
    """
    _check(nprocs, args, grace_period, restarts)
    if start_method != "fork":
        _check_importable(fn)
    with hosted_spawn_store(start_method) as store:

        def start(ranks: Sequence[int], restart: int) -> ProcessContext:
            environment = worker_environment(store, nprocs, restart, restarts)
            return start_processes(  # type: ignore[no-untyped-call,no-any-return]
                _run_worker, (ranks, environment, fn, args), len(ranks), join=False, start_method=start_method
            )

        supervise(
            start(range(nprocs), 0),
            lambda rank, restart: start([rank], restart),
            restarts=restarts,
            backoff=backoff,
            grace_period=grace_period,
        )


def ray(
    fn: Callable[..., object],
    nprocs: int,
    args: tuple[Any, ...] = (),
    *,
    grace_period: float = 10.0,
    restarts: int = 0,
    backoff: Backoff = DEFAULT_BACKOFF,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    placement_timeout_s: float = 300.0,
    runtime_env: Mapping[str, Any] | None = None,
) -> None:
    """Runs `fn(rank, *args)` in `nprocs` new processes on the nodes of a Ray cluster and waits for them.

    It is `spawn` for several machines: the arguments that both have mean the same, and so does what a process
    finds in its environment, but for MASTER_ADDR, which is the node of rank 0. The process of a rank is an actor,
    which ends when `fn` does. One that is started again may be on another node, if its own is gone.

    The processes meet at a store of this job, which Ray runs on the node of this process, and which lets in those
    who have its token. Each call makes a token, unless the environment has credentials, which are used then. What
    else the environment says by GRADWIRE_* variables, other than addresses, holds for all processes.

    It uses the cluster to which this process is connected; else the one that RAY_ADDRESS names, or that runs here.

    Args:
        fn: a function; the nodes must be able to import what it uses.
        nprocs: the number of processes.
        args: arguments of `fn` after the rank; they are pickled.
        grace_period: seconds that the others have to end when a process has failed; then they are killed.
        restarts: how often the process of each rank is started again when it has failed.
        backoff: the pauses before that.
        resources: what each process needs of its node, as Ray names it: `{"CPU": 2, "GPU": 1}`; by default one
            CPU.
        strategy: `"PACK"` for few nodes, `"SPREAD"` for many; with `"STRICT_PACK"` for one node and
            `"STRICT_SPREAD"` for one node each, or not at all.
        placement_timeout_s: seconds to wait until the cluster has room for all of them.
        runtime_env: Ray's runtime environment of the processes, as for code that the nodes do not have.

    Raises:
        ValueError: an argument is out of range.
        TypeError: `args` is no tuple or list.
        ImportError: Ray is not installed: pip install ray.
        TimeoutError: the cluster has not had room for all processes.
        CredentialsError: the credentials in the environment are not valid.
        torch.multiprocessing.ProcessRaisedException: `fn` raised; the message has the first process's traceback.
        torch.multiprocessing.ProcessExitedException: a process died, or exited with a nonzero status.
    """
    from .ray_cluster import STRATEGIES, LaunchSpec, run_on_ray

    _check(nprocs, args, grace_period, restarts)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}: give one of {', '.join(STRATEGIES)}")
    if not placement_timeout_s > 0:
        raise ValueError(f"placement_timeout_s is {placement_timeout_s!r}: give seconds, more than 0")
    resources = {"CPU": 1} if resources is None else resources
    if not resources or any(not amount > 0 for amount in resources.values()):
        raise ValueError(f"resources is {resources!r}: give amounts of more than 0, such as {{'CPU': 1}}")
    run_on_ray(
        LaunchSpec(
            fn=fn,
            nprocs=nprocs,
            args=args,
            grace_period=grace_period,
            restarts=restarts,
            backoff=backoff,
            resources=resources,
            strategy=strategy,
            placement_timeout_s=placement_timeout_s,
            runtime_env=None if runtime_env is None else dict(runtime_env),
        )
    )


def this_process() -> LaunchedProcess | None:
    """Returns rank and world size of this process, if a launcher has started it; else None.

    A program that runs under launchers, and otherwise starts its processes itself, asks this:

        launched = launch.this_process()
        if launched is None:
            launch.spawn(work, 4)
        else:
            work(launched.rank)

    Known launchers are torchrun, `gradwire spawn`, `spawn`, `ray`, srun, mpiexec, and Indexed Jobs of Kubernetes.
    RANK and WORLD_SIZE come first, then the variables of the launchers: docs/launch.md.

    Raises:
        RendezvousError: the environment has one of the two only, or they are no rank and size; or this is the
            batch script of a Slurm job of several tasks, without srun.
    """
    return find_launched_process(os.environ)


def _check(nprocs: object, args: object, grace_period: float, restarts: object) -> None:
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
        raise ValueError(f"nprocs is {nprocs!r}: give the number of processes, at least 1")
    if not isinstance(args, tuple | list):
        raise TypeError(f"args is {args!r}: give a tuple of the arguments after the rank, such as ({args!r},)")
    if not grace_period >= 0:
        raise ValueError(f"grace_period is {grace_period!r}: give seconds, at least 0")
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        raise ValueError(f"restarts is {restarts!r}: give a number, 0 for no restarts")


def _check_importable(fn: Callable[..., object]) -> None:
    """Raises ValueError if a function is one of a notebook or a prompt, whose code is in no file."""
    main = sys.modules["__main__"]
    has_source = getattr(main, "__file__", None) is not None or getattr(main, "__spec__", None) is not None
    if getattr(fn, "__module__", "") == "__main__" and not has_source:
        raise ValueError(
            f"fn is {getattr(fn, '__qualname__', fn)!r} of a notebook or a prompt, which new processes cannot "
            "import: write it to a module (in a notebook: %%writefile work.py) and import it from there; or give "
            'start_method="fork", in a process that has used neither gradwire nor CUDA before'
        )


def _run_worker(
    index: int,
    ranks: Sequence[int],
    environment: Mapping[str, str],
    fn: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    # torch chooses SIGINT, which a program ignores, with its children, that a shell runs in the background.
    set_parent_death_signal(signal.SIGKILL)
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():  # it has died before that
        signal.raise_signal(signal.SIGKILL)
    rank = ranks[index]
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # if torchrun has started the launcher
    if "OMP_NUM_THREADS" not in os.environ:  # else torch uses all cores in every process
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(environment["LOCAL_WORLD_SIZE"])))
    fn(rank, *args)
