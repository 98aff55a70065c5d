"""Counts of what is alive, in torch's three parts, as text."""

from collections.abc import Mapping

from ..autograd.extension import Autograd
from ..rpc.contracts.agent import current_agent
from ..rref.forks import References

__all__ = ["agent_info", "all_info", "autograd_info", "references_info"]


def references_info() -> dict[str, str]:
    """Of references."""
    return _as_text(current_agent().extension(References).live_objects())


def autograd_info() -> dict[str, str]:
    """Of autograd contexts."""
    return _as_text(current_agent().extension(Autograd).live_objects())


def agent_info() -> dict[str, str]:
    """Of the agent alone."""
    others = references_info() | autograd_info()
    return {name: text for name, text in _as_text(current_agent().debug_info()).items() if name not in others}


def all_info() -> dict[str, str]:
    """Of all three."""
    return references_info() | autograd_info() | agent_info()


def _as_text(counts: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in counts.items()}
