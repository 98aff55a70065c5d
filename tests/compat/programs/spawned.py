"""A typical program for torch.distributed.rpc: it spawns its workers, which call each other.

MASTER_PORT in the environment says by which port they find each other.
"""

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, rpc_sync


def carrier() -> str:
    """Returns which implementation carries the calls of this worker."""
    return (
        f"{rpc_sync.__module__} {type(RRef(0)).__module__} {DistributedOptimizer.__module__} {rpc.PyRRef is RRef}"
    )


def train_one_step(to: str) -> float:
    parameter = rpc.remote(to, torch.ones, (2,), {"requires_grad": True})
    optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.5)
    with dist_autograd.context() as context_id:
        loss = rpc_sync(to, torch.sum, (parameter.to_here() * 2,))
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return parameter.to_here().sum().item()


def main(rank: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=30)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    other = f"worker{1 - rank}"
    stepped = f"; stepped to {train_one_step(other)}" if "train" in sys.argv else ""
    # In one piece: the workers share their output.
    sys.stdout.write(f"worker{rank}: {rpc_sync(other, carrier)}{stepped}\n")
    sys.stdout.flush()
    rpc.shutdown()


if __name__ == "__main__":
    mp.start_processes(main, nprocs=2, start_method=sys.argv[1])
    print(f"done {sys.argv[1:]}", flush=True)
