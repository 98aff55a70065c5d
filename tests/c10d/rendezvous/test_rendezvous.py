"""Rendezvous by URL, environment and store."""

import pytest
import torch.distributed
from gradwire.c10d import Credentials, FileStore, HashStore, PrefixStore, Rendezvous, TCPStore, rendezvous
from gradwire.c10d.rendezvous.url import SpawnStore
from gradwire.c10d.stores.views import innermost_store
from gradwire.errors import RendezvousError, StoreError

from tests import ports
from tests.certificates import OTHER_TOKEN, TOKEN

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def join(*args, environment=None, **kwargs) -> tuple[int, int, list[bytes]]:
    """Runs on a worker: finds the group, writes a value to its store and reads the values of all ranks."""
    import os

    os.environ.update(environment or {})
    found = rendezvous(*args, timeout=60, **kwargs)
    found.store.set(f"value of {found.rank}", str(found.rank))
    words = found.store.multi_get([f"value of {rank}" for rank in range(found.world_size)])
    found.store.set(f"rank {found.rank} is done", "")
    if found.rank == 0:  # the host of the store must close it last
        found.store.wait([f"rank {rank} is done" for rank in range(found.world_size)])
    found.close()
    return found.rank, found.world_size, words


ALL_MET = [(0, 2, [b"0", b"1"]), (1, 2, [b"0", b"1"])]


@pytest.mark.parametrize("form", ["query", "arguments", "both"])
def test_tcp(form, free_port, workers):
    started = workers(2)
    query = [f"?rank={rank}&world_size=2" if form != "arguments" else "" for rank in range(2)]
    arguments = [{"rank": rank, "world_size": 2} if form != "query" else {} for rank in range(2)]
    pending = [
        worker.start(join, f"tcp://127.0.0.1:{free_port}{query[rank]}", **arguments[rank])
        for rank, worker in enumerate(started)
    ]
    assert [p.result() for p in pending] == ALL_MET


def test_file(tmp_path, workers):
    path = tmp_path / "a file"
    url = f"file://{tmp_path}/a%20file?world_size=2"
    pending = [worker.start(join, url, rank=rank) for rank, worker in enumerate(workers(2))]
    assert [p.result() for p in pending] == ALL_MET
    assert not path.exists()


@pytest.mark.parametrize("url", [(), ("env://",), (None,), ("env://?world_size=2",)])
def test_env(url, free_port, workers):
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
    pending = [
        worker.start(join, *url, environment=environment | {"RANK": str(rank)})
        for rank, worker in enumerate(workers(2))
    ]
    assert [p.result() for p in pending] == ALL_MET


def test_arguments_take_precedence_over_the_environment(free_port, monkeypatch):
    for name, value in zip(VARIABLES, ("7", "9", "127.0.0.1", str(free_port)), strict=False):
        monkeypatch.setenv(name, value)
    found = rendezvous(rank=0, world_size=1)
    assert (found.rank, found.world_size) == (0, 1)
    found.close()


def test_a_store():
    with HashStore() as store:
        first, second = (rendezvous(store=store, rank=rank, world_size=2) for rank in range(2))
        assert first.store is second.store is store
        assert first == Rendezvous(store, 0, 2)
        first.close()
        store.set("still", "open")


def test_a_store_of_torch():
    store = torch.distributed.HashStore()
    assert rendezvous(store=store, rank=0, world_size=1).store is store


def test_one_store_serves_several_rendezvous():
    with HashStore() as store:
        for _ in range(2):
            rendezvous(store=store, rank=0, world_size=1).close()


def test_closing_releases_what_was_opened(tmp_path, free_port):
    found = rendezvous(f"file://{tmp_path}/store", rank=0, world_size=1)
    found.close()
    found.close()
    with pytest.raises(StoreError, match="closed"):
        found.store.set("k", "v")
    for _ in range(2):
        rendezvous(f"tcp://127.0.0.1:{free_port}", rank=0, world_size=1).close()


@pytest.mark.parametrize("attempts", [("0", "0"), ("0", "1")])
def test_torchrun(attempts, workers):
    """Every attempt sees only its own keys in the launcher's store, which outlives the attempts."""
    launcher = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": "1",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(launcher.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }

    def count(attempt: str) -> int:
        import os

        os.environ.update(environment | {"TORCHELASTIC_RESTART_COUNT": attempt})
        found = rendezvous()
        assert isinstance(found.store, PrefixStore)
        assert isinstance(innermost_store(found.store), torch.distributed.TCPStore)
        counted = found.store.add("count", 1)
        found.store.delete_key("gradwire/rendezvous/rank/0")  # the second attempt is another process
        found.close()
        return counted

    counts = [worker.run(count, attempt) for worker, attempt in zip(workers(2), attempts, strict=True)]
    assert counts == ([1, 2] if attempts[0] == attempts[1] else [1, 1])


