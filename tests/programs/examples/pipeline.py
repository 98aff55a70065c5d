"""A pipeline: a convolutional network in two parts on two workers, trained with micro-batches.

Modelled on pytorch/examples, distributed/rpc/pipeline.
"""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

BATCH, STEPS, CLASSES = 12, 3, 5


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.ReLU()
        )

    def forward(self, x):
        return x + self.inner(x)


class Part(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.lock = threading.Lock()
        self.layers = nn.Sequential(*layers)

    def forward(self, x_rref):
        x = x_rref.to_here()
        with self.lock:
            return self.layers(x)

    def parameter_rrefs(self):
        return [RRef(parameter) for parameter in self.parameters()]


class First(Part):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Conv2d(3, 8, 3, stride=2), Block(8), Block(8))


class Second(Part):
    def __init__(self):
        torch.manual_seed(2)
        super().__init__(Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


class Pipeline(nn.Module):
    def __init__(self, splits):
        super().__init__()
        self.splits = splits
        self.first = rpc.remote("worker1", First)
        self.second = rpc.remote("worker2", Second)

    def forward(self, x):
        outcomes = []
        for part in x.split(BATCH // self.splits):
            hidden = self.first.remote().forward(RRef(part))
            outcomes.append(self.second.rpc_async().forward(hidden))
        return torch.cat(torch.futures.wait_all(outcomes))

    def parameter_rrefs(self):
        return [
            *self.first.remote().parameter_rrefs().to_here(),
            *self.second.remote().parameter_rrefs().to_here(),
        ]


def train(splits):
    model = Pipeline(splits)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.1)
    dice = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 3, 12, 12, generator=dice)
        targets = torch.randint(CLASSES, (BATCH,), generator=dice)
        with dist_autograd.context() as context:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    print(f"result splits {splits}", *(f"{loss:.6f}" for loss in losses), flush=True)


def main(rank):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=64, rpc_timeout=100)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        for splits in (1, 2, 4):
            train(splits)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(main, nprocs=3)
