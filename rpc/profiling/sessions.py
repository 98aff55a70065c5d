"""Sessions: the remote calls that are made in an open profile of torch's.

A session belongs to one open profile: a user's, or the one that a worker opens around a function that it runs
for a caller that profiles. torch's profilers are per thread, and so are sessions.

The event of a call must be ended while its profile is open; ended later, it would write into memory that torch's
kineto profiler has freed. So a session that is closed ends the events of the calls in flight.

torch has no way to add records to its profilers from Python. So the events of a remote function travel as
messages, and are added to the caller's profile where torch keeps finished events: in its EventList.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch.autograd import profiler, profiler_legacy
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import EventList, FunctionEvent

from ...proto.v1 import agent_pb2
from ...torch_internals import (
    ExperimentalConfig,
    ProfilerConfig,
    ProfilerState,
    disable_legacy_profiler,
    enable_legacy_profiler,
    parse_legacy_records,
    profiler_enabled,
)
from ..wire.parsing import parse_events

__all__ = [
    "REMOTE_PREFIX",
    "ProfiledCall",
    "Session",
    "TorchHooks",
    "config_of",
    "current_session",
    "decode_events",
    "events_from_tensor",
    "events_to_tensor",
    "in_time",
    "merge_events",
    "relabel",
    "torch_hooks",
]

REMOTE_PREFIX = "#remote_op: "
"""Separates, in the name of a remote event, the name of the call and that of the event. It is torch's."""

_MAX_TIME_NS = 1 << 62
"""Unix time in nanoseconds that no event of another worker reaches, so that `relabel` stays within 64 bits."""

_thread_state = threading.local()

log = logging.getLogger(__name__)


def current_session() -> "Session | None":
    """Returns the session of the profile that is open on this thread; None without one."""
    session: Session | None = getattr(_thread_state, "session", None)
    return session if session is not None and not session.is_closed else None


