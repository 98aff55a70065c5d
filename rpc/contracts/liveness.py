"""The options by which a worker notices that another one does not answer, and how long it waits for it."""

import math
import os
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Liveness"]

DEFAULT_SUSPECT_AFTER = 5.0
"""Seconds."""

SUSPECT_AFTER_VARIABLE = "GRADWIRE_SUSPECT_AFTER"


def _default_suspect_after() -> float:
    text = os.environ.get(SUSPECT_AFTER_VARIABLE, "")
    if not text:
        return DEFAULT_SUSPECT_AFTER
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{SUSPECT_AFTER_VARIABLE} is {text!r}: give seconds") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """When another worker counts as suspect, and what happens then.

    A worker becomes suspect when the connection to it breaks without a goodbye, or nothing comes from it although
    it sends heartbeats. Calls to it fail with WorkerSuspectError then. References and contexts that it has are
    kept, and it is dialled again. A worker whose process is known to be gone is lost at once.

    heartbeat: seconds for which a connection carries nothing, before this worker sends a heartbeat. Twice in that
        time, it also counts up what workers of its host read in place of heartbeats.
    suspect_after: seconds without anything from the other worker, at least twice its `heartbeat`, after which it
        is suspect. Also the longest that a round trip may take. By default 5, or what GRADWIRE_SUSPECT_AFTER in
        the environment says.
    lease: seconds for which a worker is suspect, before it is lost. A worker whose program holds the interpreter,
        while its process runs, is suspect after as many seconds more.
    when_suspect: what a call to a suspect worker does: "fail" at once, without having been sent, or "wait" until
        the worker is back, for as long as the timeout of the call. Calls that have been sent before fail in any
        case, because they may have run.
    """

    heartbeat: float = 1.0
    suspect_after: float = field(default_factory=_default_suspect_after)
    lease: float = 60.0
    when_suspect: Literal["fail", "wait"] = "fail"

    def __post_init__(self) -> None:
        for name in ("heartbeat", "suspect_after", "lease"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}: give seconds, more than 0")
        if self.suspect_after < 2 * self.heartbeat:
            raise ValueError(
                f"suspect_after is {self.suspect_after}: give at least twice heartbeat={self.heartbeat}, as one "
                "heartbeat may be late"
            )
        if self.when_suspect not in ("fail", "wait"):
            raise ValueError(f"when_suspect is {self.when_suspect!r}: give 'fail' or 'wait'")
