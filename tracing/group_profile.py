"""The part of a worker in a profile of all workers: it records while another one, or it itself, asks for that.

It records torch's operators on all threads, its calls, and what it runs for others.
"""

import json
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, final

import torch
from torch.autograd import profiler

from ..errors import RpcError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.messages import Handler, Incoming, MessageType, Request
from ..rpc.contracts.worker import WorkerEnd, WorkerInfo
from ..torch_internals import ExperimentalConfig
from ..view.names import MethodNames
from .recording import MAX_CALLS, Call, ProfileRequest, Recording, Run, encode, read_profile_id

__all__ = ["END_PROFILE", "GroupProfile", "Recorder"]

R = TypeVar("R", Call, Run)

END_PROFILE = "profile.end"
"""The control message that ends a profile whose recording nobody waits for."""

MAX_ENDED = 256
"""Profiles that are remembered because their end has arrived before their beginning."""


@final
class Recorder:
    """Records from its construction until `stop`. Safe to use from any thread."""

    def __init__(self, name: str, request: ProfileRequest) -> None:
        """Begins to record on the worker of this name. Raises RpcError if torch profiles something already."""
        self.max_bytes = request.max_bytes
        self._names = MethodNames()
        self._in_flight: dict[int, tuple[int, str, int]] = {}
        """The callee, the method and the beginning of each call without an answer, by its id."""
        self._stopped_ns = 0
        self._found = Recording(os.getpid())
        """The calls that have ended, and the runs."""
        self._lock = threading.Lock()
        settings: dict[str, Any] = dict.fromkeys(request.settings, True)
        # Not torch.profiler.profile, which is built on this one: it loads torch.compile, which takes a second.
        self._profile = profiler.profile(
            use_kineto=True,
            use_device="cuda" if torch.cuda.is_available() else None,
            experimental_config=_all_threads(),
            **settings,
        )
        try:
            self._profile.__enter__()
        except RuntimeError as error:
            raise RpcError(f"worker {name!r} cannot be profiled: {error}") from None

    def stop(self) -> None:
        """Ends the recording."""
        self._stopped_ns = time.time_ns()
        self._profile.__exit__(None, None, None)

    def recording(self) -> Recording:
        """Returns what has been recorded, after `stop`. Called once."""
        for identifier, (callee, method, begun) in self._in_flight.copy().items():
            self._keep(self._found.calls, Call(identifier, callee, method, begun, self._stopped_ns))
        with tempfile.TemporaryDirectory(prefix="gradwire-profile-") as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        events = [each for each in trace["traceEvents"] if isinstance(each.get("pid"), int)]  # not torch's remarks
        base = int(trace.get("baseTimeNanoseconds", 0))
        # Copies: functions that still run note their end.
        calls, runs = [*self._found.calls], [*self._found.runs]
        return replace(self._found, base_ns=base, events=events, calls=calls, runs=runs)

    def begin_call(self, identifier: int, worker: WorkerInfo, request: Request) -> None:
        """Notes the beginning of a call."""
        method = self._names.of(request.kind, request.value).name
        self._in_flight[identifier] = worker.wire_id, method, time.time_ns()

    def end_call(self, identifier: int) -> None:
        """Notes the end of a call."""
        found = self._in_flight.pop(identifier, None)
        if found is not None:
            self._keep(self._found.calls, Call(identifier, *found, time.time_ns()))

    def run(self, run: Callable[[Incoming], Any], message: Incoming) -> Any:
        """Runs a handler, notes when, and returns what it returns."""
        source, identifier = message.source.wire_id, message.envelope.id
        method = self._names.of(message.envelope.type, message.value).name
        begun = time.time_ns()
        try:
            return run(message)
        finally:
            thread = threading.get_native_id()
            self._keep(self._found.runs, Run(source, identifier, method, thread, begun, time.time_ns()))

    def _keep(self, rows: list[R], row: R) -> None:
        if len(rows) < MAX_CALLS:
            rows.append(row)
        else:
            with self._lock:
                self._found.leave_out(row.begun_ns)


def _all_threads() -> Any:
    """Returns the configuration with which torch records on all threads, and makes no Python objects of events."""
    try:
        return ExperimentalConfig(profile_all_threads=True, trace_only=True)
    except TypeError:  # torch has no `trace_only` before 2.13
        return ExperimentalConfig(profile_all_threads=True)


