"""The options of `init_rpc` that say how messages go to many workers."""

from dataclasses import dataclass

__all__ = ["BroadcastOptions", "check_counts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastOptions:
    """When `broadcast_call` sends large tensors to all workers at once.

    Workers of this host share memory; those of other hosts receive by a process group, in static groups.

    enabled: False to send them to each worker by itself.
    threshold: bytes from which a tensor counts as large.
    max_groups: process groups that this worker keeps, one for each set of receivers; beyond that, the least
        recently used is closed.
    """

    enabled: bool = True
    threshold: int = 1 << 20
    max_groups: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise TypeError(f"enabled is {self.enabled!r}: give True or False")
        check_counts(self, "threshold", "max_groups")


def check_counts(options: object, *counts: str) -> None:
    """Checks that options are whole numbers of at least 1. Raises ValueError."""
    for name in counts:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: give a whole number, at least 1")
