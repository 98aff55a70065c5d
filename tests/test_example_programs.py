"""Examples in small. Their `main` starts the roles, but forked from the tests' server, which takes no time."""

import math
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from gradwire import launch

from examples import hybrid, reinforce


def run_role(rank: int, work: Callable[..., None], args: Any, outputs: Path) -> None:
    with (outputs / str(rank)).open("w") as output, redirect_stdout(output), redirect_stderr(output):
        work(rank, args)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Callable[..., str]:
    """Runs an example with these arguments: what its first process has printed."""
    spawn = launch.spawn

    def spawn_quickly(work: Callable[..., None], nprocs: int, args: tuple[Any, ...]) -> None:
        spawn(run_role, nprocs, (work, *args, tmp_path), start_method="forkserver")

    def run_example(program: Any, *arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [program.__file__, *arguments])
        program.main()
        return (tmp_path / "0").read_text()

    monkeypatch.setattr(launch, "spawn", spawn_quickly)
    return run_example


def test_reinforce_learns_and_does_the_same_again(run, tmp_path):
    pictures, lines = [tmp_path / "deep" / "first.png", tmp_path / "second.png"], []
    for picture in pictures:
        printed = run(reinforce, "--goal", "40", "--episodes", "200", "--plot", str(picture))
        lines.append(next(line for line in printed.splitlines() if line.startswith("running reward")))
        assert "running_reward=" in printed  # the progress bar
    assert lines[0].endswith("goal of 40 reached")  # actions at random get 22
    assert lines[0] == lines[1]
    assert pictures[0].read_bytes().startswith(b"\x89PNG")
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_hybrid_has_the_losses_of_one_process(run, tmp_path):
    picture = tmp_path / "losses.png"
    sizes = ["--vocabulary", "100", "--width", "8", "--hidden", "16", "--batch-size", "1024", "--lr", "0.5"]
    printed = run(hybrid, *sizes, "--epochs", "2", "--compare", "--plot", str(picture))
    assert float(re.search("largest difference .*: (.*)", printed)[1]) < 1e-12
    losses = [float(loss) for loss in re.findall(r"^epoch \d   loss ([\d.]+)", printed, re.M)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < math.log(100)  # words by chance
    assert "epoch 1/2" in printed  # the progress bar
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_shares_must_be_equal(run):
    with pytest.raises(SystemExit, match="--batch-size 100 cannot be shared evenly by 3 trainers"):
        run(hybrid, "--trainers", "3", "--batch-size", "100")
