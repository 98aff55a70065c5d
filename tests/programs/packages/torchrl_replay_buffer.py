"""torchrl's RemoteTensorDictReplayBuffer: two collectors fill it on another worker, a trainer samples from it."""

import os

import torch
import torch.multiprocessing as mp
from tensordict import TensorDict
from torch.distributed import rpc
from torchrl.data import LazyTensorStorage, RemoteTensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

NAMES = ("trainer", "buffer", "collector0", "collector1")
ROWS = 20


def make_buffer():
    return RemoteTensorDictReplayBuffer(
        storage=LazyTensorStorage(2 * ROWS), sampler=SamplerWithoutReplacement(), batch_size=8
    )


def call(buffer, method, *args):
    return rpc.rpc_async(buffer.owner(), getattr(RemoteTensorDictReplayBuffer, method), args=(buffer, *args))


def length(buffer):
    return len(buffer.local_value())


def collect(buffer, start):
    for row in range(0, ROWS, 5):
        values = torch.arange(start + row, start + row + 5, dtype=torch.float32)
        data = TensorDict({"observation": values.unsqueeze(1) * torch.ones(3), "reward": values}, [5])
        call(buffer, "extend", data).wait()
    return ROWS


def train():
    buffer = rpc.remote("buffer", make_buffer)
    calls = [rpc.rpc_async(f"collector{each}", collect, args=(buffer, 100 * each)) for each in range(2)]
    print("result collected", *(call.wait() for call in calls), flush=True)
    print("result length", rpc.rpc_sync("buffer", length, args=(buffer,)))
    samples = [call(buffer, "sample").wait() for _ in range(2 * ROWS // 8)]
    print("result samples", len(samples), *samples[0].shape, sum(each["reward"].sum().item() for each in samples))
    assert all(torch.equal(each["observation"], each["reward"].unsqueeze(1).expand(-1, 3)) for each in samples)


def main(rank):
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES))
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(main, nprocs=len(NAMES))
