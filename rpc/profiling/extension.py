"""Profiling of remote calls.

A call that is made inside a profile of torch's is an event of it, from when it is made until its answer has
come. The callee profiles the function too, in the same way, and its answer brings what it has recorded.
docs/profiling.md tells what users see.
"""

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, Protocol, final

import torch

from ...proto.v1 import agent_pb2
from ...torch_internals import find_builtin, profiler_enabled, qualified_name, set_profiler_node_id
from ..contracts.agent import RpcAgent
from ..contracts.extension import Extension
from ..contracts.messages import Deferred, Incoming, MessageType, Outgoing
from ..contracts.worker import WorkerInfo
from .events import REMOTE_PREFIX, events_from_tensor, events_to_tensor
from .sessions import ProfiledCall, Session, current_session, hooks

__all__ = [
    "REMOTE_PREFIX",
    "Collector",
    "Profiling",
    "RPCExecMode",
    "build_rpc_profiling_key",
    "profiled_call",
    "run_profiled",
]

_mine = threading.local()
_NOTHING = nullcontext()


class RPCExecMode(Enum):
    """How a call is made, as it shows in the name of its event."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class Collector(Protocol):
    """Gets what is recorded on this worker while it is registered with `Profiling.collect`."""

    header: agent_pb2.ProfileHeader
    """How it profiles."""

    def add(self, events: list[agent_pb2.ProfileEvent]) -> None:
        """The events of one call that this worker has run. On any thread."""


def build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name of a call's event."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def profiled_call(
    agent: RpcAgent, mode: RPCExecMode, function: Callable[..., Any], worker: WorkerInfo
) -> AbstractContextManager[None]:
    """Around sending one call: makes it an event if this thread profiles. Else costs one look."""
    if not profiler_enabled():
        return _NOTHING
    session = current_session()
    if session is None or (session.kineto and not agent.extension(Profiling).kineto):
        return _NOTHING
    key = build_rpc_profiling_key(mode, _name(function), agent.info.name, worker.name)
    return _Sending(session.call(key, agent.info.id))


def run_profiled(message: Incoming, function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function that a message asks for, profiled if its caller, or somebody on this worker, profiles."""
    served: _Served | None = message.state.get(Profiling)
    return function(*args) if served is None else served.run(function, args)


@final
class Profiling(Extension):
    """The profiled calls of one agent."""

    kineto = True
    """Are calls inside `torch.profiler.profile` profiled too? torch.distributed.rpc leaves them out."""

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        self._calls: dict[int, ProfiledCall] = {}
        self._collectors: list[Collector] = []
        hooks.hold()
        set_profiler_node_id(agent.info.id)

    def collect(self, collector: Collector) -> None:
        """Has the calls that arrive from now on profiled for a collector."""
        self._collectors.append(collector)

    def stop_collecting(self, collector: Collector) -> None:
        """The collector gets nothing any more."""
        with contextlib.suppress(ValueError):  # the agent has shut down
            self._collectors.remove(collector)

    def collects(self, collector: Collector) -> bool:
        """Is it registered?"""
        return collector in self._collectors

    # The caller.

    def on_send(self, message: Outgoing) -> None:
        """A request asks for the callee's events, its answer brings them."""
        if message.reply_to is not None:
            served: _Served | None = message.reply_to.state.get(Profiling)
            if served is not None and served.events is not None:
                message.tensors.append(events_to_tensor(served.events))
                message.envelope.profile.SetInParent()
        elif (call := getattr(_mine, "call", None)) is not None:
            _mine.call = None
            self._calls[message.envelope.id] = call
            message.envelope.profile.CopyFrom(call.config)

    def on_send_aborted(self, message: Outgoing) -> None:
        """A request was not sent."""
        if message.reply_to is None:
            self.on_complete(message.envelope.id)

    def on_receive(self, message: Incoming) -> None:
        """Takes the events out of an answer; has a request profiled."""
        has_header = message.envelope.HasField("profile")
        if message.envelope.type == MessageType.RESULT:
            if has_header:
                self._take_events(message)
        elif has_header or self._collectors:
            header = message.envelope.profile if has_header else None
            message.state[Profiling] = _Served(self, header, tuple(self._collectors))

    def on_complete(self, identifier: int) -> None:
        """A call is over."""
        if (call := self._calls.pop(identifier, None)) is not None:
            call.finish()

    def close(self) -> None:
        """Leaves torch as it was. Calls under way are ended by the agent."""
        self._collectors.clear()
        hooks.release()

    def _take_events(self, message: Incoming) -> None:
        if not message.tensors:
            raise ValueError("malformed profile: it is missing")
        events = events_from_tensor(message.tensors.pop())
        if (call := self._calls.get(message.envelope.id)) is not None:
            call.received = events


@final
class _Sending:
    """A call that is profiled, while it is sent."""

    def __init__(self, call: ProfiledCall) -> None:
        self._call = call

    def __enter__(self) -> None:
        _mine.call = self._call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if getattr(_mine, "call", None) is not None:  # nothing was sent
            _mine.call = None
            self._call.finish()


@final
class _Served:
    """A call from another worker that is profiled here."""

    def __init__(
        self,
        profiling: Profiling,
        header: agent_pb2.ProfileHeader | None,
        collectors: tuple[Collector, ...],
    ) -> None:
        self._profiling = profiling
        self._wanted = header is not None
        self._collectors = collectors
        self._config = agent_pb2.ProfileHeader()
        for config in [header, *(collector.header for collector in collectors)]:
            if config is not None:
                self._config.MergeFrom(config)  # the union: what is false is not set
        self.events: list[agent_pb2.ProfileEvent] | None = None
        """For the caller, when the call is over."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if profiler_enabled():  # an earlier function left a profile open on this thread
            return function(*args)
        session = Session(self._config)
        try:
            result = session.run(self._profiling.agent.info.id, function, args)
        except BaseException:
            self._over(session)
            raise
        if isinstance(result, Deferred):
            result.future.add_done_callback(partial(self._over, session))
        else:
            self._over(session)
        return result

    def _over(self, session: Session, _done: object = None) -> None:
        events = session.close()
        for collector in self._collectors:
            if self._profiling.collects(collector):
                collector.add(events)
        if self._wanted:
            self.events = events


def _name(function: Callable[..., Any]) -> str:
    builtin: str | None = find_builtin(function)
    if builtin is not None:
        return builtin
    if isinstance(function, torch.jit.ScriptFunction):
        return str(qualified_name(function))
    return str(getattr(function, "__qualname__", type(function).__qualname__))
