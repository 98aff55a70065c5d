"""A flight recorder: the last operations of each group, to find out where it hangs.

Every group keeps its last operations in a ring buffer. They are written to a file on request (dump.py), or when
the group fails, if its options name a folder. report.py reads the files of all ranks and says which rank is stuck
where.
"""

import itertools
import json
import os
import socket
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, final

from ..engines.collective_call import CollectiveCall
from ..engines.pending import PendingOperation, peek
from .call_site import CallSite, find_call_site

__all__ = ["FlightRecord", "FlightRecorder", "write_flight_records"]

_FRAMES_IN_GRADWIRE = 4
"""Stack frames between `find_call_site` and the caller of a collective: `FlightRecorder.begin`, `GroupCore.start`,
`ProcessGroup.start`, and the collective's method. There are no others if C++ calls it on a thread of its own."""


@final
class FlightRecord:
    """One operation of a group as this rank called it. It keeps no tensors.

    number: among the collectives of the group, or among its point-to-point operations; counted from 1.
    name: of the operation.
    call_site: the line of the user's program that called it.
    peer: of a point-to-point operation; None for a collective.
    pending: the operation, while it is needed to ask whether it is done.
    """

    def __init__(self, number: int, call: CollectiveCall, call_site: CallSite) -> None:
        self.number = number
        self.name = call.name
        self.call_site = call_site
        self.peer = call.peer
        self.pending: PendingOperation | None = None
        inputs = [tensor.shape for tensor in call.inputs]
        self._details = (
            inputs,
            inputs if call.outputs is call.inputs else [tensor.shape for tensor in call.outputs],
            (call.inputs or call.outputs)[0].dtype if call.inputs or call.outputs else None,
            call.reduction.name if call.reduction else None,
            call.root,
            call.tag,
        )
        self._began = time.time()
        self._ended: float | None = None
        self._is_done = False
        self._error: str | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Records that the operation has ended, and with which error."""
        self._ended = time.time()
        if error is not None:
            self._error = f"{type(error).__name__}: {error}"

    def state(self) -> str:
        """Returns `"in flight"`, `"done"` or `"failed"`, without affecting the operation.

        A message of Gloo is in flight until some thread has waited for it, as Gloo tells nobody else of its end.
        """
        if self._error is not None:
            return "failed"
        done = self._ended is not None or self._is_done or (self.pending is not None and peek(self.pending))
        return "done" if done else "in flight"

    def release_operation(self) -> None:
        """Drops the reference to the operation, whose group has closed. The state recorded so far is kept."""
        pending, self.pending = self.pending, None
        if self._ended is None and pending is not None and self.peer is None and pending.done():
            self._is_done = True

    def as_json(self) -> dict[str, Any]:
        """Returns the record as JSON values.

        Times are in seconds since 1970. `ended` is null if nobody has observed the end.
        """
        inputs, outputs, dtype, reduction, root, tag = self._details
        return {
            "number": self.number,
            "operation": self.name,
            "kind": "collective" if self.peer is None else "point_to_point",
            "state": self.state(),
            "error": self._error,
            "began": self._began,
            "ended": self._ended,
            "call_site": f"{self.call_site[0]}:{self.call_site[1]}",
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
    """The last operations of one group on this rank. Any thread may use it.

    collectives: number of collectives called so far. One thread at a time calls the collectives of a group.
    """

    def __init__(self, capacity: int) -> None:
        self._records: deque[FlightRecord] = deque(maxlen=capacity)
        self.collectives = 0
        self._point_to_point_numbers = itertools.count(1)

    def begin(self, call: CollectiveCall) -> FlightRecord:
        """Adds a record for a call that begins."""
        if call.peer is None:
            number = self.collectives = self.collectives + 1
        else:
            number = next(self._point_to_point_numbers)
        record = FlightRecord(number, call, find_call_site(skip=_FRAMES_IN_GRADWIRE))
        self._records.append(record)
        return record

    def peers_in_flight(self) -> set[int | None]:
        """Returns the peers of the operations in flight: None for a collective, ANY_RANK for any rank."""
        return {record.peer for record in list(self._records) if record.state() == "in flight"}

    def in_flight(self) -> list[PendingOperation]:
        """Returns the operations in flight, except receives."""
        return [
            record.pending
            for record in list(self._records)
            if record.pending is not None and record.name != "recv" and record.state() == "in flight"
        ]

    def release_operations(self) -> None:
        """Drops the references to all operations, which refer to engines. The records stay."""
        for record in list(self._records):
            record.release_operation()

    def as_json(self) -> list[dict[str, Any]]:
        """Returns the records as JSON values, oldest first."""
        return [record.as_json() for record in list(self._records)]


def write_flight_records(groups: list[dict[str, Any]], folder: Path) -> Path:
    """Writes the flight records of groups, as JSON values, to a file of this process in `folder`.

    The file replaces what is at its path, also a symbolic link; only the user can read it.

    Returns:
        The file's path, `folder/flight-HOST-PID.json`.

    Raises:
        OSError: the file cannot be written; nothing is at its path that was not there before.
    """
    content = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "written": time.time(),
        "groups": groups,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"flight-{content['host']}-{content['pid']}.json"
    descriptor, written = tempfile.mkstemp(dir=folder, prefix=f"{path.name}.")
    try:
        with open(descriptor, "w") as file:
            file.write(json.dumps(content))
        os.replace(written, path)
    except BaseException:
        os.unlink(written)
        raise
    return path
