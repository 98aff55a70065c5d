"""The batch script of docs/launch.md on a private Slurm cluster of one node."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers import slurm
from tests.remote_functions import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "parameter_server.sh"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.SlurmCluster]:
    if reason := slurm.why_unavailable():
        pytest.skip(reason)
    with slurm.SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started


@pytest.fixture
def run(cluster, python, monkeypatch):
    """Runs a command of Slurm in the checkout, whose `python` is one with torch loaded."""
    monkeypatch.chdir(ROOT)
    bin_folders = f"{python.executable.parent}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    return lambda *command, **options: cluster.run(*command, PATH=bin_folders, **options)


def test_the_batch_script_trains(run, tmp_path):
    output = tmp_path / "output"
    run("sbatch", "--wait", f"--output={output}", str(SCRIPT), "--epochs", "2")
    text = output.read_text()
    assert "epoch  2" in text
    assert "trainer1" in text
    assert not list(ROOT.glob("token-*"))


def test_tasks_of_srun_are_ranks(run, tmp_path):
    program = "from gradwire import launch; print(launch.this_process())"
    output = run("srun", "--ntasks=2", "python", "-c", program)
    assert sorted(output.splitlines()) == [f"LaunchedProcess(rank={rank}, world_size=2)" for rank in range(2)]


def test_a_batch_script_without_srun_is_told(run, tmp_path):
    script, output = tmp_path / "script.sh", tmp_path / "output"
    script.write_text("#!/bin/sh\npython examples/parameter_server.py\n")
    run("sbatch", "--wait", "--ntasks=3", f"--output={output}", str(script), check=False)
    expected = "batch script .* of a Slurm job of 3 tasks, once for all of them: .* by srun"
    assert re.search(expected, output.read_text())


def test_without_an_address_the_error_names_it(run):
    program = "from gradwire import rpc; rpc.init_rpc('worker')"
    text = run("srun", "--ntasks=1", "python", "-c", program, check=False)
    assert "MASTER_ADDR, MASTER_PORT, which are not set" in text


def test_a_cluster_that_ends_leaves_no_job_and_changes_no_folder(tmp_path):
    if reason := slurm.why_unavailable():
        pytest.skip(reason)
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    script, pid = tmp_path / "script.sh", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 600\n")
    with slurm.SlurmCluster(private / "cluster") as started:
        started.run("sbatch", "--output=/dev/null", str(script))
        wait_until(lambda: pid.exists() and pid.read_text(), 60)
    assert not Path(f"/proc/{int(pid.read_text())}").exists()
    assert private.stat().st_mode & 0o777 == 0o700
