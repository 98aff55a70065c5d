"""`server_process_global_profile`: a profile of all calls that a worker runs for other workers."""

import threading
import time
from itertools import chain
from typing import Any, final

from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent

from ...proto.v1 import agent_pb2
from ..contracts.agent import current_agent
from .events import decode_events
from .extension import Profiling
from .sessions import config_of

__all__ = ["server_process_global_profile"]


@final
class server_process_global_profile(profiler_legacy.profile):  # noqa: N801 - torch's name, and like its base's
    """Profiles the calls that this worker runs for other workers, on all threads, while the context is open.

    Several may be open at the same time. It takes the options of `torch.autograd.profiler_legacy.profile` and
    has its results: `key_averages`, `table`, `export_chrome_trace`, `total_average`, `self_cpu_time_total`,
    `function_events`. Calls that are running at its end are left out.

    Attributes:
        process_global_function_events: for each call, the list of its events.

    Example, from another worker:

        profile = rpc.remote("server", rpc.server_process_global_profile)
        profile.rpc_sync().__enter__()
        ...
        profile.rpc_sync().__exit__(None, None, None)
        print(profile.rpc_sync().key_averages())
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.process_global_function_events: list[list[FunctionEvent]] = []
        self._lock = threading.Lock()
        self._calls: list[list[agent_pb2.ProfileEvent]] = []
        self._is_closed = False
        self._profiling: Profiling | None = None
        self._started_ns = 0

    def __getstate__(self) -> dict[str, Any]:
        """Pickles only the results, for calls that return the profile itself, as `__enter__` does."""
        return {**self.__dict__, "_lock": None, "_profiling": None, "_calls": [], "header": None}

    def __enter__(self) -> "server_process_global_profile":
        """Begins to profile.

        Raises:
            RuntimeError: the profile has been used already.
            NotInitializedError: this process is no worker.
        """
        if not self.enabled:
            return self
        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        self.header = config_of(self)
        self._profiling = current_agent().extension(Profiling)
        self.entered = True
        self._started_ns = time.time_ns()
        self._profiling.collect(self)
        return self

    def __exit__(self, *exception: object) -> bool:
        """Ends the profile and computes its results. Raises RuntimeError if it has not begun."""
        if not self.enabled:
            return False
        if self._profiling is None:
            raise RuntimeError("the profile has not begun: call __enter__ first")
        if self._is_closed:
            return False
        self._is_closed = True
        self._profiling.stop_collecting(self)
        local_node = self._profiling.agent.info.id
        with self._lock:
            calls, self._calls = self._calls, []
        self.process_global_function_events = [
            sorted(
                decode_events(events, self._started_ns, local_node),
                key=lambda e: (e.time_range.start, -e.time_range.end),
            )
            for events in calls
        ]
        self.function_events = EventList(
            chain.from_iterable(self.process_global_function_events),
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
            with_flops=self.with_flops,
        )
        self.function_events._build_tree()
        return False

    def add(self, events: list[agent_pb2.ProfileEvent]) -> None:
        """Adds the events of one call; see Collector."""
        if events:
            with self._lock:
                self._calls.append(events)
