"""Bringing values of workers together by calls, and waiting for each other."""

import threading
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from ..contracts.agent import current_agent
from ..contracts.arguments import UNSET_RPC_TIMEOUT, check_timeout
from ..contracts.worker import WorkerInfo

__all__ = ["AllGatherStates", "all_gather", "barrier"]

T = TypeVar("T")


class AllGatherStates:
    """What a gathering has so far. Kept for programs that name the class; the agent keeps its own account."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


def all_gather(
    obj: T, worker_names: Collection[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, T]:
    """Brings the objects of several workers together on all of them. All must call it, in the same order.

    Args:
        obj: this worker's, anything that pickles.
        worker_names: who takes part, this worker included. By default all workers of the group; of a dynamic
            one, the members of the moment.
        timeout: seconds, 0 for none. By default that of the options.

    Returns:
        The objects by worker name. Workers that have died are not in it.

    Raises:
        NotInitializedError, UnknownWorkerError
        ValueError: this worker is not among `worker_names`.
        RpcTimeoutError: not everybody came in time; it says who.
    """
    return _gather("all_gather", obj, worker_names, timeout)


def barrier(worker_names: Collection[str] | None = None) -> None:
    """Returns when all of these workers have called it. Takes and raises what `all_gather` does."""
    _gather("barrier", None, worker_names, UNSET_RPC_TIMEOUT)


def _gather(operation: str, obj: T, worker_names: Collection[str] | None, timeout: float) -> dict[str, T]:
    agent = current_agent()
    workers: Sequence[WorkerInfo] = agent.workers()
    if worker_names:
        workers = [agent.worker(name) for name in sorted(worker_names)]
    if agent.info not in workers:
        raise ValueError(f"{agent.info.name!r} is not among the workers {[worker.name for worker in workers]}")
    seconds = check_timeout(timeout)
    seconds = agent.rpc_timeout if seconds is None else seconds
    try:
        values = agent.all_gather("user", obj, workers, seconds, operation)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # without the frames of the wait
    return {worker.name: values[worker.id] for worker in workers if worker.id in values}
