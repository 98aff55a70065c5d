"""Teach an agent to balance a pole, with observers that play on other workers.

Three processes: an agent with the policy, and two observers with a CartPole environment of gymnasium each. The
agent calls all observers to play an episode. An observer calls the agent for every action, through an RRef that it
was given. The agent learns from the episodes by REINFORCE (Williams, 1992), and stops when the running mean of the
rewards is 400 (the maximum is 500).

    python examples/reinforce.py --plot out/reinforce.png        # starts all processes itself
    torchrun --nproc-per-node 3 examples/reinforce.py            # one process per role

Runs with the same seed and number of observers have identical results: each observer's actions are drawn from a
generator of its own, and the policy changes only after all observers have finished their episodes.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import torch
from gradwire import launch, rpc
from gradwire.errors import WorkerLostError
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException
from tqdm import tqdm

AGENT = "agent"


@dataclass(frozen=True)
class Episode:
    """One episode: observations (steps, 4), actions (steps,) and rewards (steps,)."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor

    def returns(self, discount: float) -> Tensor:
        """Returns the discounted sum of the rewards from each step on, (steps,)."""
        total, returns = 0.0, []
        for reward in reversed(self.rewards.tolist()):
            total = reward + discount * total
            returns.append(total)
        return torch.tensor(returns[::-1])


class Agent:
    """The policy and its optimizer."""

    def __init__(self, observers: int, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.policy = nn.Sequential(nn.Linear(4, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=args.lr)
        self.discount = args.discount
        self.generators = [torch.Generator().manual_seed(args.seed + 1 + index) for index in range(observers)]

    @torch.no_grad()
    def act(self, observer: int, observation: Tensor) -> int:
        """Returns an action, 0 or 1, for an observation (4,). The observers call it concurrently."""
        odds = self.policy(observation).softmax(0)
        return int(torch.multinomial(odds, 1, generator=self.generators[observer]))

    def learn(self, episodes: list[Episode]) -> None:
        """Updates the policy: actions that led to returns above the mean become more likely, the others less."""
        returns = torch.cat([episode.returns(self.discount) for episode in episodes])
        advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
        logits = self.policy(torch.cat([episode.observations for episode in episodes]))
        actions = torch.cat([episode.actions for episode in episodes])
        log_odds = logits.log_softmax(1).gather(1, actions.unsqueeze(1)).squeeze(1)
        self.optimizer.zero_grad()
        (-(log_odds * advantages).sum() / len(episodes)).backward()
        self.optimizer.step()


class Observer:
    """Plays in an environment of its own; the agent chooses the actions."""

    def __init__(self, index: int, agent: rpc.RRef[Agent], seed: int) -> None:
        self.index, self.agent = index, agent
        self.environment = gymnasium.make("CartPole-v1")
        self.environment.reset(seed=seed)  # later resets continue this random sequence

    def play(self) -> Episode:
        """Plays one episode, until the pole falls or for 500 steps."""
        observations, actions, rewards = [], [], []
        observation, _ = self.environment.reset()
        ended = False
        while not ended:
            observations.append(torch.from_numpy(observation))
            actions.append(self.agent.rpc_sync().act(self.index, observations[-1]))  # runs on the agent
            observation, reward, terminated, truncated, _ = self.environment.step(actions[-1])
            rewards.append(float(reward))
            ended = terminated or truncated
        return Episode(torch.stack(observations), torch.tensor(actions), torch.tensor(rewards))


def train(args: argparse.Namespace) -> None:
    """Runs the agent: lets the observers play and learns from the episodes, until the goal is reached."""
    agent = Agent(args.observers, args)
    agent_rref = rpc.RRef(agent)
    observers = [
        rpc.remote(f"observer{index}", Observer, (index, agent_rref, args.seed + 1 + index))
        for index in range(args.observers)
    ]
    rewards: list[float] = []
    running: list[float] = []
    started = time.perf_counter()
    with tqdm(total=args.episodes, unit="episode", disable=args.quiet) as bar:
        while len(rewards) < args.episodes:
            pending = [observer.rpc_async(timeout=0).play() for observer in observers]
            episodes: list[Episode] = [future.wait() for future in pending]
            for episode in episodes:
                rewards.append(episode.rewards.sum().item())
                running.append(0.95 * running[-1] + 0.05 * rewards[-1] if running else rewards[-1])
            bar.set_postfix(running_reward=f"{running[-1]:.0f}")
            bar.update(len(episodes))
            if running[-1] >= args.goal:
                break
            agent.learn(episodes)
    seconds = time.perf_counter() - started
    verdict = "reached" if running[-1] >= args.goal else "not reached"
    print(f"running reward {running[-1]:.2f} after {len(rewards)} episodes, goal of {args.goal:g} {verdict}")
    print(f"{sum(rewards):,.0f} actions in {seconds:.1f} s, {sum(rewards) / seconds:,.0f} a second", flush=True)
    if args.plot:
        plot(args.plot, rewards, running, args.goal)
        print(f"rewards are plotted in {args.plot}", flush=True)


def plot(path: Path, rewards: list[float], running: list[float], goal: float) -> None:
    """Plots the reward of each episode, and their running mean, into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    axes.plot(rewards, ".", markersize=3, alpha=0.5, label="reward of an episode")
    axes.plot(running, color="tab:red", label="running mean")
    axes.axhline(goal, color="black", linewidth=0.8, linestyle="--", label="goal")
    axes.set(xlabel="episode", ylabel="steps until the pole falls")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def work(rank: int, args: argparse.Namespace) -> None:
    """Runs one process of the group."""
    name = AGENT if rank == 0 else f"observer{rank - 1}"
    rpc.init_rpc(name)
    try:
        if name == AGENT:
            train(args)
        rpc.shutdown()
    except WorkerLostError as lost:
        rpc.shutdown(graceful=False)
        sys.exit(f"{name}: {lost}")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--observers", type=int, default=2, help="observers to start (default 2); ignored under a launcher"
    )
    parser.add_argument("--episodes", type=int, default=2000, help="maximal number of episodes (default 2000)")
    parser.add_argument("--goal", type=float, default=400, help="running reward to stop at (default 400)")
    parser.add_argument("--hidden", type=int, default=128, help="width of the policy's layer (default 128)")
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate of Adam (default 0.005)")
    parser.add_argument("--discount", type=float, default=0.99, help="discount factor of rewards (default 0.99)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--plot", type=Path, help="plot the rewards into this PNG file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    if args.observers < 1 or args.episodes < 1 or args.hidden < 1:
        parser.error("--observers, --episodes and --hidden must be at least 1")
    return args


def main() -> None:
    """Runs one role under a launcher; otherwise starts a process for each role."""
    args = parse_arguments()
    launched = launch.this_process()
    if launched is None:
        try:
            launch.spawn(work, 1 + args.observers, (args,))
        except ProcessExitedException as failed:
            sys.exit(str(failed))
        return
    args.observers = launched.world_size - 1
    if args.observers < 1:
        sys.exit("the launcher must start at least 2 processes: the agent and an observer")
    work(launched.rank, args)


if __name__ == "__main__":
    main()
