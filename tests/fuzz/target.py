"""What is fuzzed: a parser of bytes that others send, inputs for it, and the memory that it may take."""

import contextlib
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from hypothesis.strategies import SearchStrategy

__all__ = ["Target", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser, and what must hold for any input.

    name: of the parser; found cases are in the folder of this name.
    parse: parses an input. It handles the errors that the parser promises; any other is a finding.
    inputs: strategy for inputs of which many are valid. `make fuzz` also changes them at random.
    max_bytes: memory that Python may allocate at any time for one input, at most.
    max_seconds: processor time that one input may take; a parser that takes longer is considered to hang.
    is_slow: whether inputs take milliseconds. `make fuzz` then tries half as many.
    """

    name: str
    parse: Callable[[bytes], None]
    inputs: SearchStrategy[bytes]
    max_bytes: int
    max_seconds: float = 10.0
    is_slow: bool = False


def run(target: Target, data: bytes) -> None:
    """Parses an input.

    Raises:
        AssertionError: the parser takes longer, or more memory, than it may.
        Exception: any that the parser raises.
    """
    with _time_limit(target.max_seconds), _traced_memory():
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        target.parse(data)
        taken = tracemalloc.get_traced_memory()[1] - before
    assert taken <= target.max_bytes, f"{len(data)} bytes of input took {taken} bytes of memory"


@contextlib.contextmanager
def _traced_memory() -> Iterator[None]:
    """Traces memory, unless the caller does already."""
    if tracemalloc.is_tracing():
        yield
        return
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises AssertionError in the block after this processor time. Only the main thread may use it."""
    problem = AssertionError("the parser hangs: it has taken all the processor time that it may")
    has_expired = False

    def on_expiry(_: int, __: FrameType | None) -> None:
        nonlocal has_expired
        has_expired = True
        raise problem

    previous = signal.signal(signal.SIGPROF, on_expiry)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
    if has_expired:  # and the parser has taken it for an error of its own
        raise problem
