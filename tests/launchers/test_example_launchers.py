"""The parameter server trains under the launchers of docs/launch.md: torchrun on two hosts, and mpiexec."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import parameter_server
from tests.c10d.engines import open_mpi
from tests.certificates import TOKEN
from tests.hosts import Network
from tests.interpreters import Python
from tests.servers import Servers

PROGRAM = parameter_server.__file__
SCRIPTS = Path(sys.executable).parent
PORT = "29500"
pytestmark = pytest.mark.timeout(300)


def run_torchrun(node: int, master: str, environment: dict[str, str]) -> tuple[int, str]:
    """Runs torchrun on the host of this worker, whose network its processes share; returns status and output."""
    servers = Servers.start()
    here = Python(servers)
    os.environ.update(environment, PYTHON_EXEC=str(here.executable))  # which torchrun starts
    try:
        options = ["--nnodes", "2", "--node-rank", node, "--nproc-per-node", "2"]
        address = ["--master-addr", master, "--master-port", PORT]
        done = here.run(
            "-m", "torch.distributed.run", *options, *address, PROGRAM, "--epochs", "2", "--quiet", timeout=270
        )
    finally:
        here.close()
        servers.close()
    return done.returncode, done.stdout + done.stderr


def train_on(net: Network, environment: dict[str, str]) -> list[tuple[int, str]]:
    nodes = enumerate(net.workers)
    started = [worker.start(run_torchrun, node, net.address(0), environment) for node, worker in nodes]
    return [each.result(280) for each in started]


def test_torchrun_on_two_hosts_with_a_token(hosts):
    net = hosts(1, 1)
    (status, output), (other_status, other_output) = train_on(net, {"GRADWIRE_TOKEN": TOKEN})
    assert (status, other_status) == (0, 0), output + other_output
    assert "epoch  2" in output
    assert "trainer1" in output
    assert TOKEN not in output + other_output


def test_torchrun_on_two_hosts_without_a_token_says_what_is_missing(hosts):
    for status, output in train_on(hosts(1, 1), {}):
        assert status == 1
        assert "Set GRADWIRE_TOKEN" in output


@pytest.mark.parametrize("library", ["MPICH", "Open MPI"])
def test_mpiexec(python, monkeypatch, free_port, library):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    arguments = [PROGRAM, "--epochs", "2", "--quiet"]
    if library == "MPICH":
        command = [str(SCRIPTS / "mpiexec"), "-n", "3", str(python.executable), *arguments]
    elif reason := open_mpi.why_unavailable():
        pytest.skip(reason)
    else:
        command = open_mpi.mpiexec(3, *arguments, python=python.executable)
        monkeypatch.setenv("LD_LIBRARY_PATH", open_mpi.ENVIRONMENT["LD_LIBRARY_PATH"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch  2" in done.stdout
    assert "trainer0" in done.stdout
