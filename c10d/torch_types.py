"""torch's own stores, groups and Works, for type checkers too: torch.distributed hides them from mypy."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    OpType: Any  # missing from the stubs
    from torch._C._distributed_c10d import FileStore as TorchFileStore
    from torch._C._distributed_c10d import ProcessGroup as TorchProcessGroup
    from torch._C._distributed_c10d import Store as TorchStore
    from torch._C._distributed_c10d import TCPStore as TorchTCPStore
    from torch._C._distributed_c10d import Work as TorchWork
else:
    from torch._C._distributed_c10d import OpType
    from torch.distributed import FileStore as TorchFileStore
    from torch.distributed import ProcessGroup as TorchProcessGroup
    from torch.distributed import Store as TorchStore
    from torch.distributed import TCPStore as TorchTCPStore
    from torch.distributed import Work as TorchWork

from torch.distributed import QueueEmptyError as TorchQueueEmptyError

__all__ = [
    "OpType",
    "TorchFileStore",
    "TorchProcessGroup",
    "TorchQueueEmptyError",
    "TorchStore",
    "TorchTCPStore",
    "TorchWork",
]
