"""torch's own stores, for the type checker too: torch.distributed offers these names, but not to mypy."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as TorchStore
    from torch._C._distributed_c10d import TCPStore as TorchTCPStore
else:
    from torch.distributed import Store as TorchStore
    from torch.distributed import TCPStore as TorchTCPStore

from torch.distributed import QueueEmptyError as TorchQueueEmptyError

__all__ = ["TorchQueueEmptyError", "TorchStore", "TorchTCPStore"]
