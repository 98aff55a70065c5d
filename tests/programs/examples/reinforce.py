"""An agent learns from observers, which run episodes and ask it for each action.

Modelled on pytorch/examples, distributed/rpc/rl; with --batch, that of distributed/rpc/batch/reinforce.py,
where the agent answers all observers at once. The environment is a line; the reward is higher the closer the agent
is to its middle.
"""

import argparse
import os
import threading

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc
from torch.distributed.rpc import RRef
from torch.distributed.rpc.functions import async_execution

OBSERVERS, EPISODES, STEPS = 2, 4, 10
MOVES = (-1.0, 1.0)


class Observer:
    def __init__(self):
        self.id = rpc.get_worker_info().id - 1

    def run_episode(self, agent, batch):
        place = 3.0 if self.id else -2.0
        for _ in range(STEPS):
            here = torch.tensor([place, abs(place)])
            call = agent.rpc_sync(timeout=30)
            action = call.select_in_batch(self.id, here) if batch else call.select(self.id, here)
            place += MOVES[action]
            agent.rpc_sync().reward(self.id, -abs(place))


class Agent:
    def __init__(self, batch):
        torch.manual_seed(1)
        self.policy = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, len(MOVES)))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.05)
        self.batch = batch
        self.dice = [torch.Generator().manual_seed(observer) for observer in range(OBSERVERS)]
        self.lock = threading.Lock()
        self.seen = {}
        self.answer = torch.futures.Future()
        self.this = RRef(self)
        self.observers = [rpc.remote(f"observer{number}", Observer) for number in range(OBSERVERS)]
        self.clear()

    def clear(self):
        self.logs = [[] for _ in range(OBSERVERS)]
        self.rewards = [[] for _ in range(OBSERVERS)]

    def choose(self, observer, scores):
        odds = scores.softmax(-1)
        action = torch.multinomial(odds, 1, generator=self.dice[observer]).item()
        self.logs[observer].append(odds[action].log())
        return action

    def select(self, observer, here):
        with self.lock:
            return self.choose(observer, self.policy(here))

    @async_execution
    def select_in_batch(self, observer, here):
        with self.lock:
            self.seen[observer] = here
            answer = self.answer
            if len(self.seen) == OBSERVERS:
                scores = self.policy(torch.stack([self.seen[each] for each in range(OBSERVERS)]))
                actions = [self.choose(each, scores[each]) for each in range(OBSERVERS)]
                self.seen, self.answer = {}, torch.futures.Future()
                answer.set_result(actions)
        return answer.then(lambda done: done.wait()[observer])

    def reward(self, observer, value):
        self.rewards[observer].append(value)

    def learn(self):
        loss = torch.zeros(())
        for logs, rewards in zip(self.logs, self.rewards, strict=True):
            gains = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
            loss = loss - (torch.stack(logs) * (gains - gains.mean())).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        total = sum(map(sum, self.rewards))
        self.clear()
        return total, loss.item()

    def run(self):
        for _ in range(EPISODES):
            episodes = [each.rpc_async(timeout=60).run_episode(self.this, self.batch) for each in self.observers]
            torch.futures.wait_all(episodes)
            total, loss = self.learn()
            print(f"result episode {total:.4f} {loss:.4f}", flush=True)


def main(rank, batch):
    name = "agent" if rank == 0 else f"observer{rank - 1}"
    rpc.init_rpc(name, rank=rank, world_size=1 + OBSERVERS)
    if rank == 0:
        Agent(batch).run()
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", action="store_true")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(main, args=(parser.parse_args().batch,), nprocs=1 + OBSERVERS)
