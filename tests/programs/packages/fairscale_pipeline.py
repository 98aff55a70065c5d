"""fairscale's DistributedPipeline: layers on three workers, micro-batches, checkpointing, a distributed loss."""

import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from fairscale.experimental.nn.distributed_pipeline import (
    DistributedLoss,
    DistributedPipeline,
    PipelineModulesGraph,
)
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

WORKERS = 3


class Seeded(nn.Sequential):
    def __init__(self, seed, inputs, outputs):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(inputs, outputs), nn.Tanh())


class Joined(nn.Module):
    def forward(self, left, right):
        return left * right


def sequence():
    layers = [RemoteModule(f"worker{seed}", Seeded, (seed, 6, 6)) for seed in (0, 1, 2)]
    graph = PipelineModulesGraph()
    graph.add_sequence(layers, [0])
    return graph, 1


def branches():
    """A graph with two inputs, whose results are joined on the third worker."""
    left, right = RemoteModule("worker1", Seeded, (3, 6, 6)), RemoteModule("worker2", Seeded, (4, 6, 6))
    joined, last = RemoteModule("worker0", Joined), RemoteModule("worker0", Seeded, (5, 6, 6))
    graph = PipelineModulesGraph()
    graph.add_layer(left, [0])
    graph.add_layer(right, [1])
    graph.add_layer(joined, [left, right])
    graph.add_layer(last, [joined])
    return graph, 2


def train(name, make, checkpoint, chunks):
    graph, count = make()
    pipeline = DistributedPipeline(graph, chunks=chunks, checkpoint=checkpoint)
    optimizer = DistributedOptimizer(torch.optim.SGD, pipeline.parameter_rrefs(), lr=0.2)
    criterion = DistributedLoss(nn.MSELoss)
    dice = torch.Generator().manual_seed(7)
    inputs = [torch.randn(8, 6, generator=dice) for _ in range(count)]
    target = torch.randn(8, 6, generator=dice)
    losses = []
    for _ in range(4):
        with dist_autograd.context() as context:
            loss = criterion(pipeline(*inputs), rpc.RRef(target))
            loss.backward(context)
            losses.append(loss.to_here().item())  # before the pass, torch's would wait for its gradient for ever
            optimizer.step(context)
    print(f"result {name} {checkpoint} {chunks}", *(f"{loss:.6f}" for loss in losses), flush=True)


def main(rank):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=32)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS, rpc_backend_options=options)
    if rank == 0:
        for checkpoint in ("never", "except_last", "always"):
            for chunks in (1, 4):
                train("sequence", sequence, checkpoint, chunks)
        train("branches", branches, "never", 4)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(main, nprocs=WORKERS)
