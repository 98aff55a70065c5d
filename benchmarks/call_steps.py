"""Shows where the time of one call goes: the steps of `rpc_sync` of a function that does nothing.

python -m benchmarks.call_steps                            # over the unix socket of one host
python -m benchmarks.call_steps --system gradwire-tcp      # over TCP

Methods of gradwire are wrapped in the two workers, and each wrapper notes when its method begins and ends. That
takes time itself, so calls without wrappers are measured, too, and round trips of as many bytes on a bare socket,
which calls cannot be faster than.
"""

import contextlib
import functools
import importlib
import itertools
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .calls import PEER, noop
from .command_line import Report, arguments_of, make_parser
from .systems import GRADWIRE, GRADWIRE_TCP, start, system_here
from .worker_sets import WorkerSet, preload

MARKED = [
    ("gradwire.rpc.wire.pickling", "Packer", "pack"),
    ("gradwire.rpc.requests.codec", "Codec", "try_to_send"),
    ("gradwire.rpc.wire.pickling", "PickleReader", "read"),
    ("gradwire.rpc.transports.socket_frames", "FrameWriter", "send"),
    ("gradwire.rpc.transports.envelope_socket", "EnvelopeSocket", "read"),
    ("gradwire.rpc.requests.server", "Server", "serve"),
]
"""The methods that are wrapped: module, class and name."""

CALLER, CALLEE = 0, 1

STEPS = [
    (CALLER, "Packer.pack begins", "look the worker up, check the arguments, make the request"),
    (CALLER, "Packer.pack ends", "pickle the call"),
    (CALLER, "Codec.try_to_send begins", "make the envelope, the future, the entry for the answer"),
    (CALLER, "FrameWriter.send begins", "hooks of the extensions, serialize the envelope"),
    (CALLEE, "EnvelopeSocket.read begins", "write into the socket; the callee's thread finds it readable"),
    (CALLEE, "Server.serve begins", "read the socket, parse the envelope, dispatch"),
    (CALLEE, "PickleReader.read begins", "hooks and scopes of the extensions"),
    (CALLEE, "function begins", "unpickle the call"),
    (CALLEE, "Packer.pack begins", "run the function, which does nothing"),
    (CALLEE, "Packer.pack ends", "pickle the result"),
    (CALLEE, "FrameWriter.send begins", "make and serialize the envelope of the answer"),
    (CALLER, "EnvelopeSocket.read begins", "write into the socket; the calling thread reads it"),
    (CALLER, "PickleReader.read begins", "parse the envelope, find the future"),
    (CALLER, "PickleReader.read ends", "unpickle the result"),
    (CALLER, "rpc_sync returns", "complete the future, return"),
]
"""The way of a call: where a step ends, the mark at its end, and what it does."""

ROUND_TRIP_BYTES = 64
"""Bytes of a message on the bare socket, about as many as those of a call that carries nothing."""

WARM_UP_CALLS = 200

MAX_TRIES = 20
"""How many times the calls are repeated while fewer than half as many as asked for have gone the way of STEPS."""

Mark = tuple[int, str]
"""A time in nanoseconds on the monotonic clock, which all processes of a host share, and what happened."""

_marks: list[Mark] = []


def mark(name: str) -> None:
    """Notes that something happens now."""
    _marks.append((time.perf_counter_ns(), name))


def marked_noop() -> None:
    """Does nothing but note that it runs."""
    mark("function begins")


def take_marks() -> list[Mark]:
    """Returns this worker's marks since the last time."""
    taken = list(_marks)
    _marks.clear()
    return taken


def wrap(module: str, class_name: str, name: str) -> None:
    """Has a method note when it begins and ends."""
    owner = getattr(importlib.import_module(module), class_name)
    method: Callable[..., Any] = getattr(owner, name)
    begins, ends = f"{class_name}.{name} begins", f"{class_name}.{name} ends"

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        mark(begins)
        result = method(*args, **kwargs)
        mark(ends)
        return result

    setattr(owner, name, wrapper)


def start_marked(system: str, rank: int, size: int, url: str) -> Callable[[], None]:
    """Joins the RPC group with wrapped methods."""
    for method in MARKED:
        wrap(*method)
    return start(system, rank, size, url)


def call_times(calls: int) -> list[float]:
    """Returns the seconds of each of some calls, after a warm-up."""
    rpc = system_here().rpc
    times = []
    for _ in range(WARM_UP_CALLS + calls):
        begun = time.perf_counter()
        rpc.rpc_sync(PEER, noop)
        times.append(time.perf_counter() - begun)
    return times[WARM_UP_CALLS:]


