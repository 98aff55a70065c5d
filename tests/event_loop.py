"""Code of tests on the event loop that all agents of a process share."""

from collections.abc import Coroutine
from typing import Any, TypeVar

from gradwire.net.event_loop import acquire_event_loop

__all__ = ["run_on_loop"]

T = TypeVar("T")


def run_on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine where agents handle their connections, and returns its result."""
    loop = acquire_event_loop()
    try:
        return loop.run(coroutine)
    finally:
        loop.release()
