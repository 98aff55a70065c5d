"""Profiles remote calls.

A call made inside a profile of torch's is an event of that profile, from when it is made until its answer has
arrived. The callee profiles the function in the same way, and its answer carries what it has recorded.
docs/profiling.md describes what users see.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, Literal, final

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent

from ...proto.v1 import agent_pb2
from ...torch_internals import find_builtin, profiler_enabled, qualified_name, set_profiler_node_id
from ..contracts.agent import RpcAgent, current_agent
from ..contracts.extension import Extension
from ..contracts.messages import RESULT, Deferred, Incoming, Outgoing
from ..contracts.worker import WorkerInfo
from .sessions import (
    ProfiledCall,
    Session,
    config_of,
    current_session,
    decode_events,
    events_from_tensor,
    events_to_tensor,
    in_time,
    torch_hooks,
)

__all__ = [
    "Profiling",
    "RPCExecMode",
    "build_rpc_profiling_key",
    "profiled_call",
    "run_profiled",
    "server_process_global_profile",
]

_call_to_send: "ContextVar[ProfiledCall | None]" = ContextVar("gradwire.rpc.profiled_call", default=None)
"""The event of the call that this thread is about to send."""
_NO_SCOPE = nullcontext()


class RPCExecMode(Enum):
    """The function that a call is made with; part of the name of the call's event."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


def build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Returns the name of a call's event, as torch.distributed.rpc forms it.

    Args:
        exec_type: how the call is made.
        func_name: the name of the called function.
        current_worker_name: the caller.
        dst_worker_name: the callee.
    """
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def profiled_call(
    agent: RpcAgent, mode: RPCExecMode, function: Callable[..., Any], worker: WorkerInfo
) -> AbstractContextManager[None]:
    """Context manager for sending one call: makes it an event if this thread profiles."""
    if not profiler_enabled():
        return _NO_SCOPE
    session = current_session()
    if session is None or (session.is_kineto and not agent.extension(Profiling).profiles_kineto):
        return _NO_SCOPE
    key = build_rpc_profiling_key(mode, _name(function), agent.info.name, worker.name)
    return _sending(session.start_call(key, agent.info.id))


def run_profiled(message: Incoming, function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function that a request names; profiles it if the caller does, or a collector on this worker."""
    profiled: _ProfiledRequest | None = message.state.get(Profiling)
    return function(*args) if profiled is None else profiled.run(function, args)


