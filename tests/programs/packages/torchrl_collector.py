"""torchrl's RPCCollector: two workers collect frames of a pendulum, under a policy whose weights are updated."""

import os
from functools import partial

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors.distributed import RPCCollector
from torchrl.envs import PendulumEnv

WORKERS, FRAMES = 2, 40


class Push(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.5, -0.2]))

    def forward(self, angle, speed):
        return torch.tanh(self.gain[0] * angle + self.gain[1] * speed).unsqueeze(-1)


def make_env(seed):
    return PendulumEnv(seed=seed)


def main():
    policy = TensorDictModule(Push(), in_keys=["th", "thdot"], out_keys=["action"])
    collector = RPCCollector(
        [partial(make_env, seed) for seed in range(WORKERS)],
        policy,
        frames_per_batch=FRAMES,
        total_frames=3 * FRAMES,
        sync=True,
        launcher="mp",
        tcp_port=os.environ.get("MASTER_PORT", "10003"),
    )
    for data in collector:
        rewards = data["next", "reward"]
        print(f"result frames {data.numel()} reward {rewards.sum().item():.4f}", flush=True)
        with torch.no_grad():
            policy.module.gain.add_(torch.tensor([1.0, 0.5]))
        collector.update_policy_weights_()
    collector.shutdown()
    print("result shut down")


if __name__ == "__main__":
    main()
