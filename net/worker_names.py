"""Which names workers may have."""

import re

__all__ = ["problem_of_name"]

_NAME = re.compile(r"[A-Za-z0-9_:.\-]+")
_NAME_LIMIT = 128


def problem_of_name(name: object) -> str:
    """Returns why no worker can have a name; empty if one can.

    A name is a string of 1 to 127 letters, digits, `-`, `_`, `:` or `.`.
    """
    if not isinstance(name, str):
        return "A worker name must be a string"
    if not name:
        return "A worker name must be non-empty"
    if len(name) >= _NAME_LIMIT:
        return f"A worker name must be shorter than {_NAME_LIMIT} characters"
    return "" if _NAME.fullmatch(name) else f"Worker name must match {_NAME.pattern}"
