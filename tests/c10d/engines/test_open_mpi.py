"""The MPI engine on Open MPI, which treats dtypes, launchers and dead processes differently from MPICH."""

import ctypes
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import c10d
from gradwire.c10d.engines.mpi.world import load_mpi
from gradwire.errors import CollectiveTimeoutError, ProcessGroupError, RankLostError

from tests.c10d.engines import open_mpi
from tests.c10d.members import future_of_a_sum, join_all, reduce_within, sum_in_group_of, total
from tests.c10d.operations import DTYPES, OPERATIONS, expected_refusal, outcome
from tests.certificates import TOKEN
from tests.interpreters import Python

pytestmark = pytest.mark.skipif(bool(open_mpi.why_unavailable()), reason=open_mpi.why_unavailable())


def run(python: Python, ranks: int, function: str, folder: Path) -> str:
    """Runs a function of this module on `ranks` ranks, with the folder; returns their stderr."""
    imports = "from tests.c10d.engines import test_open_mpi as here"
    program = f"{imports}; here.load_open_mpi(); here.{function}({str(folder)!r})"
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    return subprocess.run(
        open_mpi.mpiexec(ranks, "-c", program, python=python.executable),
        env={**environment, **open_mpi.ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    ).stderr


def write_result(folder: str, result: object) -> None:
    Path(folder, f"rank{dist.get_rank()}").write_text(json.dumps(result))


def read_result(folder: Path, rank: int) -> Any:
    return json.loads(Path(folder, f"rank{rank}").read_text())


def wrong_reductions() -> list[str]:
    """Returns what an MPI library computes wrongly without an error: numbers of types that it does not know."""
    wrong = []
    for name in ("broadcast", *(name for name in OPERATIONS if name.startswith("all_reduce"))):
        for dtype in DTYPES:
            result = outcome(name, dtype, dist.group.WORLD, thorough=False)
            if result.partition(":")[0] != ("refused" if expected_refusal(name, dtype) else "ok"):
                wrong.append(f"{name} of {dtype}: {result}")
    return wrong


def life_of_a_group(folder: str) -> None:
    """Ends with an operation that the other rank does not take part in, so MPI_Finalize is not called."""
    c10d.init_process_group("mpi")
    gloo = c10d.new_group(backend="gloo")
    sums = [total(), sum_in_group_of(1, 0), sum_in_group_of(1), future_of_a_sum()]
    wrong = [] if os.environ["GRADWIRE_TOKEN"] else wrong_reductions()  # which the token does not change
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeoutError, match="timed out after 0.2 s"):
            reduce_within(0.2)
    c10d.barrier(group=gloo)
    write_result(folder, [load_mpi().get_vendor()[0], wrong, *sums])


@pytest.mark.parametrize("token", ["", TOKEN], ids=["no token", "token"])
def test_a_group_under_its_launcher(python, tmp_path, monkeypatch, token):
    monkeypatch.setenv("GRADWIRE_TOKEN", token)
    stderr = run(python, 2, "life_of_a_group", tmp_path)
    assert read_result(tmp_path, 0) == ["Open MPI", [], 1.0, 1.0, None, 6.0], stderr
    assert read_result(tmp_path, 1) == ["Open MPI", [], 1.0, 1.0, 1.0, 6.0], stderr


def killed_in_the_middle(folder: str) -> None:
    c10d.init_process_group("mpi")
    if dist.get_rank() == 1:
        assert not dist.irecv(torch.zeros(1), 0).is_completed()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLostError) as caught:
        total()
    write_result(folder, caught.value.rank)


def test_a_killed_rank_is_lost_if_the_launcher_lets_the_others_live(python, tmp_path):
    stderr = run(python, 2, "killed_in_the_middle", tmp_path)
    assert read_result(tmp_path, 0) == 1, stderr


def load_open_mpi() -> None:
    os.environ.update(open_mpi.ENVIRONMENT)
    ctypes.CDLL(str(open_mpi.LIBRARY), ctypes.RTLD_GLOBAL)


def test_without_its_launcher_it_is_refused(workers, tmp_path):
    (worker,) = workers(1)
    worker.run(load_open_mpi)
    with pytest.raises(ProcessGroupError, match="Open MPI forms a world only under its launcher"):
        join_all([worker], tmp_path / "store", "gradwire_mpi")