def test_two_under_torchrun(workers):
    launcher = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(launcher.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    pending = [
        worker.start(join, environment=environment | {"RANK": str(rank)}) for rank, worker in enumerate(workers(2))
    ]
    assert [p.result() for p in pending] == ALL_MET


def test_torchruns_store_does_not_answer(free_port, monkeypatch):
    for name, value in zip(VARIABLES, ("0", "1", "127.0.0.1", str(free_port), "True"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError, match=f"torchrun's store does not answer on 127.0.0.1:{free_port}"):
        rendezvous(timeout=0.1)


def test_the_store_of_spawned_processes_is_used_where_they_are_told_of_it(free_port, monkeypatch):
    credentials = Credentials(token=TOKEN)
    with TCPStore("127.0.0.1", 0, is_master=True, credentials=credentials) as hosted:
        spawned = SpawnStore(hosted.port, free_port, TOKEN)
        assert TOKEN not in repr(spawned)
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", **spawned.to_environment()}.items():
            monkeypatch.setenv(name, value)
        for given in (None, Credentials(token=OTHER_TOKEN)):  # which is for the group, and not for this store
            found = rendezvous(timeout=20, credentials=given)
            assert innermost_store(found.store).port == hosted.port
            found.close()
        with monkeypatch.context() as elsewhere:  # as a launcher does that one of the processes runs
            port = ports.free_port()
            elsewhere.setenv("MASTER_PORT", str(port))
            found = rendezvous(timeout=20)
            assert innermost_store(found.store).port == port
            found.close()
        monkeypatch.setenv("GRADWIRE_SPAWN_STORE", f"{TOKEN} {free_port}")
        with pytest.raises(RendezvousError, match="^GRADWIRE_SPAWN_STORE in the environment is not what") as error:
            rendezvous(timeout=20)
        assert TOKEN not in str(error.value)


def test_two_workers_of_one_rank_are_an_error(tmp_path, workers):
    a, b = workers(2)
    url = f"file://{tmp_path}/store"
    a.run(rendezvous_and_stay, url, 1, 2)
    with pytest.raises(
        RendezvousError, match=rf"two workers have rank 1: process {a.pid} on .* and process {b.pid}"
    ):
        b.run(rendezvous_and_stay, url, 1, 2)


def test_different_world_sizes_are_an_error(tmp_path, workers):
    a, b = workers(2)
    url = f"file://{tmp_path}/store"
    a.run(rendezvous_and_stay, url, 0, 2)
    with pytest.raises(
        RendezvousError, match=r"rank 0 \(.*\) was started with world_size=2 and rank 1 \(.*\) with world_size=3"
    ):
        b.run(rendezvous_and_stay, url, 1, 3)


def rendezvous_and_stay(url: str, rank: int, world_size: int) -> None:
    rendezvous(url, rank=rank, world_size=world_size)


def test_two_hosts_of_the_store_are_an_error(free_port):
    with TCPStore("127.0.0.1", free_port, is_master=True), pytest.raises(RendezvousError) as caught:
        rendezvous(f"tcp://127.0.0.1:{free_port}", rank=0, world_size=2)
    assert f"cannot listen on 127.0.0.1:{free_port}: Address already in use" in str(caught.value)


def test_the_error_for_a_port_that_torch_uses_has_a_hint(free_port, workers):
    (worker,) = workers(1)
    url = f"tcp://127.0.0.1:{free_port}"

    def both() -> None:
        torch.distributed.init_process_group("gloo", init_method=url, rank=0, world_size=1)
        rendezvous(url, rank=0, world_size=1)

    with pytest.raises(
        RendezvousError, match=r"already in use \(EADDRINUSE\)\. torch\.distributed is initialized"
    ):
        worker.run(both)


def test_a_worker_that_cannot_reach_rank_0(free_port):
    with pytest.raises(RendezvousError, match=rf"rank 1 cannot join its group at tcp://.*:{free_port}: no store"):
        rendezvous(f"tcp://127.0.0.1:{free_port}", rank=1, world_size=2, timeout=0.05)


def test_public_addresses_need_insecure(monkeypatch):
    with pytest.raises(RendezvousError, match="'192.0.2.7' is refused.*insecure=True"):
        rendezvous("tcp://192.0.2.7:29500", rank=1, world_size=2)
    for name, value in zip(VARIABLES, ("1", "2", "192.0.2.7", "29500", "True"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError, match="'192.0.2.7' is refused.*insecure=True"):
        rendezvous()
    with pytest.raises(RendezvousError, match="no store answered on 192.0.2.7:29500"):
        rendezvous("tcp://192.0.2.7:29500", rank=1, world_size=2, insecure=True, timeout=0.01)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "no scheme of env, tcp, file"),
        ("tcp", "no scheme"),
        ("http://host:1", "no scheme"),
        ("mpi://", "no scheme"),
        ("tcp://[::1", "Invalid IPv6"),
        ("tcp://host", "it has no port"),
        ("tcp://[::1]", "it has no port"),
        ("tcp://host:", "it has no port"),
        ("tcp://:29500", "it has no host"),
        ("tcp://host:0", "has the port '0'.*from 1 to 65535"),
        ("tcp://host:65536", "has the port '65536'"),
        ("tcp://host:-1", "has the port '-1'"),
        ("tcp://host:http", "has the port 'http'"),
        ("tcp://host:29500/path", "more than a host and a port"),
        ("tcp://user@host:29500", "more than a host and a port"),
        ("tcp://host:29500#1", "#fragment"),
        ("tcp://host:29500?rank=0&rank=0", "rank is given twice"),
        ("tcp://host:29500?rank=0&size=2", "'size' is not known"),
        ("tcp://host:29500?rank=zero", "rank=zero is not a number"),
        ("tcp://host:29500?world_size=-1", "world_size=-1 is not a number"),
        ("tcp://host:29500?rank", "bad query field"),
        ("file://relative/path", "not absolute"),
        ("file:relative", "no file by an absolute path"),
        ("file:///", "no file by an absolute path"),
        ("file:///folder/", "no file by an absolute path"),
        ("env://host:29500", "nothing but a query"),
        ("env:///path", "nothing but a query"),
    ],
)
def test_the_error_for_a_malformed_url_shows_the_valid_form(url, problem):
    with pytest.raises(RendezvousError, match=problem) as caught:
        rendezvous(url, rank=0, world_size=1)
    assert repr(url) in str(caught.value)
    scheme = url.partition(":")[0]
    assert f"{scheme if scheme in ('env', 'tcp', 'file') else 'tcp'}://" in str(caught.value).replace(url, "", 1)


