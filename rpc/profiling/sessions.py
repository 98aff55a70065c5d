"""Open profiles, and the remote calls made in them.

A session belongs to one open profile of torch's: a user's, or the one that a worker opens around a function
that it runs for a caller who profiles. torch's profilers are per thread, and so are sessions.

The event of a call must be ended while its profile is still open. Ended later it would write into memory that
torch's kineto profiler has given back. So a session that closes ends the events of the calls that are under way.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, final

import torch
from torch.autograd import profiler, profiler_legacy
from torch.autograd.profiler import record_function

from ...proto.v1 import agent_pb2
from ...torch_internals import (
    ExperimentalConfig,
    ProfilerConfig,
    ProfilerState,
    disable_legacy_profiler,
    enable_legacy_profiler,
    profiler_enabled,
)
from .events import encode_records, merge_events, relabel

__all__ = ["ProfiledCall", "Session", "TorchHooks", "current_session", "hooks"]

_mine = threading.local()

log = logging.getLogger(__name__)


def current_session() -> "Session | None":
    """The session of this thread's open profile."""
    session: Session | None = getattr(_mine, "session", None)
    return session if session is not None and not session.closed else None


@final
class Session:
    """What belongs to an open profile beyond what torch records. Safe to use from any thread."""

    def __init__(self, config: agent_pb2.ProfileHeader, *, kineto: bool = False) -> None:
        self.config = config
        self.kineto = kineto
        self.started_ns = time.time_ns()
        self.closed = False
        self._lock = threading.Lock()
        self._recording = True
        self._calls: set[ProfiledCall] = set()
        self._events: list[agent_pb2.ProfileEvent] = []

    def call(self, key: str, node: int) -> "ProfiledCall":
        """Begins the event of a call that worker `node` makes."""
        call = ProfiledCall(self, key, node)
        with self._lock:
            self._calls.add(call)
        return call

    def finish(self, call: "ProfiledCall", received: list[agent_pb2.ProfileEvent]) -> None:
        """Ends the event of a call, with what its callee recorded. Does nothing the second time."""
        with self._lock:
            if call not in self._calls:
                return
            self._calls.discard(call)
            call.end()
            end_ns = time.time_ns()
            relabel(received, call.key, call.started_ns, end_ns)
            if not self._recording:
                self._events.append(call.event(end_ns))
            self._events.extend(received)

    def close(self) -> list[agent_pb2.ProfileEvent]:
        """Ends the events of calls that are under way; what other workers recorded."""
        with self._lock:
            self.closed = True
            while self._calls:
                self._calls.pop().end()
            return self._events

    # As the profile around a function that this worker runs.

    def run(self, node: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a function with torch's legacy profiler on. The session stays open for calls under way."""
        enable_legacy_profiler(_torch_config(self.config))
        _mine.session = self
        try:
            return function(*args)
        finally:
            _mine.session = None
            with self._lock:
                # What ends from now on torch does not write down.
                self._recording = False
                if profiler_enabled():  # not if the function has switched it off
                    self._take_records(node)

    def _take_records(self, node: int) -> None:
        records = disable_legacy_profiler()
        try:
            self._events.extend(encode_records(records, node))
        except Exception:  # torch's parser found them odd: the call is not to fail for it
            log.exception("the profile of a call cannot be read")


@final
class ProfiledCall:
    """The event of one call."""

    def __init__(self, session: Session, key: str, node: int) -> None:
        self.key = key
        self.started_ns = time.time_ns()
        self.received: list[agent_pb2.ProfileEvent] = []
        """What the callee recorded."""
        self._session = session
        self._node = node
        # torch ends an event only on a thread that has the profiler's state. It gives that of this thread to
        # what it does when a future is done, whichever thread does it.
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        scope = record_function(key)
        scope.__enter__()
        scope._call_end_callbacks_on_future(self._ended)

    @property
    def config(self) -> agent_pb2.ProfileHeader:
        """How its caller profiles."""
        return self._session.config

    def finish(self) -> None:
        """The call is over."""
        self._session.finish(self, self.received)

    def end(self) -> None:
        """Ends the event in torch's profiler. The session calls it, once."""
        self._ended.set_result(None)

    def event(self, end_ns: int) -> agent_pb2.ProfileEvent:
        """The event of a call that outlasts what torch has recorded."""
        return agent_pb2.ProfileEvent(
            name=self.key,
            node_id=self._node,
            start_ns=self.started_ns,
            end_ns=end_ns,
            sequence_number=-1,
            asynchronous=True,
        )


@final
class TorchHooks:
    """Makes torch's profiles open sessions. All that is changed in torch is changed and put back here.

    `_start_trace` and `__exit__` of both classes of profiles are wrapped while an agent runs or a session is
    open. torch has no other place to learn of a profile's begin, end and configuration from Python.
    """

    _PLACES = ((profiler_legacy.profile, False), (profiler.profile, True))

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._before: list[tuple[type, str, Any]] = []

    def hold(self) -> None:
        """Has the hooks installed until `release`."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                for kind, kineto in self._PLACES:
                    self._wrap(kind, "_start_trace", _starting(self, kind._start_trace, kineto))
                    self._wrap(kind, "__exit__", _exiting(self, kind.__exit__, kineto))

    def release(self) -> None:
        """The counterpart of `hold`."""
        with self._lock:
            self._holders -= 1
            while not self._holders and self._before:
                setattr(*self._before.pop())

    def _wrap(self, kind: type, name: str, wrapper: Any) -> None:
        self._before.append((kind, name, getattr(kind, name)))
        setattr(kind, name, wrapper)


hooks = TorchHooks()


def _starting(held: TorchHooks, original: Callable[[Any], None], kineto: bool) -> Callable[[Any], None]:
    def start_trace(profile: Any) -> None:
        original(profile)
        held.hold()
        session = Session(_config_of(profile), kineto=kineto)
        profile.__dict__["_gradwire_session"] = _mine.session = session

    return start_trace


def _exiting(held: TorchHooks, original: Callable[..., Any], kineto: bool) -> Callable[..., Any]:
    def exit_(profile: Any, *exception: Any) -> Any:
        if (session := _take_session(profile)) is None:
            return original(profile, *exception)
        events = session.close()
        if events and kineto:
            _merge_later(profile, events)
        try:
            outcome = original(profile, *exception)
        finally:
            held.release()
        if events and not kineto:
            merge_events(profile.function_events, events, session.started_ns)
        return outcome

    return exit_


def _take_session(profile: Any) -> Session | None:
    session: Session | None = profile.__dict__.pop("_gradwire_session", None)
    if session is not None and getattr(_mine, "session", None) is session:
        _mine.session = None
    return session


def _merge_later(profile: Any, events: list[agent_pb2.ProfileEvent]) -> None:
    """Has a kineto profile merge events when it computes its own, which is when somebody asks for them."""
    original = type(profile)._ensure_function_events

    def _ensure_function_events() -> None:
        due = profile._function_events is None
        original(profile)
        if due:
            profile.__dict__.pop("_ensure_function_events", None)
            merge_events(profile._function_events, events, profile.kineto_results.trace_start_ns())

    profile._ensure_function_events = _ensure_function_events


def _config_of(profile: Any) -> agent_pb2.ProfileHeader:
    return agent_pb2.ProfileHeader(
        cuda=getattr(profile, "use_device", None) == "cuda" or bool(getattr(profile, "use_cuda", False)),
        shapes=profile.record_shapes,
        memory=profile.profile_memory,
        stack=profile.with_stack,
        flops=profile.with_flops,
        modules=profile.with_modules,
    )


def _torch_config(config: agent_pb2.ProfileHeader) -> Any:
    cuda = config.cuda and torch.cuda.is_available()
    return ProfilerConfig(
        ProfilerState.CUDA if cuda else ProfilerState.CPU,
        config.shapes,
        config.memory,
        config.stack,
        config.flops,
        config.modules,
        ExperimentalConfig(),
    )
