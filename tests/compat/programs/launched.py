"""A program for torch.distributed.rpc that torchrun launches."""

import os

from torch.distributed import rpc

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
assert rpc.rpc_sync(f"worker{(rank + 1) % world_size}", os.getppid) == os.getppid()
print(f"worker{rank}: {rpc.rpc_sync.__module__}\n", end="")
rpc.shutdown()
