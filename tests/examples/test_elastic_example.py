"""The elastic parameter server comes to the result of an undisturbed run, whichever of its processes is killed."""

import argparse
import re
from contextlib import redirect_stderr, redirect_stdout

import pytest
from gradwire import launch
from gradwire.launch import Backoff

from examples import elastic_parameter_server as example

LOG = "log"


def run_rank(rank: int, args: argparse.Namespace) -> None:
    with (args.folder / LOG).open("a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        example.work(rank, args)


@pytest.fixture
def quick_launch(monkeypatch):
    """Has the example fork its processes from the fork server of the tests, and restart them without pauses."""
    spawn = launch.spawn

    def spawn_quickly(work, nprocs, args, restarts):
        assert work is example.work
        options = {"start_method": "forkserver", "backoff": Backoff(initial=0)}
        spawn(run_rank, nprocs, args, restarts=restarts, **options)

    monkeypatch.setattr(launch, "spawn", spawn_quickly)


def test_kills_do_not_change_the_result(quick_launch, monkeypatch, tmp_path, capsys, caplog):
    arguments = ["--chaos", "--epochs", "3", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [example.__file__, *arguments])
    example.main()
    printed = (tmp_path / LOG).read_text()
    killed = re.findall(r"kill -9 \d+ \((\w+)\)", printed)
    assert killed == ["store", "server", "trainer0", "trainer1"]
    told = [record.getMessage() for record in caplog.records]
    restarted = [text.split()[1] for text in told if "started again" in text]
    assert restarted == ["0", "1", "2", "3"]  # nobody else
    first, second = re.findall(r"server: begins at step (\d+)", printed)
    assert int(first) == 0 < int(second)
    accuracies = re.findall(r"([\d.]+)%", capsys.readouterr().out)
    assert accuracies[0] == accuracies[1]
    assert float(accuracies[0]) > 90
