"""launch.ray on a Ray cluster of several nodes, which all run on this machine."""

import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gradwire import launch, rpc
from gradwire.errors import WorkerLostError
from gradwire.launch import Backoff
from torch import distributed
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from examples import parameter_server
from tests.remote_functions import wait_until

pytestmark = pytest.mark.timeout(600)  # each process imports torch, for which Ray starts a new interpreter
ROOT = Path(__file__).parents[2]
STORE_BYTES = 80_000_000
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Two nodes with two CPUs each, and one without gradwire, on which only those may be that ask for it."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    os.environ["PYTHONPATH"] = str(ROOT)  # Ray's processes find the tests
    broken = tmp_path_factory.mktemp("broken")
    (broken / "gradwire").mkdir()
    (broken / "gradwire" / "__init__.py").write_text("raise ImportError('there is no gradwire here')")
    path = {"PYTHONPATH": f"{broken}:{ROOT}"}
    started = cluster_utils.Cluster()
    try:
        for _ in range(2):
            started.add_node(num_cpus=2, object_store_memory=STORE_BYTES, include_dashboard=False)
        started.add_node(num_cpus=0, resources={"bare": 1}, object_store_memory=STORE_BYTES, env_vars=path)
        ray.init(address=started.address, log_to_driver=False)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()
        del os.environ["PYTHONPATH"]


def node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def describe(rank: int, folder: Path) -> None:
    rpc.init_rpc(f"worker{rank}")
    size = int(os.environ["WORLD_SIZE"])
    peer = rpc.rpc_sync(f"worker{(rank + 1) % size}", os.getenv, ("RANK",))
    text = [peer, *(os.environ[name] for name in VARIABLES), node(), os.environ["GRADWIRE_TOKEN"]]
    (folder / str(rank)).write_text(" ".join(text))
    rpc.shutdown()


def texts(folder: Path) -> list[list[str]]:
    return [path.read_text().split() for path in sorted(folder.iterdir())]


def test_processes_are_spread_and_find_each_other(cluster, tmp_path):
    launch.ray(describe, 2, (tmp_path,), strategy="STRICT_SPREAD")
    found = texts(tmp_path)
    assert [each[:6] for each in found] == [[str(1 - rank), str(rank), "2", "0", "1", "0"] for rank in range(2)]
    assert len({each[6] for each in found}) == 2
    assert len({each[7] for each in found}) == 1
    assert len(found[0][7]) >= 43  # 256 bits


def test_processes_are_packed_by_what_they_need(cluster, tmp_path):
    launch.ray(describe, 2, (tmp_path,), strategy="STRICT_PACK")
    found = texts(tmp_path)
    assert [each[:6] for each in found] == [
        [str(1 - rank), str(rank), "2", str(rank), "2", "0"] for rank in range(2)
    ]
    assert len({each[6] for each in found}) == 1


def test_the_parameter_server_trains(cluster, tmp_path, monkeypatch, capfd):
    arguments = ["parameter_server.py", "--ray", "--epochs", "2", "--quiet", "--plot", str(tmp_path / "plot.png")]
    monkeypatch.setattr(sys, "argv", arguments)
    parameter_server.main()
    assert (tmp_path / "plot.png").stat().st_size


def reduce_with_torch(rank: int, folder: Path) -> None:
    import torch

    distributed.init_process_group("gloo")
    ranks = torch.tensor([rank])
    distributed.all_reduce(ranks)
    (folder / str(rank)).write_text(str(ranks.item()))
    distributed.destroy_process_group()


def test_torch_distributed_starts_in_them_too(cluster, tmp_path):
    launch.ray(reduce_with_torch, 2, (tmp_path,))
    assert texts(tmp_path) == [["1"], ["1"]]


def fail_once(rank: int, folder: Path, how: str) -> None:
    """Rank 1 fails when it has joined, and is called by the others when it is back under its name."""
    rpc.init_rpc(f"worker{rank}")
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == 1 and restart == 0:
        if how == "raises":
            raise ValueError("the reason")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        wait_until(is_back, 300)
        (folder / "seen").write_text("1")
    rpc.shutdown()


def is_back() -> bool:
    try:
        return rpc.rpc_sync("worker1", os.getenv, ("TORCHELASTIC_RESTART_COUNT",)) == "1"
    except (WorkerLostError, RuntimeError):
        return False


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "raised ValueError: the reason"),
        ("is killed", "has died .*connection error"),
    ],
)
def test_a_process_that_fails_is_started_again_under_its_name(cluster, tmp_path, caplog, how, text):
    with caplog.at_level(logging.WARNING, "gradwire"):
        launch.ray(fail_once, 2, (tmp_path, how), restarts=2, backoff=Backoff(initial=0))
    assert texts(tmp_path) == [["1"]]
    line = rf"process 1 \(pid \d+ on [\d.]+\) {text}.*; it is started again in 0 s \(restart 1 of 2\)"
    assert re.search(line, caplog.text), caplog.text


def fail_always(rank: int, folder: Path, how: str) -> None:
    (folder / f"{rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").write_text(str(os.getpid()))
    if rank == 0:
        threading.Event().wait()
    wait_until(lambda: (folder / "0-0").exists(), 300)
    if how == "raises":
        raise ValueError("the reason")
    sys.exit(7)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        (
            "raises",
            ProcessRaisedException,
            "process 1 .*terminated with the following error:(.|\n)*ValueError: the",
        ),
        ("exits", ProcessExitedException, "process 1 .* exited with status 7"),
    ],
)
def test_the_limit_ends_all_with_its_error(cluster, tmp_path, how, error, text):
    with pytest.raises(error, match=text) as raised:
        launch.ray(fail_always, 2, (tmp_path, how), restarts=1, backoff=Backoff(initial=0), grace_period=0.1)
    assert raised.value.error_index == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "1-0", "1-1"]
    other = int((tmp_path / "0-0").read_text())
    wait_until(lambda: not Path(f"/proc/{other}").exists())


