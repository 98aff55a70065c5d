"""The audit log: who connects, who is let in and who is not, and which limits are reached.

Each listener (an agent, the server of a store, a failure detector) has an Audit, which counts events, and writes
them to the logger `gradwire.audit`. docs/security.md lists the events, and the fields of their log records.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Final, Literal, final

from ..peer_text import printable

__all__ = ["LOGGER", "WINDOW_S", "Audit", "AuditEvent"]

LOGGER: Final = "gradwire.audit"

WINDOW_S: Final = 60.0
"""Seconds in which a limited number of lines is logged for each listener and kind of event."""

EventKind = Literal["connect", "authenticate", "deny", "limit"]

_LEVELS: Final[Mapping[EventKind, int]] = {
    "connect": logging.DEBUG,
    "authenticate": logging.INFO,
    "deny": logging.WARNING,
    "limit": logging.WARNING,
}

_MAX_LINES: Final[Mapping[EventKind, int]] = {"connect": 1000, "authenticate": 1000, "deny": 20, "limit": 20}
"""Lines in a window. All workers of a job may connect at once."""

_MAX_REASON: Final = 500
"""Characters of a reason."""

log = logging.getLogger(LOGGER)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """What has happened at a listener. Texts that are not known, or do not apply, are empty.

    event: the kind.
    listener: where it has happened, such as "agent" or "store".
    peer: the address of the other process.
    worker: its name, or its rank; proven if the kind is "authenticate", else what it says.
    reason: why it was refused.
    limit: the name of the limit that is reached, and its value.
    """

    event: EventKind
    listener: str
    peer: str = ""
    worker: str = ""
    reason: str = ""
    limit: str = ""

    def __post_init__(self) -> None:
        for name in ("peer", "worker", "limit"):
            object.__setattr__(self, name, printable(getattr(self, name)))
        object.__setattr__(self, "reason", printable(self.reason, _MAX_REASON))


class _Series:
    """The events of one kind at one listener."""

    def __init__(self) -> None:
        self.count = 0
        self.lines = 0
        """The number of lines in this window."""
        self.window_end = 0.0
        self.omitted = 0
        """The number of events since the last line."""


@final
class Audit:
    """Counts and logs events. Safe to use from any thread.

    A flood of events does not become a flood of lines: beyond some number in a minute, events of one kind at one
    listener are only counted, and the next line, or the last one, says how many there were.
    """

    def __init__(self, owner: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: owner: whose listeners they are: the name of the worker, or its rank."""
        self._owner = owner
        self._clock = clock
        self._lock = threading.RLock()  # reentrant for a signal handler that makes a call
        self._series: dict[tuple[str, EventKind], _Series] = {}

    def connect(self, listener: str, peer: str = "") -> None:
        """Records a connection that has not been authenticated."""
        self._record(AuditEvent(event="connect", listener=listener, peer=peer))

    def authenticate(self, listener: str, peer: str, worker: str = "") -> None:
        """Records a peer that is let in."""
        self._record(AuditEvent(event="authenticate", listener=listener, peer=peer, worker=worker))

    def deny(self, listener: str, reason: object, *, peer: str = "", worker: str = "") -> None:
        """Records a peer, or something that it has sent, that is refused. The reason must have no secrets."""
        self._record(AuditEvent(event="deny", listener=listener, peer=peer, worker=worker, reason=str(reason)))

    def limit(
        self,
        listener: str,
        limit: str,
        reason: object = "",
        *,
        peer: str = "",
        worker: str = "",
        refuses: bool = True,
    ) -> None:
        """Records that a limit is reached, such as "max_waiting=16384".

        If that refuses nothing, but has something wait, it is logged at level INFO.
        """
        event = AuditEvent(
            event="limit", listener=listener, peer=peer, worker=worker, reason=str(reason), limit=limit
        )
        self._record(event, None if refuses else logging.INFO)

    def counts(self) -> dict[str, dict[str, int]]:
        """Returns how many events of each kind there were, by listener."""
        with self._lock:
            found: dict[str, dict[str, int]] = {}
            for (listener, event), series in self._series.items():
                found.setdefault(listener, {})[event] = series.count
            return found

    def close(self) -> None:
        """Logs how many events were left out, where no further line has said it."""
        with self._lock:
            left_out = [(key, each.count, each.omitted) for key, each in self._series.items() if each.omitted]
            for each in self._series.values():
                each.omitted = 0
        for (listener, event), count, omitted in left_out:
            self._write(AuditEvent(event=event, listener=listener), _LEVELS[event], count, omitted)

    def _record(self, event: AuditEvent, level: int | None = None) -> None:
        level = _LEVELS[event.event] if level is None else level
        with self._lock:
            key = event.listener, event.event
            if (series := self._series.get(key)) is None:
                series = self._series[key] = _Series()
            series.count += 1
            if not log.isEnabledFor(level):
                return
            now = self._clock()
            if now >= series.window_end:
                series.window_end, series.lines = now + WINDOW_S, 0
            if series.lines == _MAX_LINES[event.event]:
                series.omitted += 1
                return
            series.lines += 1
            is_last = series.lines == _MAX_LINES[event.event]
            count, omitted, series.omitted = series.count, series.omitted, 0
        note = f"further ones are only counted, for up to {WINDOW_S:g} s" if is_last else ""
        self._write(event, level, count, omitted, note)

    def _write(self, event: AuditEvent, level: int, count: int, omitted: int, note: str = "") -> None:
        texts = asdict(event)
        fields = {"event": texts.pop("event"), "listener": texts.pop("listener"), "owner": self._owner, **texts}
        numbers = {"count": count, "omitted": omitted}
        shown = {**fields, **{name: str(number) for name, number in numbers.items() if number}, "note": note}
        line = " ".join(f"{name}={_quoted(text)}" for name, text in shown.items() if text)
        log.log(level, "%s", line, extra={**fields, **numbers})


def _quoted(text: str) -> str:
    """Returns a value of `name=value`: in double quotes, if it has spaces, quotes or backslashes."""
    return json.dumps(text, ensure_ascii=False) if any(each in text for each in ' "\\') else text
