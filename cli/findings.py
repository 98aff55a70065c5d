"""What `gradwire doctor` finds."""

from dataclasses import dataclass
from typing import Literal, final

__all__ = ["Finding", "ok", "problem", "warning"]


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    level: whether all is well, something does not work or is slow in some programs, or nothing works.
    check: what has been looked at, in few words.
    text: what was found.
    advice: what to do; empty if all is well.
    """

    level: Literal["ok", "warning", "problem"]
    check: str
    text: str
    advice: str = ""


def ok(check: str, text: str) -> Finding:
    """Returns that all is well."""
    return Finding("ok", check, text)


def warning(check: str, text: str, advice: str) -> Finding:
    """Returns that something does not work, or is slow, in some programs."""
    return Finding("warning", check, text, advice)


def problem(check: str, text: str, advice: str) -> Finding:
    """Returns that nothing works."""
    return Finding("problem", check, text, advice)
