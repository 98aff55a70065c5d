"""A flight recorder: the last operations of each group, for when it hangs.

Every group keeps them in a ring, and writes them to a file when asked (dump.py), or when it fails, if its options
name a folder. With the files of all ranks, report.py says who is stuck where.
"""

import itertools
import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, final

from ..call import CollectiveCall
from ..engines.base import PendingOperation
from .source import CallSite, caller

__all__ = ["FlightRecord", "FlightRecorder", "Recorded", "write"]

_WAY = 5
"""So many calls at least are gradwire's: `begin`, `start` of the group and its core, and two in the module of the
operation."""


@final
class FlightRecord:
    """One operation of a group, as one rank called it. It keeps no tensors."""

    __slots__ = ("_began", "_ended", "_error", "_over", "_shown", "name", "number", "peer", "pending", "place")

    def __init__(self, number: int, call: CollectiveCall, place: CallSite) -> None:
        self.number = number
        self.name = call.name
        self.place = place
        self.peer = call.peer
        self.pending: PendingOperation | None = None
        inputs = [tensor.shape for tensor in call.inputs]
        self._shown = (
            inputs,
            inputs if call.outputs is call.inputs else [tensor.shape for tensor in call.outputs],
            (call.inputs or call.outputs)[0].dtype if call.inputs or call.outputs else None,
            call.reduction.name if call.reduction else None,
            call.root,
            call.tag,
        )
        self._began = time.time()
        self._ended: float | None = None
        self._over = False
        self._error: str | None = None

    def end(self, error: BaseException | None = None) -> None:
        """It is over."""
        self._ended = time.time()
        if error is not None:
            self._error = f"{type(error).__name__}: {error}"

    def state(self) -> str:
        """`"under way"`, `"done"` or `"failed"`."""
        if self._error is not None:
            return "failed"
        done = self._ended is not None or self._over or (self.pending is not None and self.pending.done())
        return "done" if done else "under way"

    def settle(self) -> None:
        """Keeps what is known of the operation, and no more the operation, for its group has ended."""
        pending, self.pending = self.pending, None
        if self._ended is None and pending is not None and self.peer is None and pending.done():
            self._over = True

    def as_json(self) -> dict[str, Any]:
        """For a file. Times are seconds since 1970; `ended` is missing where nobody looked when it was over."""
        inputs, outputs, dtype, reduction, root, tag = self._shown
        return {
            "number": self.number,
            "operation": self.name,
            "kind": "collective" if self.peer is None else "message",
            "state": self.state(),
            "error": self._error,
            "began": self._began,
            "ended": self._ended,
            "place": f"{self.place[0]}:{self.place[1]}",
            "inputs": [list(shape) for shape in inputs],
            "outputs": [list(shape) for shape in outputs],
            "bytes": sum(shape.numel() for shape in inputs) * dtype.itemsize if dtype else 0,
            "dtype": str(dtype).removeprefix("torch.") if dtype else None,
            "reduction": reduction,
            "root": root,
            "peer": self.peer,
            "tag": None if self.peer is None else tag,
        }


@final
class FlightRecorder:
    """The last operations of one group on this rank. Used from any thread.

    collectives: how many have been called; one thread after another calls those of a group.
    """

    def __init__(self, capacity: int) -> None:
        self._entries: deque[FlightRecord] = deque(maxlen=capacity)
        self.collectives = 0
        self._messages = itertools.count(1)

    def begin(self, call: CollectiveCall) -> FlightRecord:
        """A call begins. Collectives are numbered in the order of their calls, and so are messages."""
        if call.peer is None:
            number = self.collectives = self.collectives + 1
        else:
            number = next(self._messages)
        entry = FlightRecord(number, call, caller(skip=_WAY))
        self._entries.append(entry)
        return entry

    def peers_under_way(self) -> set[int | None]:
        """The peers of the operations that are not over; None is that of collectives, -1 is any rank."""
        return {entry.peer for entry in list(self._entries) if entry.state() == "under way"}

    def in_flight(self) -> list[PendingOperation]:
        """The operations that are not over, without receives."""
        return [
            entry.pending
            for entry in list(self._entries)
            if entry.pending is not None and entry.name != "recv" and entry.state() == "under way"
        ]

    def settle(self) -> None:
        """Lets go of all operations, which refer to engines; what is known of them stays."""
        for entry in list(self._entries):
            entry.settle()

    def entries(self) -> list[dict[str, Any]]:
        """As JSON, the oldest first."""
        return [entry.as_json() for entry in list(self._entries)]


class Recorded(Protocol):
    """A group with a recorder."""

    def record(self) -> dict[str, Any]:
        """What the group is, and its entries."""


def write(groups: Iterable[Recorded], folder: Path) -> Path:
    """Writes the records of these groups to a file of this process in `folder`; its path."""
    content = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "written": time.time(),
        "groups": [group.record() for group in groups],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"flight-{content['host']}-{content['pid']}.json"
    path.write_text(json.dumps(content))
    return path
