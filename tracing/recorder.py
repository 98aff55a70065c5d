"""Records what one worker does: torch's operators on all threads, its calls, and what it runs for others."""

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch.autograd import profiler

from ..errors import RpcError
from ..rpc.contracts.messages import Incoming, Request
from ..rpc.contracts.worker import WorkerInfo
from ..torch_internals import ExperimentalConfig
from ..view.names import MethodNames
from .recording import MAX_CALLS, Call, ProfileRequest, Recording, Run

__all__ = ["Recorder"]

R = TypeVar("R", Call, Run)


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