@pytest.mark.parametrize(
    ("url", "arguments", "problem"),
    [
        ("tcp://localhost:29500", {}, "does not say rank and world_size: pass rank= and world_size=, or use tcp"),
        ("tcp://localhost:29500?rank=0", {}, "does not say world_size: pass world_size="),
        ("file:///tmp/store", {"world_size": 2}, "does not say rank"),
        ("tcp://localhost:29500?rank=1&world_size=2", {"rank": 0}, "says rank=1 and the argument says rank=0"),
        ("tcp://localhost:29500?rank=1&world_size=2", {"world_size": 3}, "world_size=2 and the argument"),
        ("tcp://localhost:29500", {"rank": 2, "world_size": 2}, "rank 2 does not fit into world_size 2"),
        ("tcp://localhost:29500", {"rank": 0, "world_size": 0}, "rank 0 does not fit into world_size 0"),
        ("tcp://localhost:29500", {"rank": -2, "world_size": 2}, "rank is -2: give an int of 0 or more"),
        ("tcp://localhost:29500", {"rank": "0", "world_size": 2}, "rank is '0'"),
        ("tcp://localhost:29500", {"rank": 0, "world_size": True}, "world_size is True"),
    ],
)
def test_rank_and_world_size_must_be_given(url, arguments, problem):
    with pytest.raises(RendezvousError, match=problem):
        rendezvous(url, **arguments)


def test_store_and_url_exclude_each_other():
    with HashStore() as store:
        with pytest.raises(RendezvousError, match="both url='env://' and a store"):
            rendezvous("env://", store=store, rank=0, world_size=1)
        with pytest.raises(RendezvousError, match="the store does not say rank and world_size: pass rank="):
            rendezvous(store=store)
    with pytest.raises(TypeError, match=r"give a torch\.distributed\.Store"):
        rendezvous(store="tcp://host:1", rank=0, world_size=1)


def test_a_closed_store_is_an_error():
    store = HashStore()
    store.close()
    with pytest.raises(
        RendezvousError, match=r"rank 0 \(process .*\) cannot use the store: this HashStore is closed"
    ):
        rendezvous(store=store, rank=0, world_size=1)


def test_missing_variables_are_all_named(monkeypatch):
    with pytest.raises(RendezvousError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, which are not set"):
        rendezvous()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(
        RendezvousError, match="variables MASTER_PORT, which are not set: set them .*, start .*torchrun"
    ):
        rendezvous(world_size=1)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("RANK", "first", "RANK=first: set it to a number"),
        ("RANK", "-1", "RANK=-1"),
        ("WORLD_SIZE", "1.5", "WORLD_SIZE=1.5"),
        ("MASTER_PORT", "none", "'MASTER_PORT=none' has the port 'none'"),
        ("MASTER_PORT", "0", "has the port '0'"),
        ("MASTER_ADDR", "no-such-host.invalid", "cannot be resolved"),
    ],
)
def test_wrong_variables_are_named(name, value, problem, monkeypatch):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", name: value}
    for variable, text in environment.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(RendezvousError, match=problem):
        rendezvous()


def test_an_unusable_file(tmp_path):
    (tmp_path / "diary").write_text("dear diary")
    with pytest.raises(RendezvousError, match="rank 0 cannot join .* is not a gradwire store"):
        rendezvous(f"file://{tmp_path}/diary", rank=0, world_size=1)


def test_a_store_left_by_a_crashed_run_is_an_error(tmp_path, workers):
    (a,) = workers(1)
    a.run(rendezvous_and_stay, f"file://{tmp_path}/store", 0, 1)
    a.kill()
    with pytest.raises(RendezvousError, match="left over from it: use a new one"):
        rendezvous(f"file://{tmp_path}/store", rank=0, world_size=1)
    with FileStore(str(tmp_path / "store")) as store:
        assert store.check(["gradwire/rendezvous/round"])
