"""References to values that live on other workers."""

from .rref import RRef, remote

__all__ = ["RRef", "remote"]


def __dir__() -> list[str]:
    return sorted(__all__)