@final
class Profiling(Extension):
    """The profiled calls of one agent."""

    profiles_kineto = True
    """Whether calls inside `torch.profiler.profile` are profiled too; torch.distributed.rpc leaves them out."""

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        self._calls: dict[int, ProfiledCall] = {}
        self._collectors: weakref.WeakSet[server_process_global_profile] = weakref.WeakSet()
        """Those that are registered; the program keeps them, or a worker that may die without an end."""
        self._lock = threading.Lock()
        """Guards them."""
        torch_hooks.acquire()
        set_profiler_node_id(agent.info.id)

    def collect(self, collector: "server_process_global_profile") -> None:
        """Profiles the calls that arrive from now on for a collector, as long as something else keeps it."""
        with self._lock:
            self._collectors.add(collector)
        self._look_if_needed()

    def stop_collecting(self, collector: "server_process_global_profile") -> None:
        """Stops profiling for a collector."""
        with self._lock:
            self._collectors.discard(collector)
        self._look_if_needed()

    def _living_collectors(self) -> tuple["server_process_global_profile", ...]:
        """Returns the collectors that something keeps. Looks at requests no longer when there are none."""
        with self._lock:
            living = tuple(self._collectors)
        if not living:
            self._look_if_needed()
        return living

    def _look_if_needed(self) -> None:
        self.observes_requests = bool(self._collectors)
        self.on_enabled()

    # Hooks.

    adds_if = staticmethod(_call_to_send.get)
    header = "profile"
    watches_ends = False

    def on_send(self, message: Outgoing) -> None:
        """Adds to a request that it asks for the callee's events, and to an answer the events."""
        if message.reply_to is not None:
            profiled: _ProfiledRequest | None = message.reply_to.state.get(Profiling)
            if profiled is not None and profiled.events is not None:
                message.tensors.append(events_to_tensor(profiled.events))
                message.envelope.profile.SetInParent()
        elif (call := _call_to_send.get()) is not None:
            _call_to_send.set(None)
            if not self.watches_ends:  # as long as nobody profiles, there is nothing to watch
                self.watches_ends = True
                self.on_enabled()
            self._calls[message.envelope.id] = call
            message.envelope.profile.CopyFrom(call.session.config)

    def on_send_aborted(self, message: Outgoing) -> None:
        """Ends the event of a call that was not sent."""
        if message.reply_to is None:
            self.on_complete(message.envelope.id)

    def on_receive(self, message: Incoming) -> None:
        """Takes the callee's events out of an answer; prepares to profile a request."""
        has_header = message.envelope.HasField("profile")
        if message.envelope.type == RESULT:
            if has_header:
                self._take_events(message)
        elif has_header or self.observes_requests:
            header = message.envelope.profile if has_header else None
            collectors = self._living_collectors() if self.observes_requests else ()
            if has_header or collectors:
                message.state[Profiling] = _ProfiledRequest(self, header, collectors)

    def on_complete(self, identifier: int) -> None:
        """Ends the event of a call."""
        if (call := self._calls.pop(identifier, None)) is not None:
            call.session.finish_call(call)

    def close(self) -> None:
        """Stops collecting, and releases the hooks in torch. The agent ends the calls in flight."""
        with self._lock:
            self._collectors.clear()
        torch_hooks.release()

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:  # noqa: ARG002
        """In a forked child, leaves the calls in flight out of the profile of this thread."""
        self._lock = threading.Lock()  # which another thread of the parent may have held
        if (session := current_session()) is not None:
            session.leave_to_parent()

    def _take_events(self, message: Incoming) -> None:
        if not message.tensors:
            raise ValueError("malformed profile: the answer has no tensor of events")
        events = events_from_tensor(message.tensors.pop())
        if (call := self._calls.get(message.envelope.id)) is not None:
            call.callee_events = events


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

    def __exit__(self, *exception: object) -> Literal[False]:
        """Ends the profile and computes its results. Raises RuntimeError if it has not begun."""
        if not self.enabled:
            return False
        if self._profiling is None:
            raise RuntimeError("the profile has not begun: call __enter__ first")
        with self._lock:
            if self._is_closed:  # another worker may end it, too
                return False
            self._is_closed = True
            calls, self._calls = self._calls, []
        self._profiling.stop_collecting(self)
        local_node = self._profiling.agent.info.id
        self.process_global_function_events = [
            sorted(decode_events(events, self._started_ns, local_node), key=in_time) for events in calls
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
        """Adds the events of one call that this worker has run, unless it has ended. Called on any thread."""
        with self._lock:
            if events and not self._is_closed:
                self._calls.append(events)


@contextmanager
def _sending(call: ProfiledCall) -> Iterator[None]:
    """Context manager for sending a profiled call, which `Profiling.on_send` takes on this thread."""
    _call_to_send.set(call)
    try:
        yield
    finally:
        if _call_to_send.get() is not None:  # nothing was sent
            _call_to_send.set(None)
            call.session.finish_call(call)


@final
class _ProfiledRequest:
    """A request that is profiled on this worker, for its caller, for collectors or for both."""

    def __init__(
        self,
        profiling: Profiling,
        header: agent_pb2.ProfileHeader | None,
        collectors: tuple["server_process_global_profile", ...],
    ) -> None:
        self._profiling = profiling
        self._is_for_caller = header is not None
        self._collectors = collectors
        self._config = agent_pb2.ProfileHeader()
        for config in [header, *(collector.header for collector in collectors)]:
            if config is not None:
                self._config.MergeFrom(config)  # the union, because false fields are not set
        self.events: list[agent_pb2.ProfileEvent] | None = None
        """The events that the answer carries; None until the call has ended, and if only collectors want them."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if profiler_enabled():  # an earlier function has left a profile open on this thread
            return function(*args)
        session = Session(self._config)
        try:
            result = session.run(self._profiling.agent.info.id, function, args)
        except BaseException:
            self._finish(session)
            raise
        if isinstance(result, Deferred):
            result.future.add_done_callback(partial(self._finish, session))
        else:
            self._finish(session)
        return result

    def _finish(self, session: Session, _done: object = None) -> None:
        events = session.close()
        for collector in self._collectors:
            collector.add(events)
        if self._is_for_caller:
            self.events = events


def _name(function: Callable[..., Any]) -> str:
    builtin: str | None = find_builtin(function)
    if builtin is not None:
        return builtin
    if isinstance(function, torch.jit.ScriptFunction):
        return str(qualified_name(function))
    return str(getattr(function, "__qualname__", type(function).__qualname__))
