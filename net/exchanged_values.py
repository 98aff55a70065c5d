"""Reads the JSON values that processes of a group exchange through their store, within bounds.

Whoever can write to the store may have written something else, or another version of gradwire has.
"""

import json
from typing import Any

__all__ = ["MAX_JSON_BYTES", "parse_dict", "parse_list", "unexpected_value"]

MAX_JSON_BYTES = 1024 * 1024
"""Longest text that is parsed; its values may take some 30 times the memory."""

MAX_SHOWN = 80
"""Characters of a text that messages show."""


def parse_list(text: bytes | str, *kinds: type) -> list[Any]:
    """Returns the values of a JSON list that has one value of each of these types.

    Raises:
        ValueError: `text` is something else.
    """
    values = _parse(text)
    if not isinstance(values, list) or [type(value) for value in values] != list(kinds):
        raise ValueError(f"this is no list of {', '.join(kind.__name__ for kind in kinds)}")
    return values


def parse_dict(text: bytes | str, kinds: dict[str, type]) -> dict[str, Any]:
    """Returns the values of a JSON object that has these names, and values of these types.

    Raises:
        ValueError: `text` is something else.
    """
    values = _parse(text)
    if not isinstance(values, dict) or {name: type(value) for name, value in values.items()} != kinds:
        raise ValueError(f"this is no object with {', '.join(kinds)}")
    return values


def unexpected_value(text: bytes | str, what: str) -> str:
    """Returns the message of an error: `text` is not what a key of the store should have."""
    return (
        f"the store has {text[:MAX_SHOWN]!r} where {what} should be: install the same version of gradwire "
        "everywhere, and give the group a store of its own"
    )


def _parse(text: bytes | str) -> Any:
    """Returns a JSON value; None if `text` is not JSON, or is too long or nested too deeply."""
    if len(text) > MAX_JSON_BYTES:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
