"""Examples in small. Their `main` starts the roles, but forked from the tests' server, which takes no time."""

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from gradwire import launch

from examples import reinforce


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
