"""`launch.spawn` starts the processes of a script, and reports the one that failed first."""

import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed
from gradwire import c10d, launch, rpc
from gradwire.c10d import Credentials, TCPStore
from gradwire.c10d.rendezvous.url import SpawnStore
from gradwire.errors import CredentialsError, StoreError, WorkerLostError
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from tests.certificates import OTHER_TOKEN, TOKEN, make_authority, write
from tests.interpreters import have_ended
from tests.remote_functions import wait_until


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


def reduce_with_both(rank: int, folder: Path) -> None:
    rpc.init_rpc(f"worker{rank}")
    peer = rpc.rpc_sync(f"worker{1 - rank}", os.getenv, ("RANK",))
    ranks = torch.tensor([rank])
    for _ in range(2):  # the second default group is at the same store
        c10d.init_process_group("shm")
        c10d.all_reduce(ranks)
        c10d.destroy_process_group()
    reduce_with_torch(rank, folder)
    text = (folder / str(rank)).read_text()
    (folder / str(rank)).write_text(f"{peer} {ranks.item()} {text}")
    rpc.shutdown()


def ports(pid: int) -> list[int]:
    """Returns the TCP ports on which a process listens."""
    connections = psutil.Process(pid).net_connections("tcp")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


def look_for_the_token(rank: int, folder: Path, launcher: int) -> None:
    rpc.init_rpc(f"worker{rank}")
    store = SpawnStore.from_environment(os.environ)
    assert store is not None
    processes = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
    found = {
        "token": store.token,
        "in command lines": [each.pid for each in processes if store.token in " ".join(each.cmdline())],
        "ports of workers": rpc.rpc_sync("worker0", ports, (os.getpid(),)) + ports(os.getpid()),
        "is the store's": [store.port in ports(launcher), store.master_port in ports(launcher)],
    }
    (folder / f"{rank}-{os.getpid()}").write_text(json.dumps(found))
    rpc.shutdown()


def try_credentials(rank: int, folder: Path) -> None:
    store = SpawnStore.from_environment(os.environ)
    assert store is not None
    results = []
    for token in (None, OTHER_TOKEN, TOKEN, store.token):
        try:
            credentials = None if token is None else Credentials(token=token)
            TCPStore("127.0.0.1", store.port, credentials=credentials, timeout=20).close()
            results.append("let in")
        except StoreError as error:
            results.append(str(error).rpartition(": ")[2])
    (folder / str(rank)).write_text(json.dumps(results))


asked = threading.Event()


def never() -> None:
    asked.set()
    threading.Event().wait()


def fail_in_one(rank: int, folder: Path, how: str) -> None:
    rpc.init_rpc(f"worker{rank}")
    if rank == 1:
        assert asked.wait(60)  # worker0 has joined by then
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


def wait_forever(rank: int, folder: Path) -> None:
    (folder / f"{rank}-{os.getpid()}").touch()
    signal.pause()


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_functions_find_each_other_through_the_environment(tmp_path):
    launch.spawn(call_around, 2, (tmp_path,), start_method="forkserver")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert texts(tmp_path) == {"0": f"1 0 {threads}", "1": f"0 1 {threads}"}


def test_torch_distributed_starts_in_them_too(tmp_path):
    launch.spawn(reduce_with_torch, 3, (tmp_path,), start_method="forkserver")
    assert texts(tmp_path) == {"0": "3", "1": "3", "2": "3"}


def test_rpc_and_groups_of_gradwire_and_torch_start_in_the_same_processes(tmp_path):
    launch.spawn(reduce_with_both, 2, (tmp_path,), start_method="forkserver")
    assert texts(tmp_path) == {"0": "1 2 1", "1": "0 2 1"}


def test_each_job_has_a_token_of_its_own_which_is_told_nobody(tmp_path):
    for method, processes in (("spawn", 1), ("forkserver", 2)):  # a new interpreter takes three seconds
        launch.spawn(look_for_the_token, processes, (tmp_path, os.getpid()), start_method=method)
    found = [json.loads(text) for text in texts(tmp_path).values()]
    assert len(found) == 3
    tokens = {each["token"] for each in found}
    assert len(tokens) == 2
    assert min(map(len, tokens)) >= 43  # 256 bits
    for each in found:
        assert each["in command lines"] == []
        assert each["ports of workers"] == []
        assert each["is the store's"] == [True, False]


def test_nobody_without_the_token_gets_into_the_store(tmp_path):
    launch.spawn(try_credentials, 1, (tmp_path,), start_method="forkserver")
    none, other, another, own = json.loads(texts(tmp_path)["0"])
    assert "demands credentials" in none
    assert other == another
    assert "certificate is not of this job" in other
    assert own == "let in"