@final
class Session:
    """Keeps what an open profile has beyond torch's records: its remote calls, and other workers' events.

    Thread-safe.
    """

    def __init__(self, config: agent_pb2.ProfileHeader, *, is_kineto: bool = False) -> None:
        """Args: config: what the profile records. is_kineto: whether the profile is one of torch.profiler."""
        self.config = config
        self.is_kineto = is_kineto
        self.started_ns = time.time_ns()
        """When it began, or a moment later: torch has begun to record before. See `origin_ns`."""
        self.is_closed = False
        self._lock = threading.Lock()
        self._is_recording = True
        """Whether torch records in this profile."""
        self._calls: set[ProfiledCall] = set()
        self._first_call: ProfiledCall | None = None
        self._events: list[agent_pb2.ProfileEvent] = []

    def start_call(self, key: str, node: int) -> "ProfiledCall":
        """Begins the event of a call. Args: key: the event's name. node: the id of this worker."""
        call = ProfiledCall(self, key, node)
        with self._lock:
            self._calls.add(call)
            self._first_call = self._first_call or call
        return call

    def finish_call(self, call: "ProfiledCall") -> None:
        """Ends the event of a call and adds its callee's events. Does nothing if it has been done."""
        with self._lock:
            if call not in self._calls:
                return
            self._calls.discard(call)
            call.end_event()
            end_ns = time.time_ns()
            relabel(call.callee_events, call.key, call.started_ns, end_ns)
            if not self._is_recording:
                self._events.append(call.to_event(end_ns))
            self._events.extend(call.callee_events)

    def close(self) -> list[agent_pb2.ProfileEvent]:
        """Ends the events of the calls in flight.

        Returns the events that torch has not recorded in this profile.
        """
        with self._lock:
            self.is_closed = True
            while self._calls:
                self._calls.pop().end_event()
            return self._events

    def leave_to_parent(self) -> None:
        """In a forked child, forgets the calls in flight, whose answers the parent gets."""
        self._lock = threading.Lock()
        self._calls = set()

    def origin_ns(self, recorded: Iterable[FunctionEvent]) -> int:
        """Returns from when torch has counted the times of what it has recorded, in nanoseconds of Unix time.

        That is `started_ns`, unless this thread had to wait for a processor before it: then the event of the first
        call tells more, which torch began between two known times.
        """
        if (first := self._first_call) is not None:
            for event in recorded:
                if event.name == first.key:
                    start_ns = round(float(event.time_range.start) * 1000)
                    if first.entered_ns - start_ns < self.started_ns:
                        return (first.started_ns + first.entered_ns) // 2 - start_ns
                    break
        return self.started_ns

    def run(self, node: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a function on this worker (`node`) with torch's legacy profiler enabled, and returns its result.

        The session stays open for the calls in flight.
        """
        enable_legacy_profiler(_torch_config(self.config))
        _thread_state.session = self
        try:
            return function(*args)
        finally:
            _thread_state.session = None
            with self._lock:
                # torch does not record the calls that end from now on.
                self._is_recording = False
                if profiler_enabled():  # not if the function has disabled it
                    self._collect_records(node)

    def _collect_records(self, node: int) -> None:
        records = disable_legacy_profiler()
        try:
            self._events.extend(_encode_records(records, node))
        except Exception:  # torch's parser rejects them; the call must not fail for that
            log.exception("torch cannot parse the profile of a call")


@final
class ProfiledCall:
    """A remote call in a profile, from when it is made until its answer has arrived."""

    def __init__(self, session: Session, key: str, node: int) -> None:
        self.key = key
        self.started_ns = time.time_ns()
        self.callee_events: list[agent_pb2.ProfileEvent] = []
        """The events that the callee has recorded; set when the answer arrives."""
        self.session = session
        self._node = node
        # torch ends an event only on a thread that has the profiler's state. It gives this thread's state to the
        # callbacks of a future, whichever thread completes it.
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        scope = record_function(key)
        scope.__enter__()
        self.entered_ns = time.time_ns()
        """When the event had begun. It began between `started_ns` and this."""
        scope._call_end_callbacks_on_future(self._ended)

    def end_event(self) -> None:
        """Ends the event in torch's profiler. Called once, by the session."""
        self._ended.set_result(None)

    def to_event(self, end_ns: int) -> agent_pb2.ProfileEvent:
        """Returns the event of a call that ends at `end_ns`, after torch has stopped recording."""
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
    """Makes torch's profiles open and close sessions. Only this class patches torch, and it restores it.

    `_start_trace` and `__exit__` of torch's two profile classes are wrapped while an agent runs or a session is
    open. torch offers Python no other way to observe when a profile begins and ends, and what it records.
    """

    _PROFILE_CLASSES = ((profiler_legacy.profile, False), (profiler.profile, True))

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._originals: list[tuple[type, str, Any]] = []

    def acquire(self) -> None:
        """Keeps the hooks installed until `release`. May be called any number of times."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                for kind, is_kineto in self._PROFILE_CLASSES:
                    for name, make in (("_start_trace", _make_start_trace), ("__exit__", _make_exit)):
                        original = getattr(kind, name)
                        self._originals.append((kind, name, original))
                        setattr(kind, name, make(self, original, is_kineto))

    def release(self) -> None:
        """Ends one `acquire`; the last one restores torch."""
        with self._lock:
            self._users -= 1
            while not self._users and self._originals:
                setattr(*self._originals.pop())


torch_hooks = TorchHooks()
"""The hooks of this process."""


def _make_start_trace(
    hooks: TorchHooks, original: Callable[[Any], None], is_kineto: bool
) -> Callable[[Any], None]:
    """Returns a `_start_trace` that also opens a session."""

    def start_trace(profile: Any) -> None:
        original(profile)
        hooks.acquire()
        session = Session(config_of(profile), is_kineto=is_kineto)
        profile.__dict__["_gradwire_session"] = _thread_state.session = session

    return start_trace


def _make_exit(hooks: TorchHooks, original: Callable[..., Any], is_kineto: bool) -> Callable[..., Any]:
    """Returns an `__exit__` that also closes the session and merges its events."""

    def exit_(profile: Any, *exception: Any) -> Any:
        if (session := _pop_session(profile)) is None:
            return original(profile, *exception)
        events = session.close()
        if events and is_kineto:
            _merge_later(profile, events)
        try:
            outcome = original(profile, *exception)
        finally:
            hooks.release()
        if events and not is_kineto:
            merge_events(profile.function_events, events, session.origin_ns(profile.function_events))
        return outcome

    return exit_


def _pop_session(profile: Any) -> Session | None:
    session: Session | None = profile.__dict__.pop("_gradwire_session", None)
    if session is not None and getattr(_thread_state, "session", None) is session:
        _thread_state.session = None
    return session


def _merge_later(profile: Any, events: list[agent_pb2.ProfileEvent]) -> None:
    """Makes a kineto profile merge events when it computes its own, which it does when they are first read."""
    original = type(profile)._ensure_function_events

    def _ensure_function_events() -> None:
        is_first_read = profile._function_events is None
        original(profile)
        if is_first_read:
            profile.__dict__.pop("_ensure_function_events", None)
            merge_events(profile._function_events, events, profile.kineto_results.trace_start_ns())

    profile._ensure_function_events = _ensure_function_events


def config_of(profile: Any) -> agent_pb2.ProfileHeader:
    """Returns the options of a profile of torch's, as messages carry them."""
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


def _encode_records(records: list[list[Any]], node: int) -> list[agent_pb2.ProfileEvent]:
    """Returns what torch's legacy profiler has recorded on this worker (`node`) by thread, as messages."""
    start = next(record for record in records[0] if record.name() == "__start_profile") if records else None
    if start is None:
        return []
    epoch_us = start.start_us()
    return [_encode(event, node, epoch_us) for event in parse_legacy_records(records)]


def decode_events(
    events: Iterable[agent_pb2.ProfileEvent], origin_ns: int, local_node: int | None = None
) -> list[FunctionEvent]:
    """Returns events as torch's FunctionEvents, which profiles show.

    Args:
        events: of any workers.
        origin_ns: Unix time in nanoseconds from which the decoded events count microseconds.
        local_node: the id of the worker whose events are not marked as remote; None for no worker.
    """
    return [
        _decode(event, number, origin_ns, is_remote=event.node_id != local_node)
        for number, event in enumerate(events)
    ]


def events_to_tensor(events: Iterable[agent_pb2.ProfileEvent]) -> torch.Tensor:
    """Returns events as a uint8 tensor of shape (bytes,), so that many events travel as a large tensor does."""
    data = bytearray(agent_pb2.ProfileEvents(events=events).SerializeToString())
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def events_from_tensor(tensor: torch.Tensor) -> list[agent_pb2.ProfileEvent]:
    """Returns the events that `events_to_tensor` has encoded. Raises ValueError if there are none."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError(f"malformed profile: a tensor of {tensor.dtype} with {tensor.dim()} dimensions")
    try:
        events = list(parse_events(tensor.numpy().tobytes()).events)
    except Exception as error:
        raise ValueError(f"malformed profile: {error}") from None
    if not all(0 <= time < _MAX_TIME_NS for event in events for time in (event.start_ns, event.end_ns)):
        raise ValueError("malformed profile: an event of an impossible time")
    return events


def relabel(events: list[agent_pb2.ProfileEvent], key: str, start_ns: int, end_ns: int) -> None:
    """Turns a callee's events into remote events of a call, in place; `key` is the name of the call's event.

    If they are not within the time of the call, which is this worker's Unix time in nanoseconds, the clocks
    differ; they are moved to the middle of the call.
    """
    if not events:
        return
    first, last = min(event.start_ns for event in events), max(event.end_ns for event in events)
    shift = 0 if start_ns <= first and last <= end_ns else (start_ns + end_ns - first - last) // 2
    for event in events:
        event.name = f"{key}{REMOTE_PREFIX}{event.name}"
        event.start_ns += shift
        event.end_ns += shift


def merge_events(into: EventList, events: list[agent_pb2.ProfileEvent], origin_ns: int) -> None:
    """Adds events of other workers to the finished events of a profile, sorted by time.

    The profile began at `origin_ns`, in nanoseconds of Unix time.
    """
    by_worker = defaultdict(list)
    for event in decode_events(events, origin_ns):
        by_worker[event.node_id].append(event)
    for of_worker in by_worker.values():
        tree = EventList(of_worker)
        tree._build_tree()  # for each worker by itself, because threads of different workers share numbers
        into.extend(tree)
    into.sort(key=in_time)


def in_time(event: FunctionEvent) -> tuple[float, float]:
    """Returns the key that sorts events by time, outer ones before those inside of them."""
    return event.time_range.start, -event.time_range.end


def _encode(event: FunctionEvent, node: int, epoch_us: float) -> agent_pb2.ProfileEvent:
    shapes: list[Any] = list(event.input_shapes or [])
    return agent_pb2.ProfileEvent(
        name=event.name,
        node_id=node,
        start_ns=round((epoch_us + event.time_range.start) * 1000),
        end_ns=round((epoch_us + event.time_range.end) * 1000),
        thread=event.thread,
        forward_thread=event.fwd_thread or 0,
        sequence_number=event.sequence_nr,
        scope=event.scope,
        asynchronous=event.is_async,
        shapes=[agent_pb2.Sizes(sizes=sizes) for sizes in shapes],
        stack=event.stack or [],
        cpu_memory=event.cpu_memory_usage,
        device_memory=event.device_memory_usage,
        flops=round(event.flops or 0),
        kernels=[
            agent_pb2.Kernel(name=kernel.name, device=kernel.device, duration_us=kernel.duration)
            for kernel in event.kernels
        ],
    )


def _decode(event: agent_pb2.ProfileEvent, number: int, origin_ns: int, *, is_remote: bool) -> FunctionEvent:
    decoded = FunctionEvent(
        id=number,
        name=event.name,
        trace_name=event.name,
        node_id=event.node_id,
        thread=event.thread,
        start_us=(event.start_ns - origin_ns) / 1000,
        end_us=(event.end_ns - origin_ns) / 1000,
        fwd_thread=event.forward_thread,
        input_shapes=[list(sizes.sizes) for sizes in event.shapes],
        stack=list(event.stack),
        scope=event.scope,
        cpu_memory_usage=event.cpu_memory,
        device_memory_usage=event.device_memory,
        is_async=event.asynchronous,
        is_remote=is_remote,
        sequence_nr=event.sequence_number,
        use_device="cuda" if event.kernels else None,
        is_legacy=True,
        flops=event.flops or None,
    )
    for kernel in event.kernels:
        decoded.append_kernel(kernel.name, kernel.device, kernel.duration_us)
    return decoded