def kill_itself(rank: int, folder: Path) -> None:
    """All ranks are killed at once, when all of them run, and write where they are when they are back."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        (folder / f"first-{rank}").touch()
        wait_until(lambda: len(list(folder.glob("first-*"))) == 2, 300)
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"again-{rank}").write_text(f"{os.environ['LOCAL_RANK']} {os.environ['LOCAL_WORLD_SIZE']}")


def test_processes_that_restart_at_once_know_each_other(cluster, tmp_path):
    launch.ray(kill_itself, 2, (tmp_path,), restarts=1, backoff=Backoff(initial=0), strategy="STRICT_PACK")
    again = sorted(path.read_text() for path in tmp_path.glob("again-*"))
    assert again == ["0 2", "1 2"]


def unload() -> object:
    raise ModuleNotFoundError("No module named 'bread'")


class Unloadable:
    """Pickles here and fails to unpickle there."""

    def __reduce__(self) -> tuple[object, ...]:
        return unload, ()


def test_arguments_that_do_not_unpickle_are_told(cluster, tmp_path, caplog):
    problem = "terminated with the following error when it unpickled its function and arguments:(.|\n)*'bread'"
    with (
        caplog.at_level(logging.WARNING, "gradwire"),
        pytest.raises(ProcessRaisedException, match=problem),
    ):
        launch.ray(describe, 1, (Unloadable(),), restarts=1, backoff=Backoff(initial=0), grace_period=0.1)
    line = r"process 0 \(pid .* raised ModuleNotFoundError: No module named 'bread' when it unpickled its function"
    assert re.search(line, caplog.text), caplog.text


def test_a_node_without_gradwire_is_told(cluster, tmp_path):
    problem = "process 0 terminated with the following error when it started:(.|\n)*no gradwire here"
    with pytest.raises(ProcessRaisedException, match=problem):
        launch.ray(describe, 1, (tmp_path,), resources={"bare": 1}, grace_period=0.1)


def stay_with_the_node(rank: int, folder: Path) -> None:
    """Waits on its first node until that is gone; the test then ends the job by files."""
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    master = f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}"
    is_reserved = rank == 0 and is_taken(*master.split())
    local = f"{os.environ['LOCAL_RANK']} {os.environ['LOCAL_WORLD_SIZE']}"
    unfinished = folder / f"unfinished-{rank}-{restart}"
    unfinished.write_text(f"{node()} {local} {master} {is_reserved}")
    unfinished.rename(folder / f"{rank}-{restart}")
    if restart == "0":
        threading.Event().wait()
    wait_until(lambda: len(list(folder.glob("[0-9]-1"))) == len(list(folder.glob("[0-9]-0"))), 300)


def is_taken(host: str, port: str) -> bool:
    """Whether a program that takes any free port does not get this one."""
    with socket.socket() as other:
        try:
            other.bind((host, int(port)))
        except OSError:
            return True
        return False


def test_processes_whose_node_is_gone_are_started_on_another(cluster, tmp_path):
    spot = {"CPU": 1, "spot": 1}
    nodes = [
        cluster.add_node(num_cpus=2, resources={"spot": 2}, object_store_memory=STORE_BYTES) for _ in range(2)
    ]
    thread_error: list[BaseException] = []

    def remove_the_node() -> None:
        try:
            wait_until(lambda: len(list(tmp_path.glob("[0-9]-0"))) == 2, 300)
            lost = (tmp_path / "0-0").read_text().split()[0]
            cluster.remove_node(next(each for each in cluster.list_all_nodes() if each.node_id == lost))
        except BaseException as error:
            thread_error.append(error)

    remover = threading.Thread(target=remove_the_node)
    remover.start()
    try:
        launch.ray(stay_with_the_node, 2, (tmp_path,), restarts=1, strategy="STRICT_PACK", resources=spot)
    finally:
        remover.join()
        for each in nodes:
            if each in cluster.list_all_nodes():
                cluster.remove_node(each)
    assert not thread_error
    first = [(tmp_path / f"{rank}-0").read_text().split() for rank in range(2)]
    again = [(tmp_path / f"{rank}-1").read_text().split() for rank in range(2)]
    assert len({each[0] for each in first}) == len({each[0] for each in again}) == 1
    assert first[0][0] != again[0][0]
    for each in (first, again):
        assert [words[1:3] for words in each] == [["0", "2"], ["1", "2"]]
        assert each[0][3:5] == each[1][3:5]  # MASTER_ADDR and MASTER_PORT
        assert each[0][5] == "True"


def test_without_room_the_error_says_what_there_is(cluster):
    expected = r"has not had {'CPU': 100} for each of 2 processes \(PACK\) for 1 s; it has"
    with pytest.raises(TimeoutError, match=expected):
        launch.ray(describe, 2, resources={"CPU": 100}, placement_timeout_s=1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"nprocs": 0}, "nprocs is 0"),
        ({"strategy": "pack"}, "strategy is 'pack': give one of PACK, SPREAD"),
        ({"resources": {"CPU": 0}}, "resources is"),
        ({"resources": {}}, "resources is"),
        ({"placement_timeout_s": 0}, "placement_timeout_s is 0"),
        ({"restarts": -1}, "restarts is -1"),
    ],
)
def test_bad_arguments_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        launch.ray(describe, **{"nprocs": 2, **options})
