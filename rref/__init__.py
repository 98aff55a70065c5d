"""References to values that live on other workers."""

from .api import remote
from .rref import RRef

__all__ = ["RRef", "remote"]


def __dir__() -> list[str]:
    return sorted(__all__)
