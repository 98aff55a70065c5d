"""A language model whose embedding and decoder are on a server, and whose LSTM is on a trainer.

Modelled on pytorch/examples, distributed/rpc/rnn. The text is synthetic: each word is a function of the previous
one.
"""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

WORDS, WIDTH, LENGTH, BATCH, STEPS = 32, 16, 8, 6, 12


making = threading.Lock()


def seeded(kind, *sizes):
    with making:  # all threads draw from one generator
        torch.manual_seed(sum(sizes))
        return kind(*sizes)


def call_method(method, rref, *args):
    return method(rref.local_value(), *args)


def remote_method(method, rref, *args):
    return rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args))


def parameter_rrefs(module):
    return [rpc.RRef(parameter) for parameter in module.parameters()]


class Model(nn.Module):
    def __init__(self, server):
        super().__init__()
        self.embedding = rpc.remote(server, seeded, args=(nn.Embedding, WORDS, WIDTH))
        self.lstm = seeded(nn.LSTM, WIDTH, WIDTH)
        self.decoder = rpc.remote(server, seeded, args=(nn.Linear, WIDTH, WORDS))

    def forward(self, words, state):
        vectors = remote_method(nn.Embedding.forward, self.embedding, words)
        hidden, state = self.lstm(vectors, state)
        return remote_method(nn.Linear.forward, self.decoder, hidden), state

    def parameter_rrefs(self):
        remote = [remote_method(parameter_rrefs, part) for part in (self.embedding, self.decoder)]
        return [*remote[0], *parameter_rrefs(self.lstm), *remote[1]]


def train():
    model = Model("server")
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.5)
    text = torch.arange(LENGTH + 1).unsqueeze(1) * 5 + torch.arange(BATCH)
    text = text % WORDS
    state = (torch.zeros(1, BATCH, WIDTH), torch.zeros(1, BATCH, WIDTH))
    losses = []
    for _ in range(STEPS):
        state = tuple(part.detach() for part in state)
        with dist_autograd.context() as context:
            scores, state = model(text[:-1], state)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), text[1:].flatten())
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    print("result losses", *(f"{loss:.6f}" for loss in losses), flush=True)


def main(rank):
    rpc.init_rpc(("trainer", "server")[rank], rank=rank, world_size=2)
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(main, nprocs=2)