_ProfileKey = tuple[WorkerInfo, str]
"""The worker that profiles, and the id that it has given to the profile."""


@final
class GroupProfile(Extension):
    """Records the calls of one agent, and what torch does in its process. Its hooks are off at other times."""

    control_kinds: ClassVar = (END_PROFILE,)

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        self.is_on = False
        self._lock = threading.Lock()
        """Held while torch's profiler starts and stops: a process has one."""
        self._recorder: Recorder | None = None
        self._profile: _ProfileKey | None = None
        """The profile that is recorded: only its own end ends it."""
        self._ended: deque[_ProfileKey] = deque(maxlen=MAX_ENDED)
        """Profiles that have ended and not begun here. Their beginning may still wait for a thread."""
        agent.control.on(END_PROFILE, self._on_end)

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Returns the handlers of requests to begin and end a recording, and of the question for the time."""
        return {
            MessageType.PROFILE_START: Handler(self._start, description="the beginning of a profile on worker"),
            MessageType.PROFILE_CLOCK: Handler(
                lambda _: time.time_ns(), description="the question for the time of worker"
            ),
            MessageType.PROFILE_STOP: Handler(self._stop, description="the end of a profile on worker"),
        }

    def on_request(self, identifier: int, worker: WorkerInfo, request: Request) -> None:
        """Records the beginning of a call."""
        if (recorder := self._recorder) is not None:
            recorder.begin_call(identifier, worker, request)

    def on_complete(self, identifier: int) -> None:
        """Records the end of a call."""
        if (recorder := self._recorder) is not None:
            recorder.end_call(identifier)

    def observe(self, handler: Handler) -> Handler:
        """Returns a handler that records when it runs."""
        return replace(handler, run=partial(self._run, handler.run)) if handler.user_values else handler

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:  # noqa: ARG002
        """Ends a recording for which a lost worker has asked."""
        if (profile := self._profile) is not None and profile[0] == worker:
            self.agent.submit(self._end, profile)

    def close(self) -> None:
        """Ends the recording."""
        self._take(None)

    def _run(self, run: Callable[[Incoming], Any], message: Incoming) -> Any:
        recorder = self._recorder
        if recorder is None or not message.envelope.id:
            return run(message)
        return recorder.run(run, message)

    def _start(self, message: Incoming) -> None:
        request = ProfileRequest.decode(message.value)
        profile = message.source, request.profile
        with self.agent.blocking(), self._lock:
            if profile in self._ended:
                self._ended.remove(profile)
                raise RpcError(f"the profile of {message.source.name!r} has ended before it began here")
            if self._profile is not None:
                raise RpcError(
                    f"worker {self.agent.info.name!r} is being profiled already, by {self._profile[0].name!r}: "
                    "one gradwire.profile of a worker can be open at a time"
                )
            self._recorder = Recorder(self.agent.info.name, request)
            self._profile = profile
            self.set_enabled(True)
        if self.agent.end_of(message.source.wire_id) is not None:  # lost before the request has run
            self._end(profile)

    def _stop(self, message: Incoming) -> bytes:
        with self.agent.blocking():
            recorder = self._take((message.source, read_profile_id(message.value)))
            if recorder is None:
                raise RpcError(f"worker {self.agent.info.name!r} is not being profiled by {message.source.name!r}")
            return encode(recorder.recording(), recorder.max_bytes)  # which takes long, so without the lock

    def _on_end(self, source: WorkerInfo, payload: object) -> None:
        # On another thread, because it may have to wait until torch's profiler has started or stopped.
        self.agent.submit(self._end, (source, read_profile_id(payload)))

    def _end(self, profile: _ProfileKey) -> None:
        with self.agent.blocking():
            self._take(profile)

    def _take(self, profile: _ProfileKey | None) -> Recorder | None:
        """Turns the hooks off, and returns what has recorded a profile; None is the one that is recorded.

        If it is not recorded, remembers that it has ended, and returns None.
        """
        with self._lock:
            recorder = self._recorder
            if recorder is None or (profile is not None and profile != self._profile):
                if profile is not None:
                    self._ended.append(profile)
                return None
            self._recorder = self._profile = None
            self.set_enabled(False)
            recorder.stop()
            return recorder
