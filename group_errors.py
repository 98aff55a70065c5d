"""The errors of credentials, stores, rendezvous and process groups: see the tree in errors.py."""

from collections.abc import Sequence

from torch.distributed import DistBackendError, DistNetworkError, DistStoreError
from torch.distributed import QueueEmptyError as TorchQueueEmptyError

from .error_base import GradwireError

__all__ = [
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CredentialsError",
    "DeviceMapError",
    "GroupAbortedError",
    "ProcessGroupError",
    "QueueEmptyError",
    "RankLostError",
    "RendezvousError",
    "RendezvousNetworkError",
    "StoreError",
    "StoreNetworkError",
    "StoreTimeoutError",
    "UnsupportedOperationError",
]


class CredentialsError(GradwireError, ValueError):
    """A token, a certificate or a private key is missing or not valid. The text contains no secrets."""


class StoreError(GradwireError, DistStoreError):
    """A store rejected an operation."""


class StoreNetworkError(StoreError, DistNetworkError):
    """A store's server cannot be reached, or cannot listen on its address."""


class StoreTimeoutError(StoreError):
    """Keys were not set within the timeout.

    Attributes:
        missing: the keys.
        seconds: the timeout.
    """

    def __init__(self, missing: Sequence[str], seconds: float, activity: str = "waiting for") -> None:
        shown = ", ".join(repr(key) for key in missing[:8]) + (", …" if len(missing) > 8 else "")
        super().__init__(f"Wait timeout: timed out after {seconds:g} s {activity} {shown}")
        self.missing = list(missing)
        self.seconds = seconds


class QueueEmptyError(StoreError, TorchQueueEmptyError):
    """A non-blocking pop from a queue of a store found it empty."""


class RendezvousError(GradwireError, DistStoreError):
    """Workers cannot form a group: bad URL, missing variable, conflicting ranks."""


class RendezvousNetworkError(RendezvousError, DistNetworkError):
    """The rendezvous address cannot be reached, or another program listens on it."""


class DeviceMapError(RendezvousError, ValueError):
    """A device map names a worker that is not in the group, or a device that does not exist."""


class ProcessGroupError(GradwireError, DistBackendError):
    """An operation of a process group failed."""


class UnsupportedOperationError(ProcessGroupError):
    """An engine does not support an operation, or not on these tensors.

    Attributes:
        engine: its name.
        operation: what was asked of it, with the tensors' dtype or layout where these are the reason.
    """

    def __init__(self, engine: str, operation: str, instead: str) -> None:
        super().__init__(f"engine {engine!r} cannot {operation}: {instead}")
        self.engine = engine
        self.operation = operation


class CollectiveTimeoutError(ProcessGroupError):
    """The other ranks did not join an operation within its timeout. The group cannot be used afterwards."""

    def __init__(self, operation: str, seconds: float, waiting_for: str = "the other ranks") -> None:
        super().__init__(
            f"{operation} timed out after {seconds:g} s, waiting for {waiting_for} (the timeout of the call, "
            "or else of the group)"
        )
        self.operation = operation
        self.seconds = seconds


class CollectiveMismatchError(ProcessGroupError):
    """Ranks called different operations, or passed tensors that do not match.

    Attributes:
        ranks: the ranks, in the default group, whose call differs from the others'.
    """

    def __init__(self, ranks: Sequence[int], text: str) -> None:
        super().__init__(text)
        self.ranks = list(ranks)


class RankLostError(ProcessGroupError):
    """A rank died or left while others waited for it. The group cannot be used afterwards.

    Attributes:
        rank: its rank in the default group.
        reason: how the loss was noticed.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is lost: {reason} (Connection closed by peer)")
        self.rank = rank
        self.reason = reason


class GroupAbortedError(ProcessGroupError):
    """This rank aborted the group or shut it down."""
