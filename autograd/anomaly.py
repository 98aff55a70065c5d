"""torch's anomaly mode on other workers.

torch has one anomaly mode for the process and all its threads. A worker is in it while it runs a call, or its part
of a backward pass, for a worker that is in it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, final

import torch

from ..rpc.contracts.policy import message_value

__all__ = ["AnomalyMode", "AnomalyScopes"]


@message_value
class AnomalyMode(NamedTuple):
    """The settings of `torch.autograd.set_detect_anomaly`."""

    enabled: bool
    check_nan: bool = True

    @classmethod
    def current(cls) -> "AnomalyMode":
        """Returns the settings of this process."""
        return cls(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())

    def apply(self) -> None:
        """Makes these the settings of this process."""
        torch.autograd.set_detect_anomaly(self.enabled, self.check_nan)


@final
class AnomalyScopes:
    """Enters the mode with the first scope that asks for it, and leaves it with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before = AnomalyMode(enabled=False)

    @contextmanager
    def scope(self, mode: AnomalyMode) -> Iterator[None]:
        """Context manager for running what a worker in this mode asks for."""
        with self._lock:
            if not self._count:
                self._before = AnomalyMode.current()
            self._count += 1
            mode.apply()
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    self._before.apply()
