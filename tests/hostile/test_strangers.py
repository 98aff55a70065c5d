"""Another user of the host against jobs that have no credentials: he reads nothing, writes nothing, runs nothing.

Nor does he keep anybody from starting. The victims run as root, and as an ordinary user.
"""

import ctypes
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import c10d, rpc
from gradwire.c10d import FileStore, TCPStore
from gradwire.c10d.stores import durable as command
from gradwire.errors import StoreError, StoreNetworkError

from tests.c10d.members import total
from tests.hostile.attacks import NOBODY, become
from tests.hostile.listeners import find_listeners
from tests.ports import free_port as choose_port
from tests.remote_functions import add, event, wait_until
from tests.workers import Worker

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")

ROOT, SOMEBODY = 0, 65533

PR_SET_DUMPABLE = 4
"""Of prctl(2): whether other processes of the user may look at this one."""


def listens_first(port: int) -> None:
    """Takes a port before its owner does, with a store of this user at it."""
    taken = socket.create_server(("127.0.0.1", port))
    store = TCPStore("127.0.0.1", port + 1, is_master=True)
    store.set("key", "forged")
    kept.extend((taken, store))


kept: list[object] = []


def try_to_connect(addresses: Sequence[tuple[str, int] | str]) -> list[str]:
    """Connects to each address; returns the names of the errors, and the addresses that let this user in."""
    outcomes = []
    for address in addresses:
        with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as connection:
            try:
                connection.connect(address)
            except OSError as error:
                outcomes.append(type(error).__name__)
            else:
                outcomes.append(f"connected to {address!r}")
    return outcomes


def use_store_of_another(port: int) -> str:
    """Returns the error of a client that tries to use the store of another user."""
    with pytest.raises(StoreNetworkError) as caught, TCPStore("127.0.0.1", port, timeout=0.1):
        pass
    return str(caught.value)


def open_store(port: int, *, is_master: bool) -> None:
    kept.append(TCPStore("127.0.0.1", port, is_master=is_master, timeout=60))


def call(method: str, *arguments: str) -> object:
    return getattr(kept[-1], method)(*arguments)


def as_users(worker: Callable[..., Sequence[Worker]], users: Sequence[int], kind: str = "") -> Sequence[Worker]:
    """Starts workers of these users. Those may not read the interpreter's files, so all is loaded before."""
    started = worker(len(users))
    pending = [
        each.start(change_user, user, kind) for each, user in zip(started, users, strict=True) if user != ROOT
    ]
    for each in pending:
        each.result()
    return started


def change_user(user: int, kind: str) -> None:
    with TCPStore("localhost", 0, is_master=True) as master, TCPStore("127.0.0.1", master.port):
        use_store_of_another(1)
    if kind:
        join(kind, f"tcp://127.0.0.1:{choose_port()}", 0, 1)
        use(kind, 0, 1)
        leave(kind)
    become(user)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)  # as a process that this user has started


@pytest.mark.parametrize("victim", [ROOT, SOMEBODY])
def test_the_store_of_rank_0(workers, free_port, victim):
    host, client, stranger = as_users(workers, [victim, victim, NOBODY])
    host.run(open_store, free_port, is_master=True)
    assert "no store of this user" in stranger.run(use_store_of_another, free_port)
    client.run(open_store, free_port, is_master=False)
    client.run(call, "set", "key", "value")
    listeners = [each.address for each in find_listeners(host.pid)]
    assert [each for each in listeners if not isinstance(each, str)] == []
    assert set(stranger.run(try_to_connect, listeners)) == {"PermissionError"}
    assert host.run(call, "get", "key") == b"value"


@pytest.mark.parametrize("victim", [ROOT, SOMEBODY])
def test_a_port_that_another_user_has_taken_keeps_nobody_from_starting(workers, free_port, victim):
    host, client, stranger = as_users(workers, [victim, victim, NOBODY])
    stranger.run(listens_first, free_port)
    waiting = client.start(open_store, free_port, is_master=False)
    host.run(open_store, free_port, is_master=True)
    waiting.result()
    host.run(call, "set", "key", "value")
    assert client.run(call, "get", "key") == b"value"
    host.run(call, "close")
    assert f"user {NOBODY} listens" in client.run(use_store_of_another, free_port)


def store_file(path: str) -> str:
    """Returns the error with which this user cannot use a file as a store."""
    try:
        kept.append(FileStore(path))
    except StoreError as error:
        return str(error)
    return "he is let in"


@pytest.mark.parametrize("victim", [ROOT, SOMEBODY])
def test_a_store_in_a_file(workers, tmp_path, victim):
    """In a folder that everybody may write to."""
    shared = Path(tempfile.mkdtemp(dir="/tmp"))
    shared.chmod(0o777)
    try:
        owner, stranger = as_users(workers, [victim, NOBODY])
        path, taken = str(shared / "store"), str(shared / "taken")
        assert owner.run(store_file, path) == "he is let in"
        owner.run(call, "set", "key", "value")
        assert "Permission denied" in stranger.run(store_file, path)
        stranger.run(store_file, taken)
        stranger.run(os.chmod, taken, 0o666)
        assert f"belongs to user {NOBODY}" in owner.run(store_file, taken)
        assert owner.run(call, "get", "key") == b"value"
    finally:
        shutil.rmtree(shared)


