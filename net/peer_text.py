"""Texts that other processes have sent, as they can be shown in logs and error messages; the names of workers."""

import re

__all__ = ["MAX_SHOWN", "printable", "printable_lines", "problem_of_name"]

MAX_SHOWN = 200
"""Characters of a text that are shown, by default."""

_NAME = re.compile(r"[A-Za-z0-9_:.\-]+")

_NAME_LIMIT = 128


def printable(text: object, max_characters: int = MAX_SHOWN) -> str:
    r"""Returns a text of a peer on one line of bounded length.

    Line breaks, control characters, such as those that change what a terminal shows, and invisible characters,
    such as those that reverse the direction of text, are escaped as in Python: `\n`, `\x1b`, `\u202e`. A text that
    can be shown already is returned as it is, so each layer that it passes through may call this.
    """
    return _cut(_escape(str(text)[: max_characters + 1]), max_characters)


def printable_lines(text: str, max_characters: int) -> str:
    """Returns a text of a peer of bounded length, such as a traceback. Line breaks and tabs stay as they are."""
    lines = text[: max_characters + 1].split("\n")
    return _cut("\n".join(_escape(line, kept="\t") for line in lines), max_characters)


def _escape(text: str, kept: str = "") -> str:
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode("ascii")
        for each in text
    )


def _cut(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else f"{text[: max_characters - 1]}…"


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
