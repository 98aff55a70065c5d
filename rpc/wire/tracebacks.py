"""Tracebacks as the users of remote functions want them: without the frames through which gradwire got there.

A module whose functions call users' functions names those in `CALLS_USERS`. What is above the last of them, and it
itself, is left out. Where there is none, nothing is: the error is gradwire's own.
"""

import traceback
from types import TracebackType

__all__ = ["format_error", "users_traceback"]

_PASSED = (__name__.partition(".")[0], "asyncio")
"""Whose frames may stand above those of users' functions."""


def users_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of an error from the user's function on; None if it was raised by the call itself."""
    found = error.__traceback__
    each = found
    while each is not None and _is_passed(each):
        if each.tb_frame.f_code.co_name in each.tb_frame.f_globals.get("CALLS_USERS", ()):
            found = each.tb_next
        each = each.tb_next
    return found


def format_error(error: BaseException) -> str:
    """What Python prints of an error that nobody catches, with `users_traceback`."""
    return "".join(traceback.format_exception(type(error), error, users_traceback(error)))


def _is_passed(each: TracebackType) -> bool:
    name = each.tb_frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.partition(".")[0] in _PASSED