def serve_store(port: int, path: str) -> None:
    """Runs a store process until the event "end"."""
    command.serve(path, "127.0.0.1", port, event("end"))


def use_client(port: int) -> bytes:
    store = TCPStore("127.0.0.1", port, timeout=60)
    kept.append(store)
    store.set("key", "value")
    return store.get("key")


@pytest.mark.parametrize("victim", [ROOT, SOMEBODY])
def test_a_store_process(workers, free_port, victim):
    server, client, stranger = as_users(workers, [victim, victim, NOBODY])
    path = server.run(tempfile.mkdtemp) + "/log"
    server.start(serve_store, free_port, path)
    assert client.run(use_client, free_port) == b"value"
    assert "no store of this user" in stranger.run(use_store_of_another, free_port)
    listeners = [each.address for each in find_listeners(server.pid)]
    assert [each for each in listeners if not isinstance(each, str)] == []
    assert set(stranger.run(try_to_connect, listeners)) == {"PermissionError"}
    assert "Permission denied" in stranger.run(store_file, path)
    assert client.run(call, "get", "key") == b"value"
    shutil.rmtree(Path(path).parent)


# Jobs.

KINDS = ["static RPC", "dynamic RPC", "shm", "gloo"] + ["mpi"] * (find_spec("mpi4py") is not None)


def join(kind: str, url: str, rank: int, size: int, timeout: float = 60) -> None:
    torch.set_num_threads(1)
    if "RPC" in kind:
        is_static = kind == "static RPC"
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=size if is_static else None,
            rpc_backend_options=rpc.RpcBackendOptions(init_method=url, init_timeout=timeout),
        )
    else:
        c10d.init_process_group(kind, url, timeout, size, rank)


def use(kind: str, rank: int, size: int) -> None:
    if "RPC" in kind:
        assert rpc.rpc_sync(f"worker{(rank + 1) % size}", add, (1, 2)) == 3
    else:
        assert total() == size * (size - 1) / 2
        found: list[Any] = [None] * size
        dist.all_gather_object(found, rank)
        assert found == list(range(size))


def leave(kind: str) -> None:
    if "RPC" in kind:
        rpc.shutdown()
    else:
        c10d.destroy_process_group()


def pose(kind: str, url: str, rank: int) -> str:
    """Returns the error with which another user fails to become a worker or a rank."""
    try:
        join(kind, url, rank, 2, 0.3)
    except RuntimeError as error:
        return str(error)
    return "he is let in"


@pytest.mark.parametrize("victim", [ROOT, SOMEBODY])
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_becomes_a_worker_or_a_rank_of_the_job_of_another_user(workers, free_port, kind, victim):
    if kind == "mpi" and victim != ROOT:
        pytest.skip("MPI loads files when it begins, and a process can only begin once")
    a, b = as_users(workers, [victim, victim], kind)
    (stranger,) = as_users(workers, [NOBODY])
    url = f"tcp://127.0.0.1:{free_port}"
    starting = a.start(join, kind, url, 0, 2)
    if kind == "dynamic RPC":
        wait_until(starting.done)
    assert "no store of this user" in stranger.run(pose, kind, url, 1)
    b.run(join, kind, url, 1, 2)
    starting.result()
    assert "no store of this user" in stranger.run(pose, kind, url, 1)
    addresses = [each.address for worker in (a, b) for each in find_listeners(worker.pid)]
    unix = [each for each in addresses if isinstance(each, str) and not each.startswith("\0")]
    assert set(stranger.run(try_to_connect, unix)) == {"PermissionError"}
    for pending in [each.start(use, kind, rank, 2) for rank, each in enumerate((a, b))]:
        pending.result()
    for pending in [each.start(leave, kind) for each in (a, b)]:
        pending.result()


class Canary:
    """Makes a directory where it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


def join_torchs(variables: Mapping[str, str], canary: str = "") -> None:
    """Joins a group by the store of torchrun, and gathers objects."""
    os.environ.update(variables)
    c10d.init_process_group("gloo", timeout=20)
    dist.all_gather_object([None, None], Canary(canary) if canary else "value")


def test_the_store_of_torchrun_gets_nobodys_code_run_and_shows_nothing(workers, tmp_path):
    launcher: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(launcher.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    canary = tmp_path / "canary"
    victim, again, other = as_users(workers, [ROOT, ROOT, ROOT])
    (stranger,) = as_users(workers, [NOBODY], "gloo")
    stranger.start(join_torchs, {**variables, "RANK": "1"}, str(canary))
    wait_until(launcher.list_keys)
    with pytest.raises(RuntimeError, match="not sealed with the secret of user 0: another user"):
        victim.start(join_torchs, {**variables, "RANK": "0"}).result()
    assert not canary.exists()
    variables["TORCHELASTIC_RESTART_COUNT"] = "1"
    pending = [
        each.start(join_torchs, {**variables, "RANK": str(rank)}) for rank, each in enumerate((again, other))
    ]
    for each in pending:
        each.result()
    values = [launcher.get(key) for key in launcher.list_keys() if key.startswith("gradwire/attempt/1/")]
    assert len(values) > 10
    assert [each for each in values if each and not each.isdigit() and not each.startswith(b"\0gw1")] == []