def test_a_token_in_the_environment_is_the_one_of_the_store(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADWIRE_TOKEN", TOKEN)
    launch.spawn(try_credentials, 1, (tmp_path,), start_method="forkserver")
    assert json.loads(texts(tmp_path)["0"])[2:] == ["let in", "let in"]


def test_certificates_in_the_environment_are_those_of_the_store(python, tmp_path, monkeypatch):
    credentials = write(tmp_path / "of-job", make_authority(), None)
    for name in ("ca", "certificate", "key"):
        monkeypatch.setenv(f"GRADWIRE_{name.upper()}", str(getattr(credentials, name)))
    (tmp_path / "results").mkdir()
    program = f"""
from pathlib import Path
from gradwire import launch
from tests.launch.test_launch import reduce_in_a_group
launch.spawn(reduce_in_a_group, 2, (Path({str(tmp_path)!r}, "results"),), start_method="fork")
"""
    done = python.run("-c", program)
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "results") == {"0": "1", "1": "1"}


def reduce_in_a_group(rank: int, folder: Path) -> None:
    store = SpawnStore.from_environment(os.environ)
    assert store is not None
    with pytest.raises(StoreError, match="certificate is not of this job"):
        TCPStore("127.0.0.1", store.port, credentials=Credentials(token=TOKEN), timeout=20)
    c10d.init_process_group("shm")
    ranks = torch.tensor([rank])
    c10d.all_reduce(ranks)
    (folder / str(rank)).write_text(str(ranks.item()))
    c10d.destroy_process_group()


def test_credentials_that_are_not_valid_are_refused(monkeypatch):
    monkeypatch.setenv("GRADWIRE_TOKEN", "guess")
    with pytest.raises(CredentialsError, match="the token can be guessed"):
        launch.spawn(call_around, 2)


def test_processes_can_be_forked_again_and_again(python, tmp_path):
    """In a process of its own: that of the tests has used gRPC, and must not be forked."""
    program = f"""
from pathlib import Path
from gradwire import launch
from tests.launch.test_launch import call_around
for number in range(2):
    folder = Path({str(tmp_path)!r}, str(number))
    folder.mkdir()
    launch.spawn(call_around, 2, (folder,), start_method="fork")
"""
    done = python.run("-c", program)
    assert done.returncode == 0, done.stderr
    assert [texts(tmp_path / str(number)).keys() for number in range(2)] == [{"0", "1"}] * 2


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


def test_an_interrupt_of_the_launcher_alone_ends_the_processes(python, tmp_path):
    """Nobody else would end them when a notebook's cell is interrupted, and multiprocessing would wait at exit."""
    program = f"""
import multiprocessing
from pathlib import Path
from gradwire import launch
from tests.launch.test_launch import wait_forever
try:
    launch.spawn(wait_forever, 2, (Path({str(tmp_path)!r}),))
except KeyboardInterrupt:
    print("left:", multiprocessing.active_children())
"""
    with (
        tempfile.TemporaryFile("w+") as output,
        python.start("-c", program, stdout=output, stderr=output) as launcher,
    ):
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(launcher.pid, signal.SIGINT)
        launcher.wait(60)
        output.seek(0)
        assert output.read() == "left: []\n"


def test_the_processes_die_with_a_launcher_in_the_background(python, tmp_path):
    """A shell has what it starts in the background ignore Ctrl-C."""
    program = f"""
import signal
from pathlib import Path
from gradwire import launch
from tests.launch.test_launch import wait_forever
signal.signal(signal.SIGINT, signal.SIG_IGN)
launch.spawn(wait_forever, 2, (Path({str(tmp_path)!r}),), start_method="fork")
"""
    with (
        tempfile.TemporaryFile("w+") as output,
        python.start("-c", program, stdout=output, stderr=output) as launcher,
    ):
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        processes = [psutil.Process(int(path.name.partition("-")[2])) for path in tmp_path.iterdir()]
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(60)
    wait_until(lambda: have_ended(processes))


@pytest.mark.parametrize("nprocs", [0, -1, True, 2.0, None])
def test_a_bad_number_of_processes_is_refused(nprocs):
    with pytest.raises(ValueError, match=f"nprocs is {nprocs}"):
        launch.spawn(call_around, nprocs)


def test_functions_of_a_notebook_are_refused(python):
    """New processes could not import them, and died of an AttributeError. A prompt has no file either."""
    program = """
from gradwire import launch
def work(rank): pass
for method in "spawn", "forkserver":
    try:
        launch.spawn(work, 2, start_method=method)
    except ValueError as error:
        print(error)
"""
    done = python.run("-c", program)
    assert done.stdout.count("fn is 'work' of a notebook or a prompt") == 2, done.stdout + done.stderr
    assert "%%writefile work.py" in done.stdout


@pytest.mark.parametrize("start", [launch.spawn, launch.ray])
def test_arguments_that_are_no_tuple_are_refused(start):
    with pytest.raises(TypeError, match=r"args is 5: give a tuple of .*, such as \(5,\)"):
        start(call_around, 2, 5)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"launch.ray needs Ray: pip install ray"):
        launch.ray(call_around, 2)
    with pytest.raises(ValueError, match="nprocs is 0"):
        launch.ray(call_around, 0)


def test_a_bad_grace_period_is_refused():
    with pytest.raises(ValueError, match="grace_period is -1"):
        launch.spawn(call_around, 2, grace_period=-1)
