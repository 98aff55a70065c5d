"""The options of `init_rpc` that say when messages to many workers use process groups."""

from dataclasses import dataclass

__all__ = ["AllGatherOptions", "BroadcastOptions", "check_counts"]


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
        _check_switch_and_counts(self, "threshold", "max_groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGatherOptions:
    """When `all_gather` and `barrier` run through a process group of the workers, in static groups.

    The process group forms in the background. All of the workers must have this enabled.

    enabled: False to have them use messages always.
    after: rounds of the same workers that use messages, before a process group forms.
    max_groups: process groups that this worker keeps, one for each set of workers; beyond that, the least recently
        used is closed.
    """

    enabled: bool = True
    after: int = 4
    max_groups: int = 8

    def __post_init__(self) -> None:
        _check_switch_and_counts(self, "after", "max_groups")


def _check_switch_and_counts(options: BroadcastOptions | AllGatherOptions, *counts: str) -> None:
    if not isinstance(options.enabled, bool):
        raise TypeError(f"enabled is {options.enabled!r}: give True or False")
    check_counts(options, *counts)


def check_counts(options: object, *counts: str) -> None:
    """Checks that options are whole numbers of at least 1. Raises ValueError."""
    for name in counts:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: give a whole number, at least 1")
