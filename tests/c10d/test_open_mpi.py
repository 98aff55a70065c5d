"""The MPI engine on Open MPI, which has its own ideas of dtypes, of launchers and of processes that die."""

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

from tests.c10d import open_mpi
from tests.c10d.members import future_of_a_sum, join_all, reduce_within, sum_in_group_of, total
from tests.c10d.operations import DTYPES, OPERATIONS, expected_refusal, outcome

pytestmark = pytest.mark.skipif(bool(open_mpi.why_not()), reason=open_mpi.why_not())


def run(ranks: int, function: str, folder: Path) -> str:
    """Has so many ranks call a function of this module with the folder; what they said to stderr."""
    program = f"from tests.c10d import test_open_mpi as here; here.{function}({str(folder)!r})"
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    return subprocess.run(
        open_mpi.mpiexec(ranks, "-c", program),
        env={**environment, **open_mpi.ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    ).stderr


def tell(folder: str, what: object) -> None:
    Path(folder, f"rank{dist.get_rank()}").write_text(json.dumps(what))


def told(folder: Path, rank: int) -> Any:
    return json.loads(Path(folder, f"rank{rank}").read_text())


def wrong_reductions() -> list[str]:
    """What an MPI library may get wrong without a word: numbers that it does not know."""
    wrong = []
    for name in ("broadcast", *(name for name in OPERATIONS if name.startswith("all_reduce"))):
        for dtype in DTYPES:
            came = outcome(name, dtype, dist.group.WORLD)
            if came.partition(":")[0] != ("refused" if expected_refusal(name, dtype) else "ok"):
                wrong.append(f"{name} of {dtype}: {came}")
    return wrong


def life_of_a_group(folder: str) -> None:
    """Ends with an operation that the other rank does not take part in, and so without MPI_Finalize."""
    c10d.init_process_group("mpi")
    gloo = c10d.new_group(backend="gloo")
    sums = [total(), sum_in_group_of(1, 0), sum_in_group_of(1), future_of_a_sum()]
    wrong = wrong_reductions()
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeoutError, match="timed out after 0.2 s"):
            reduce_within(0.2)
    c10d.barrier(group=gloo)
    tell(folder, [load_mpi().get_vendor()[0], wrong, *sums])


def test_a_group_under_its_launcher(tmp_path):
    said = run(2, "life_of_a_group", tmp_path)
    assert told(tmp_path, 0) == ["Open MPI", [], 1.0, 1.0, None, 6.0], said
    assert told(tmp_path, 1) == ["Open MPI", [], 1.0, 1.0, 1.0, 6.0], said


def killed_in_the_middle(folder: str) -> None:
    c10d.init_process_group("mpi")
    if dist.get_rank() == 1:
        assert not dist.irecv(torch.zeros(1), 0).is_completed()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLostError) as caught:
        total()
    tell(folder, caught.value.rank)


def test_a_killed_rank_is_a_loss_if_the_launcher_lets_the_others_live(tmp_path):
    said = run(2, "killed_in_the_middle", tmp_path)
    assert told(tmp_path, 0) == 1, said


def take_open_mpi() -> None:
    os.environ.update(open_mpi.ENVIRONMENT)
    ctypes.CDLL(str(open_mpi.LIBRARY), ctypes.RTLD_GLOBAL)


def test_without_its_launcher_it_is_refused(workers, tmp_path):
    (worker,) = workers(1)
    worker.run(take_open_mpi)
    with pytest.raises(ProcessGroupError, match="Open MPI forms a world only under its launcher"):
        join_all([worker], tmp_path / "store", "gradwire_mpi")
