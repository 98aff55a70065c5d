"""Wraps gradwire's agent in classes with the methods of torch's agents."""

import time
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from .. import rpc
from ..autograd.extension import Autograd
from ..rpc.contracts.agent import current_agent, holder
from ..rref.forks import References

__all__ = [
    "RpcAgent",
    "TensorPipeAgent",
    "all_info",
    "autograd_info",
    "current",
    "enable_gil_profiling",
    "references_info",
    "stop_current",
]

GIL_SAMPLES = 16
"""Number of GIL hand-overs that one measurement averages."""


class RpcAgent:
    """An agent with the methods of torch's RpcAgent."""

    gil_profiling: ClassVar[bool] = False

    def __init__(self, agent: rpc.RpcAgent) -> None:
        self._agent = agent

    @property
    def is_static_group(self) -> bool:
        """Whether the names of the group's workers are fixed. One that has died may be replaced under its name."""
        return not self._agent.dynamic

    def get_worker_info(self, worker: str | int | None = None) -> rpc.WorkerInfo:
        """Returns a worker's name and id; without an argument, this worker's."""
        return self._agent.info if worker is None else self._agent.worker(worker)

    def get_worker_infos(self) -> list[rpc.WorkerInfo]:
        """Returns the name and id of every worker of the group."""
        return list(self._agent.workers())

    def get_debug_info(self) -> dict[str, str]:
        """Returns the agent's counters, as text."""
        info = _agent_info()
        if self.gil_profiling:
            info["agent.gil_average_wait_time_us"] = str(_measure_gil_wait())
        return info

    def get_metrics(self) -> dict[str, str]:
        """Returns the same as `get_debug_info`."""
        return self.get_debug_info()

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Waits until no call is in flight between any workers, which all call this; then leaves if it is to.

        In a dynamic group, waits for the calls of this worker only. The timeout is in seconds, 0 for none.
        """
        self._agent.join(timeout)
        if shutdown:
            self.shutdown()

    def shutdown(self) -> None:
        """Leaves the group without waiting for other workers."""
        self._agent.shutdown(graceful=False, timeout=0)

    def _get_device_map(self, worker: rpc.WorkerInfo) -> dict[torch.device, torch.device]:
        """Returns the device map of calls to a worker, from local to remote devices."""
        return dict(self._agent.options.device_maps.get(worker.name, {}))  # type: ignore[arg-type]

    def _get_backend_options(self) -> rpc.RpcBackendOptions:
        return self._agent.options


class TensorPipeAgent(RpcAgent):
    """The agent of the backend TENSORPIPE."""


_wrappers: "weakref.WeakValueDictionary[rpc.RpcAgent, RpcAgent]" = weakref.WeakValueDictionary()
"""The wrappers that are in use. They are weak, since a wrapper keeps its agent alive."""


def current() -> Any:
    """Returns the current agent, in the same wrapper as long as that is in use. Raises NotInitializedError."""
    agent: object = current_agent()
    if not isinstance(agent, rpc.RpcAgent):
        return agent  # of another backend, which defines its own agent class
    return _wrappers.setdefault(agent, TensorPipeAgent(agent))


def stop_current() -> None:
    """Shuts the current agent down, if there is one, without waiting for other workers."""
    agent = holder.get()
    if agent is not None:
        agent.shutdown(graceful=False, timeout=0)
        holder.clear(agent)


def references_info() -> dict[str, str]:
    """Returns the debug counters of references, as text."""
    return _as_text(current_agent().extension(References).live_objects())


def autograd_info() -> dict[str, str]:
    """Returns those of autograd contexts."""
    return _as_text(current_agent().extension(Autograd).live_objects())


def all_info() -> dict[str, str]:
    """Returns those of references, of contexts, and of the agent."""
    return references_info() | autograd_info() | _agent_info()


def _agent_info() -> dict[str, str]:
    others = references_info() | autograd_info()
    return {name: text for name, text in _as_text(current_agent().debug_info()).items() if name not in others}


def _as_text(counts: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in counts.items()}


def enable_gil_profiling(enable: bool) -> None:
    """Includes the average waiting time for the GIL in the debug info of agents, or stops doing so."""
    RpcAgent.gil_profiling = enable


def _measure_gil_wait() -> float:
    """Returns the average time, in microseconds, from releasing the GIL until acquiring it again."""
    start = time.perf_counter()
    for _ in range(GIL_SAMPLES):
        time.sleep(0)
    return (time.perf_counter() - start) / GIL_SAMPLES * 1e6
