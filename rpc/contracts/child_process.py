"""The exception that ends a child process of multiprocessing, for its exit handlers.

Until Python 3.12 they run while it is handled, and find it by `sys.exception()`. From 3.13 on it is gone by then.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import current_process, parent_process
from types import CodeType

__all__ = ["error_of_child", "noting_error_of_child"]

TOOL_IDS = (4, 3)
"""Numbers of `sys.monitoring` that it reserves for nobody, in the order in which they are tried."""

_errors: list[BaseException] = []
"""What the function of this process has raised: one error at most."""


def error_of_child() -> BaseException | None:
    """Returns what the function of this process has raised, if it has been noted."""
    return _errors[0] if _errors else None


@contextmanager
def noting_error_of_child() -> Iterator[None]:
    """Context manager: what the function of this process raises is noted, if that is a child which forgets it."""
    if sys.version_info >= (3, 13) and parent_process() is not None:
        run: CodeType | None = getattr(type(current_process()).run, "__code__", None)
        tool = next((number for number in TOOL_IDS if sys.monitoring.get_tool(number) is None), None)
        if run is not None and tool is not None:

            def on_unwind(code: CodeType, _offset: int, error: BaseException) -> None:
                if code is run:
                    _errors[:] = [error]

            sys.monitoring.use_tool_id(tool, "gradwire")
            sys.monitoring.register_callback(tool, sys.monitoring.events.PY_UNWIND, on_unwind)
            sys.monitoring.set_events(tool, sys.monitoring.events.PY_UNWIND)
            try:
                yield
            finally:
                sys.monitoring.set_events(tool, sys.monitoring.events.NO_EVENTS)
                sys.monitoring.register_callback(tool, sys.monitoring.events.PY_UNWIND, None)
                sys.monitoring.free_tool_id(tool)
            return
    yield
