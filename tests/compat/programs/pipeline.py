"""A program for torch.distributed.rpc: a model in two stages, with micro-batches in flight."""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

from tests.ports import free_port

WORLD_SIZE = 3


class Stage(nn.Module):
    """A part of the model."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.layers = nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())

    def forward(self, batch: RRef) -> torch.Tensor:
        values = batch.to_here()
        with self.lock:
            return self.layers(values)

    def parameter_rrefs(self) -> list[RRef]:
        return [RRef(parameter) for parameter in self.parameters()]


class Pipeline(nn.Module):
    """The two stages; runs on the master."""

    def __init__(self, micro_batches: int) -> None:
        super().__init__()
        self.micro_batches = micro_batches
        self.first = rpc.remote("worker1", Stage, (16, 32))
        self.second = rpc.remote("worker2", Stage, (32, 4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        outputs = []
        for part in batch.chunk(self.micro_batches):
            middle = self.first.remote().forward(RRef(part))
            outputs.append(self.second.rpc_async().forward(middle))
        return torch.cat(torch.futures.wait_all(outputs))

    def parameter_rrefs(self) -> list[RRef]:
        return [*self.first.remote().parameter_rrefs().to_here(), *self.second.rpc_sync().parameter_rrefs()]


def run_master() -> None:
    model = Pipeline(micro_batches=8)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.05)
    for _ in range(5):
        with dist_autograd.context() as context_id:
            loss = model(torch.randn(32, 16)).square().sum()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    print("trained", flush=True)


def main(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, _channels=["basic"])
    rpc.init_rpc(
        "master" if rank == 0 else f"worker{rank}", rank=rank, world_size=WORLD_SIZE, rpc_backend_options=options
    )
    if rank == 0:
        run_master()
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(main, args=(free_port(),), nprocs=WORLD_SIZE)
