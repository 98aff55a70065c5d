"""Debug counters of live objects, as text, divided into torch's three parts."""

from collections.abc import Mapping

from ..autograd.extension import Autograd
from ..rpc.contracts.agent import current_agent
from ..rref.forks import References

__all__ = ["agent_info", "all_info", "autograd_info", "references_info"]


def references_info() -> dict[str, str]:
    """Returns the counters of references."""
    return _as_text(current_agent().extension(References).live_objects())


def autograd_info() -> dict[str, str]:
    """Returns the counters of autograd contexts."""
    return _as_text(current_agent().extension(Autograd).live_objects())


def agent_info() -> dict[str, str]:
    """Returns the counters of the agent alone."""
    others = references_info() | autograd_info()
    return {name: text for name, text in _as_text(current_agent().debug_info()).items() if name not in others}


def all_info() -> dict[str, str]:
    """Returns the counters of all three parts."""
    return references_info() | autograd_info() | agent_info()


def _as_text(counts: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in counts.items()}
