"""machin's World: RPC groups with paired values and services, its ordered server, and its model server.

machin refers to functions of torch.distributed that torch has removed (see machin_import.py). It never calls them
here, so other functions can replace them.
"""

import os
import time

import torch
import torch.distributed
import torch.multiprocessing as mp
from torch import nn

for name in ("all_gather", "all_reduce", "broadcast", "reduce"):
    setattr(torch.distributed, f"{name}_multigpu", getattr(torch.distributed, name))

from machin.parallel.distributed import World  # noqa: E402
from machin.parallel.server import OrderedServerSimpleImpl, PushPullModelServerImpl  # noqa: E402

PROCESSES = 3


def square(x):
    return x * x


def report(*words):
    print("result", *words, flush=True)


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def main(rank, port):
    names = [str(each) for each in range(PROCESSES)]
    world = World(
        name=str(rank), rank=rank, world_size=PROCESSES, init_dist=False, rpc_init_method=f"tcp://127.0.0.1:{port}"
    )
    group = world.create_rpc_group("group", names)
    if rank == 0:
        group.pair("weights", torch.arange(4.0))
        group.register("square", square)
        server = OrderedServerSimpleImpl("ordered", group)
        PushPullModelServerImpl("models", group)
    group.barrier()
    weights = group.get_paired("weights").to_here()
    squared = group.registered_sync("square", args=(torch.tensor(float(rank + 2)),))
    report("process", rank, "weights", *weights.tolist(), "squared", squared.item())
    ordered = group.get_paired("ordered").to_here()
    if rank == 1:
        assert ordered.push("key", "first", version=1, prev_version=None)
        assert ordered.push("key", "second", version=2, prev_version=1)
        assert not ordered.push("key", "stale", version=2, prev_version=1)
    wait_for(lambda: (ordered.pull("key") or (None, 0))[1] == 2)
    report("process", rank, "pulled", *ordered.pull("key"))
    models = group.get_paired("models").to_here()
    torch.manual_seed(rank)
    model = nn.Linear(2, 1)
    if rank == 2:
        nn.init.constant_(model.weight, 3.0)
        assert models.push(model)
    group.barrier()
    models.pull(model)
    report("process", rank, "model", model.weight.sum().item())
    group.barrier()
    if rank == 0:
        del server
    world.stop()


if __name__ == "__main__":
    mp.spawn(main, args=(int(os.environ.get("MASTER_PORT", "9101")),), nprocs=PROCESSES)
