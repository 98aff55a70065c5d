"""gradwire's agent with the methods of torch's."""

import time
import weakref
from typing import Any, ClassVar

import torch

from .. import rpc
from ..rpc.contracts.agent import current_agent, holder
from . import debug_info

__all__ = ["RpcAgent", "TensorPipeAgent", "current", "enable_gil_profiling", "forget", "set_current"]

GIL_SAMPLES = 16


class RpcAgent:
    """What torch's callers see of an agent."""

    gil_profiling: ClassVar[bool] = False

    def __init__(self, agent: rpc.RpcAgent) -> None:
        self._agent = agent

    @property
    def is_static_group(self) -> bool:
        """Do all workers stay from the beginning to the end?"""
        return not self._agent.dynamic

    def get_worker_info(self, worker: str | int | None = None) -> rpc.WorkerInfo:
        """A worker's name and id; without an argument, this worker's."""
        return self._agent.info if worker is None else self._agent.worker(worker)

    def get_worker_infos(self) -> list[rpc.WorkerInfo]:
        """All workers of the group."""
        return list(self._agent.workers())

    def get_debug_info(self) -> dict[str, str]:
        """Counts, as text."""
        info = debug_info.agent_info()
        if self.gil_profiling:
            info["agent.gil_average_wait_time_us"] = str(_measure_gil_wait())
        return info

    def get_metrics(self) -> dict[str, str]:
        """The same: torch has both."""
        return self.get_debug_info()

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Waits until no worker has calls under way, and leaves then if `shutdown`; `timeout` in seconds."""
        self._agent.join(timeout)
        if shutdown:
            self.shutdown()

    def shutdown(self) -> None:
        """Leaves the group at once."""
        self._agent.shutdown(graceful=False, timeout=0)

    def _get_device_map(self, worker: rpc.WorkerInfo) -> dict[torch.device, torch.device]:
        """Which of this worker's devices become which of another's in calls to it."""
        return dict(self._agent.options.device_maps.get(worker.name, {}))  # type: ignore[arg-type]

    def _get_backend_options(self) -> rpc.RpcBackendOptions:
        return self._agent.options


class TensorPipeAgent(RpcAgent):
    """What is behind the backend TENSORPIPE."""


_wrapped: "weakref.WeakValueDictionary[rpc.RpcAgent, RpcAgent]" = weakref.WeakValueDictionary()
"""What `current` has made and somebody still has. An agent is kept by it, so it must not be kept here."""


def current() -> Any:
    """The current agent for torch's callers: the same object as long as somebody has it.

    Raises:
        NotInitializedError: there is none.
    """
    agent: object = current_agent()
    if not isinstance(agent, rpc.RpcAgent):
        return agent  # of another backend, which knows what its callers expect
    return _wrapped.setdefault(agent, TensorPipeAgent(agent))


def forget() -> None:
    """Ends the current agent at once, if there is one."""
    agent = holder.get()
    if agent is not None:
        agent.shutdown(graceful=False, timeout=0)
        holder.forget(agent)


def set_current(agent: object) -> None:
    """Does nothing: `init_rpc` makes the agent that a backend returns the current one."""


def enable_gil_profiling(enable: bool) -> None:
    """Has the debug info of agents say how long a thread of this process waits for Python's lock."""
    RpcAgent.gil_profiling = enable


def _measure_gil_wait() -> float:
    """Microseconds from giving up the lock until having it again, on average."""
    start = time.perf_counter()
    for _ in range(GIL_SAMPLES):
        time.sleep(0)
    return (time.perf_counter() - start) / GIL_SAMPLES * 1e6
