"""The collectives that a worker is in, for those who look at a running job."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from ...c10d.debug.call_site import CallSite
from ..contracts.agent import RpcAgent
from .rounds import RoundKey

__all__ = ["RunningRounds"]


@final
class RunningRounds:
    """The rounds that run on one worker. Safe to use from any thread."""

    def __init__(self, agent: RpcAgent) -> None:
        """Args: agent: knows the names of the members."""
        self._agent = agent
        self._rounds: dict[RoundKey, tuple[str, CallSite, float]] = {}
        """What the user has called, in which line, and when, as time.time()."""

    @contextmanager
    def running(self, key: RoundKey, operation: str, call_site: CallSite) -> Iterator[None]:
        """Context manager in which a round runs."""
        self._rounds[key] = operation, call_site, time.time()
        try:
            yield
        finally:
            self._rounds.pop(key, None)

    def describe(self) -> Sequence[dict[str, Any]]:
        """Returns what runs. Rounds of the same topic, number and members are the same on all workers."""
        return [
            {
                "operation": operation,
                "topic": key.topic,
                "number": key.number,
                "members": [self._agent.incarnation(member).name for member in key.members],
                "since": since,
                "call_site": f"{file}:{line}",
            }
            for key, (operation, (file, line), since) in self._rounds.copy().items()
        ]
