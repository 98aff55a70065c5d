"""Trainers that replicate a layer by DistributedDataParallel and share a table of embeddings on a server.

Modelled on pytorch/examples, distributed/rpc/ddp_rpc: a master starts the trainers by calls, and the table is
a RemoteModule.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef
from torch.nn.parallel import DistributedDataParallel

TRAINERS, STEPS, ROWS, WIDTH, CLASSES = 2, 8, 40, 8, 4


class Hybrid(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table
        torch.manual_seed(5)
        self.layer = DistributedDataParallel(nn.Linear(WIDTH, CLASSES))

    def forward(self, indices, offsets):
        return self.layer(self.table.forward(indices, offsets))


def batch(dice):
    sizes = torch.randint(1, 5, (6,), generator=dice)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])
    indices = torch.randint(ROWS, (int(sizes.sum()),), generator=dice)
    return indices, offsets, torch.randint(CLASSES, (6,), generator=dice)


def fill(table):
    weight = table.local_value().weight  # there once the table is made, which draws numbers as well
    torch.manual_seed(6)
    nn.init.normal_(weight)


def train(table, rank):
    model = Hybrid(table)
    parameters = [*table.remote_parameters(), *(RRef(parameter) for parameter in model.layer.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    dice = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        indices, offsets, targets = batch(dice)
        with dist_autograd.context() as context:
            loss = nn.functional.cross_entropy(model(indices, offsets), targets)
            dist_autograd.backward(context, [loss])
            dist.barrier()  # nobody changes the table while others read it
            optimizer.step(context)
        dist.barrier()
        losses.append(loss.item())
    return losses


def main(rank):
    port = int(os.environ["MASTER_PORT"])
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    names = [*(f"trainer{trainer}" for trainer in range(TRAINERS)), "server", "master"]
    if rank < TRAINERS:
        dist.init_process_group("gloo", rank=rank, world_size=TRAINERS, init_method=os.environ["GROUP_URL"])
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if names[rank] == "master":
        table = RemoteModule("server", nn.EmbeddingBag, args=(ROWS, WIDTH), kwargs={"mode": "sum"})
        rpc.rpc_sync("server", fill, args=(table.get_module_rref(),))
        calls = [rpc.rpc_async(f"trainer{each}", train, args=(table, each)) for each in range(TRAINERS)]
        for trainer, losses in enumerate(torch.futures.wait_all(calls)):
            print(f"result trainer {trainer}", *(f"{loss:.6f}" for loss in losses), flush=True)
    rpc.shutdown()
    if rank < TRAINERS:
        dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GROUP_URL"] = f"file://{folder}/group"
        mp.spawn(main, nprocs=TRAINERS + 2)
