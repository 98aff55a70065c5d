"""A program for torch.distributed.rpc that torchrun launches."""

import os

from torch.distributed import rpc

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
other = rpc.rpc_sync(f"worker{1 - rank}", os.getpid)
print(f"worker{rank}: {other != os.getpid()} {rpc.rpc_sync.__module__}\n", end="")
rpc.shutdown()
