"""Tracebacks of users' functions, without the frames of gradwire above them.

A module that calls users' functions lists the names of the functions that do so in its constant
`USER_CODE_CALLERS`. A traceback is shown from below the last frame of such a function. An error that gradwire
itself raised has no such frame, and is shown as it is.
"""

import traceback
from types import TracebackType

__all__ = ["format_error", "user_traceback"]

_INTERNAL_PACKAGES = (__name__.partition(".")[0], "asyncio")
"""Packages whose frames may be above those of users' functions."""


def user_traceback(error: BaseException) -> TracebackType | None:
    """Returns the traceback of an error from the user's function on; None if the call itself raised the error."""
    found = error.__traceback__
    each = found
    while each is not None and _is_internal(each):
        if each.tb_frame.f_code.co_name in each.tb_frame.f_globals.get("USER_CODE_CALLERS", ()):
            found = each.tb_next
        each = each.tb_next
    return found


def format_error(error: BaseException) -> str:
    """Returns what Python prints of an uncaught error, with `user_traceback`."""
    return "".join(traceback.format_exception(type(error), error, user_traceback(error)))


def _is_internal(each: TracebackType) -> bool:
    name = each.tb_frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.partition(".")[0] in _INTERNAL_PACKAGES
