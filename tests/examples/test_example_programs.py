"""The examples with small sizes. Their processes are forked from the fork server of the tests, for speed."""

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from gradwire import launch
from torch import nn
from torch.nn import functional as F

from examples import batch_server, hybrid, parameter_server, pipeline, reinforce, rnn
from tests.remote_functions import wait_until


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


def test_the_pipeline_has_the_losses_of_one_process(run, tmp_path):
    picture = tmp_path / "losses.png"
    sizes = ["--epochs", "2", "--width", "16", "--lr", "0.01", "--batch-size", "256"]
    printed = run(
        pipeline,
        *sizes,
        "--micro-batches",
        "5",
        "--in-flight",
        "3",
        "--compare",
        "--timing",
        "1",
        "--plot",
        str(picture),
    )
    assert float(re.search("largest difference .*: (.*)", printed)[1]) == 0
    split, alone = re.findall(r"epoch  2   loss ([\d.]+)   test accuracy ([\d.]+)%", printed)
    assert split == alone
    assert float(split[0]) < math.log(10)  # digits by chance
    assert float(split[1]) > 30
    assert re.findall(r"^(one process|\d) +[\d.]+$", printed, re.M) == ["one process", "1", "2", "4", "8"]
    assert "three workers, epoch  2:" in printed  # the progress bar
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_rnn_has_the_losses_of_one_process(run, tmp_path):
    picture = tmp_path / "perplexity.png"
    sizes = ["--words", "10000", "--width", "32", "--epochs", "2", "--lr", "0.01", "--sample", "40"]
    printed = run(rnn, *sizes, "--compare", "--plot", str(picture))
    assert float(re.search("largest difference .*: (.*)", printed)[1]) == 0
    perplexities = re.findall(r"two workers, epoch +\d +perplexity +([\d.]+) +of test text +([\d.]+)", printed)
    (first, test_first), (second, test_second) = [(float(a), float(b)) for a, b in perplexities]
    assert second < first < 808  # words by chance
    assert test_second < test_first
    assert "two workers, epoch  1:" in printed  # the progress bar
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_reinforce_learns_and_does_the_same_again(run, tmp_path):
    pictures, lines = [tmp_path / "deep" / "first.png", tmp_path / "second.png"], []
    for picture in pictures:
        printed = run(reinforce, "--goal", "30", "--episodes", "200", "--plot", str(picture))
        lines.append(next(line for line in printed.splitlines() if line.startswith("running reward")))
        assert "running_reward=" in printed  # the progress bar
    assert lines[0].endswith("goal of 30 reached")  # actions at random get 22
    assert lines[0] == lines[1]
    assert pictures[0].read_bytes().startswith(b"\x89PNG")
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_hybrid_has_the_losses_of_one_process(run, tmp_path):
    picture = tmp_path / "losses.png"
    sizes = ["--vocabulary", "100", "--width", "8", "--hidden", "16", "--batch-size", "2048", "--lr", "0.5"]
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


def test_the_batch_server_answers_everybody_right(run, tmp_path):
    picture = tmp_path / "rates.png"
    sizes = ["--width", "64", "--epochs", "8", "--seconds", "0.2", "--users", "1", "8", "--batch-size", "8"]
    printed = run(batch_server, *sizes, "--plot", str(picture))
    rows = re.findall(
        r"^(alone|batched) +(\d+) +([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)%$", printed, re.M
    )
    assert [row[:2] for row in rows] == [("alone", "2"), ("batched", "2"), ("alone", "16"), ("batched", "16")]
    for how, _, rate, median, slowest, batch, accuracy in rows:
        assert int(rate.replace(",", "")) > 0
        assert 0 < float(median) <= float(slowest)
        assert float(batch) == 1 if how == "alone" else 1 <= float(batch) <= 8
        assert float(accuracy) > 80  # answers that went to others would be right one time in ten
    assert "measuring:" in printed  # the progress bar
    assert picture.read_bytes().startswith(b"\x89PNG")


class Slow(nn.Module):
    """Classifies when it may; an image's brightest pixel is its digit."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = Event()
        self.batches: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.may_go_on.wait()
        self.batches.append(len(images))
        if images.isnan().any():
            raise ArithmeticError("an image that is no number")
        return images


def image(digit: int) -> torch.Tensor:
    return F.one_hot(torch.tensor(digit), batch_server.PIXELS).float()


@pytest.fixture
def server() -> Iterator[batch_server.Server]:
    made = batch_server.Server(Slow(), batch_size=4, max_wait_s=1000.0)
    yield made
    made.network.may_go_on.set()
    made.close()


def test_a_full_batch_does_not_wait(server):
    answers = [server.classify(image(digit)) for digit in range(8)]
    server.network.may_go_on.set()
    assert [answer.wait() for answer in answers] == list(range(8))
    assert server.network.batches == [4, 4]


def test_a_batch_that_stays_small_waits_no_longer_than_it_may(server):
    server.max_wait_s = 0.05
    server.network.may_go_on.set()
    answers = [server.classify(image(digit)) for digit in range(2)]
    assert [answer.wait() for answer in answers] == [0, 1]


def test_a_server_that_closes_answers_what_it_has(server):
    answers = [server.classify(image(digit)) for digit in range(3)]
    server.network.may_go_on.set()
    server.close()
    assert [answer.wait() for answer in answers] == [0, 1, 2]
    assert server.network.batches == [3]


def test_a_batch_that_fails_fails_for_its_requests_only(server):
    server.network.may_go_on.set()
    for failing in [server.classify(image(1) * math.nan) for _ in range(4)]:
        with pytest.raises(ArithmeticError, match="no number"):
            failing.wait()
    with pytest.raises(ValueError, match=r"shape \(3,\): give one of shape \(64,\)"):
        server.classify(torch.zeros(3))
    answers = [server.classify(image(digit)) for digit in range(4)]
    assert [answer.wait() for answer in answers] == [0, 1, 2, 3]


def test_a_killed_trainer_of_the_parameter_server_is_named(workers, free_port, monkeypatch):
    monkeypatch.setattr("sys.argv", [parameter_server.__file__, "--epochs", "1000", "--quiet"])
    args = parameter_server.parse_arguments()

    def work(rank: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port))
        parameter_server.work(rank, args)

    started = workers(4)
    pending = [worker.start(work, rank) for rank, worker in enumerate(started)]
    wait_until(lambda: "epoch  1" in started[0].log.read_text(), 60)
    started[3].kill()
    with pytest.raises(SystemExit, match="coordinator: worker 'trainer1' is lost"):
        pending[0].result()
