"""The programs of the tutorials run as they are printed, and print what the pages say, but for numbers."""

import os
import re
import subprocess
from pathlib import Path

import gradwire
import pytest

TUTORIALS = Path(gradwire.__file__).parent / "docs" / "tutorials"

COMMAND = """\
#!/bin/bash
if [ "$1" != spawn ]; then exec python -m gradwire "$@"; fi
names=(${{3//,/ }})
export MASTER_ADDR=127.0.0.1 MASTER_PORT={port} WORLD_SIZE=$4
for rank in "${{!names[@]}}"; do
    RANK=$rank GRADWIRE_WORKER_NAME=${{names[rank]}} python "$5" | sed "s/^/[${{names[rank]}}] /" &
done
wait
"""
"""The command `gradwire`, of which `spawn` forks its processes, too, with options as on the page."""

DYING_WORKER = """
import os, signal
from gradwire import rpc

def square(number):
    os.kill(os.getpid(), signal.SIGKILL)

rpc.init_rpc("worker-c")
signal.pause()
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (TUTORIALS / page).read_text(), re.M | re.S)


def without_numbers(text: str) -> list[str]:
    """The lines, in any order, without numbers, and without the reason why a worker is gone: it can be several."""
    return sorted(re.sub(r"-?\d[\d.]*", "#", re.sub("is gone: .*", "is gone", text)).splitlines())


@pytest.fixture
def run(python, tmp_path, free_port, monkeypatch):
    """Runs the commands of a page in a folder with its program; returns what they print, and what they should."""
    command = tmp_path / "bin" / "gradwire"
    command.parent.mkdir()
    command.write_text(COMMAND.format(port=free_port))
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{command.parent}:{python.executable.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(page: str, more: str = "") -> tuple[str, str]:
        (code,) = blocks(page, "python")
        (commands,) = blocks(page, "sh")
        (printed,) = blocks(page, "text")
        (tmp_path / re.match(r"# (\w+\.py)\n", code)[1]).write_text(code)
        commands = commands.replace("python squares.py coordinator", f"{more}\npython squares.py coordinator")
        done = subprocess.run(
            ["bash", "-e", "-c", commands.replace("29500", str(free_port))],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, printed

    return run


@pytest.mark.parametrize("page", ["parameter_server.md", "two_stages.md", "actor_learner.md", "ddp.md"])
def test_the_program_of_a_tutorial_prints_what_the_page_says(run, page):
    printed, expected = run(page)
    assert without_numbers(printed) == without_numbers(expected)


def test_the_elastic_group_finishes_though_a_worker_dies(run, tmp_path):
    (tmp_path / "dying.py").write_text(DYING_WORKER)
    printed, expected = run("elastic.md", "python dying.py &")
    assert without_numbers(printed) == without_numbers(expected)
    assert printed.splitlines()[-1] == expected.splitlines()[-1]


def test_every_tutorial_is_tested():
    assert {path.name for path in TUTORIALS.iterdir()} == {
        "parameter_server.md",
        "two_stages.md",
        "actor_learner.md",
        "ddp.md",
        "elastic.md",
    }
