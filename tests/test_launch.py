"""`launch.spawn` starts the processes of a script, and reports the one that failed first."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed
from gradwire import launch, rpc
from gradwire.errors import WorkerLostError
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException


def call_around(rank: int, folder: Path) -> None:
    rpc.init_rpc(f"worker{rank}")
    size = int(os.environ["WORLD_SIZE"])
    peer = rpc.rpc_sync(f"worker{(rank + 1) % size}", os.getenv, ("RANK",))
    (folder / str(rank)).write_text(f"{peer} {os.environ['LOCAL_RANK']} {torch.get_num_threads()}")
    rpc.shutdown()


def reduce_with_torch(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    ranks = torch.tensor([rank])
    torch.distributed.all_reduce(ranks)
    (folder / str(rank)).write_text(str(ranks.item()))
    torch.distributed.destroy_process_group()


def never() -> None:
    threading.Event().wait()


def fail_in_one(rank: int, folder: Path, how: str) -> None:
    rpc.init_rpc(f"worker{rank}")
    if rank == 1:
        if how == "raises":
            raise ValueError("the reason")
        if how == "exits":
            sys.exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        rpc.rpc_sync("worker1", never)
    except WorkerLostError as lost:
        (folder / str(rank)).write_text(str(lost))


def wait_forever_but_one(rank: int, folder: Path) -> None:
    if rank:
        (folder / "fifo").write_text(str(os.getpid()))
        signal.pause()
    (folder / "pid").write_text((folder / "fifo").read_text())
    raise ValueError("the reason")


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_functions_find_each_other_through_the_environment(tmp_path):
    launch.spawn(call_around, 2, (tmp_path,), start_method="forkserver")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert texts(tmp_path) == {"0": f"1 0 {threads}", "1": f"0 1 {threads}"}


def test_torch_distributed_starts_in_them_too(tmp_path):
    launch.spawn(reduce_with_torch, 3, (tmp_path,), start_method="forkserver")
    assert texts(tmp_path) == {"0": "3", "1": "3", "2": "3"}


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("raises", ProcessRaisedException, "ValueError: the reason"),
        ("exits", ProcessExitedException, "exit code 7"),
        ("is killed", ProcessExitedException, "SIGKILL"),
    ],
)
def test_the_others_may_report_what_they_saw_of_a_failure(tmp_path, how, error, text):
    with pytest.raises(error, match=text):
        launch.spawn(fail_in_one, 2, (tmp_path, how), start_method="forkserver")
    assert "'worker1' is lost" in texts(tmp_path)["0"]


def test_what_does_not_end_is_ended(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ProcessRaisedException, match="the reason"):
        launch.spawn(wait_forever_but_one, 2, (tmp_path,), start_method="forkserver", grace_period=0.1)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("nprocs", [0, -1, True, 2.0, None])
def test_a_bad_number_of_processes_is_refused(nprocs):
    with pytest.raises(ValueError, match=f"nprocs is {nprocs}"):
        launch.spawn(call_around, nprocs)


def test_a_bad_grace_period_is_refused():
    with pytest.raises(ValueError, match="grace_period is -1"):
        launch.spawn(call_around, 2, grace_period=-1)
