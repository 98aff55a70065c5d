"""torch's anomaly mode on other workers.

The mode is one of the process, for all of its threads. A worker is in it while it runs a call or a part of a
backward pass for a worker that is.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch

__all__ = ["Anomaly", "AnomalyScopes"]


@dataclass(frozen=True, slots=True)
class Anomaly:
    """What `torch.autograd.set_detect_anomaly` sets."""

    enabled: bool
    check_nan: bool = True

    @classmethod
    def current(cls) -> "Anomaly":
        """That of this process."""
        return cls(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())

    def set(self) -> None:
        """Makes it that of this process."""
        torch.autograd.set_detect_anomaly(self.enabled, self.check_nan)


@final
class AnomalyScopes:
    """Enters the mode with the first scope that asks for it, and leaves it with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before = Anomaly(enabled=False)

    @contextmanager
    def scope(self, anomaly: Anomaly) -> Iterator[None]:
        """Around what another worker asks for."""
        if not anomaly.enabled:
            yield
            return
        with self._lock:
            if not self._count:
                self._before = Anomaly.current()
            self._count += 1
            anomaly.set()
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    self._before.set()