def call_steps(calls: int) -> list[list[int]]:
    """Returns the nanoseconds of each step, for each call of which all marks were found."""
    rpc = system_here().rpc
    for _ in range(WARM_UP_CALLS):
        rpc.rpc_sync(PEER, marked_noop)
    rpc.rpc_sync(PEER, take_marks)
    take_marks()
    begins = []
    for _ in range(calls):
        begins.append(time.perf_counter_ns())
        rpc.rpc_sync(PEER, marked_noop)
        mark("rpc_sync returns")
    marks = [take_marks(), rpc.rpc_sync(PEER, take_marks)]
    return list(steps_of_calls(begins, [iter(each) for each in marks]))


def steps_of_calls(begins: Sequence[int], marks: Sequence[Iterator[Mark]]) -> Iterator[list[int]]:
    """Yields the nanoseconds of each step of each call.

    Args:
        begins: when each call began.
        marks: those of the caller and of the callee, in order. The calls came one after another.
    """
    waiting: list[Mark | None] = [next(each, None) for each in marks]
    for number, begin in enumerate(begins):
        end = begins[number + 1] if number + 1 < len(begins) else None
        times = [begin]
        for side, name, _ in STEPS:
            while (found := waiting[side]) is not None and (end is None or found[0] < end):
                waiting[side] = next(marks[side], None)
                if found[1] == name and found[0] >= times[-1]:
                    times.append(found[0])
                    break
        if len(times) == len(STEPS) + 1:
            yield [after - before for before, after in itertools.pairwise(times)]


def serve_round_trips(path: str) -> None:
    """Has a thread answer the messages of one connection to a unix socket, without RPC."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def answer() -> None:
        with listener, listener.accept()[0] as connection:
            while message := connection.recv(ROUND_TRIP_BYTES):
                connection.sendall(message)

    threading.Thread(target=answer, daemon=True).start()


def round_trip_times(path: str, count: int) -> list[float]:
    """Returns the seconds of each of some round trips to the thread of `serve_round_trips` on the peer."""
    system_here().rpc.rpc_sync(PEER, serve_round_trips, args=(path,))
    message, times = bytes(ROUND_TRIP_BYTES), []
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.connect(path)
        for _ in range(WARM_UP_CALLS + count):
            begun = time.perf_counter()
            connection.sendall(message)
            connection.recv(ROUND_TRIP_BYTES)
            times.append(time.perf_counter() - begun)
    return times[WARM_UP_CALLS:]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser("benchmarks.call_steps", __doc__)
    parser.add_argument("--system", choices=[GRADWIRE.name, GRADWIRE_TCP.name], default=GRADWIRE.name)
    parser.add_argument("--calls", type=int, default=5000, help="made at a time (5000)")
    arguments = arguments_of(parser, argv)
    text = f"Microseconds of the steps of a call: medians of {arguments.calls} calls or more."
    report = Report(text, f"{'step':>6}{'since':>8}")
    with WorkerSet(arguments.system, 2, start) as workers, workers.running():
        plain = statistics.median(workers.ask(call_times, arguments.calls)) * 1e6
        with tempfile.TemporaryDirectory() as folder:
            bare = workers.ask(round_trip_times, str(Path(folder) / "socket"), arguments.calls)
    with WorkerSet(arguments.system, 2, start_marked) as workers, workers.running():
        steps, tried = workers.ask(call_steps, arguments.calls), arguments.calls
        # On a busy machine the answer may be there before the thread waits for it; then another thread reads it.
        while len(steps) < arguments.calls / 2 and tried < MAX_TRIES * arguments.calls:
            steps += workers.ask(call_steps, arguments.calls)
            tried += arguments.calls
    if not steps:
        raise SystemExit(f"none of {tried} calls went the way that STEPS describes; is the machine busy?")
    medians = [statistics.median(each) / 1e3 for each in zip(*steps, strict=True)]
    for number, ((side, _, step), median) in enumerate(zip(STEPS, medians, strict=True)):
        where = "callee" if side else "caller"
        report.print(f"{median:6.1f}{sum(medians[: number + 1]):8.1f}  {where}: {step}")
        report.measured.append({"where": where, "step": step, "median": median / 1e6})
    report.print(
        "",
        f"a call: {sum(medians):.1f} with marks, in the {len(steps)} of {tried} calls that went this way; "
        f"{plain:.1f} without",
        f"a round trip of {ROUND_TRIP_BYTES} bytes on a unix socket: {statistics.median(bare) * 1e6:.1f}",
    )
    report.close(arguments)


if __name__ == "__main__":
    preload()
    main()
