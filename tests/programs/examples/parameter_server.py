"""A model on a server that a trainer uses and updates.

Modelled on pytorch/examples, distributed/rpc/parameter_server, with one trainer: on torch's agent, one
trainer's step makes another's backward pass fail, because it changes parameters that the pass needs. The images
are a pattern per class with noise.
"""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

TRAINERS, STEPS, CLASSES = 1, 15, 4


class Server(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 3 * 3, CLASSES)
        )

    def forward(self, pictures):
        return self.model(pictures)

    def gradients(self, context):
        gradients = dist_autograd.get_gradients(context)
        return {str(tuple(leaf.shape)): gradient.norm().item() for leaf, gradient in gradients.items()}

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]


made = []
lock = threading.Lock()


def get_server():
    with lock:
        if not made:
            made.append(Server())
    return made[0]


def call_method(method, rref, *args):
    return method(rref.local_value(), *args)


def remote_method(method, rref, *args):
    return rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args))


def pictures(seed):
    torch.manual_seed(0)
    patterns = torch.randn(CLASSES, 1, 8, 8)
    dice = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (32,), generator=dice)
    return patterns[labels] + 0.1 * torch.randn(32, 1, 8, 8, generator=dice), labels


def train(trainer):
    server = rpc.remote("server", get_server)
    optimizer = DistributedOptimizer(torch.optim.SGD, remote_method(Server.parameter_rrefs, server), lr=0.05)
    losses = []
    shapes = set()
    for step in range(STEPS):
        inputs, labels = pictures(1000 * trainer + step)
        with dist_autograd.context() as context:
            loss = nn.functional.cross_entropy(remote_method(Server.forward, server, inputs), labels)
            dist_autograd.backward(context, [loss])
            shapes |= remote_method(Server.gradients, server, context).keys()
            optimizer.step(context)
        losses.append(loss.item())
    print("result losses", *(f"{loss:.6f}" for loss in losses))
    print("result gradients of", *sorted(shapes), flush=True)


def main(rank):
    rpc.init_rpc(f"trainer{rank}" if rank else "server", rank=rank, world_size=1 + TRAINERS)
    if rank:
        train(rank)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(main, nprocs=1 + TRAINERS)
