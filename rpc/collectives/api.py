"""`rpc.all_gather` and `rpc.barrier`: collectives of workers."""

import threading
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from ..contracts.agent import current_agent
from ..contracts.arguments import UNSET_RPC_TIMEOUT, check_timeout
from ..contracts.worker import WorkerInfo
from .rounds import USER_TOPIC

__all__ = ["AllGatherStates", "all_gather", "barrier"]

T = TypeVar("T")


class AllGatherStates:
    """The state of an all_gather in torch.distributed.rpc; unused here, for programs that name the class."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


def all_gather(
    obj: T, worker_names: Collection[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, T]:
    """Gathers an object of each worker on all of them. All must call it, and their collectives in the same order.

    Args:
        obj: the object of this worker; anything that pickles.
        worker_names: the workers that take part, this one among them. By default all workers of the group; in a
            dynamic group, its current members.
        timeout: seconds, 0 for no limit. By default that of the options.

    Each worker keeps a copy of the objects until the next collective of the same workers has ended: members whose
    leader dies may ask for them. After one with large objects, `barrier` of the same workers frees the copies.

    A worker that dies meanwhile and is started again takes part or not, for all workers alike: if not, the first
    collective that it calls is the next one of the others.

    Returns:
        The objects by worker name, without those of workers that have died.

    Raises:
        NotInitializedError: this process is no worker.
        UnknownWorkerError: there is no worker of some name.
        ValueError: this worker is not among `worker_names`.
        RpcTimeoutError: some workers did not call it in time; the error names them.
        WorkerLostError: this worker and another one have lost each other, and the others have ended it without
            this one.
        SerializationError: the object does not pickle.
    """
    return _all_gather("all_gather", obj, worker_names, timeout)


def barrier(worker_names: Collection[str] | None = None) -> None:
    """Blocks until all of these workers have called it, with the timeout of the options. See `all_gather`.

    Args:
        worker_names: as in `all_gather`.

    Raises:
        NotInitializedError, UnknownWorkerError, ValueError, RpcTimeoutError, WorkerLostError: as in `all_gather`.
    """
    _all_gather("barrier", None, worker_names, UNSET_RPC_TIMEOUT)


def _all_gather(operation: str, obj: T, worker_names: Collection[str] | None, timeout: float) -> dict[str, T]:
    agent = current_agent()
    workers: Sequence[WorkerInfo] = agent.workers()
    if worker_names:
        workers = [agent.worker(name) for name in sorted(worker_names)]
    if agent.info not in workers:
        raise ValueError(f"{agent.info.name!r} is not among the workers {[worker.name for worker in workers]}")
    seconds = check_timeout(timeout)
    seconds = agent.rpc_timeout if seconds is None else seconds
    try:
        values = agent.all_gather(USER_TOPIC, obj, workers, seconds, operation)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # without the frames of the wait
    by_name = {agent.incarnation(wire_id).name: gathered for wire_id, gathered in values.items()}
    return {worker.name: by_name[worker.name] for worker in workers if worker.name in by_name}
