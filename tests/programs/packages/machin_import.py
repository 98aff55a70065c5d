"""machin, unmodified: it was written for a torch that had torch.distributed.broadcast_multigpu."""

from machin.parallel.distributed import _world

print("result", _world.__name__)
