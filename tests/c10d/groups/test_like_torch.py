"""Details of torch's groups and stores that programs rely on."""

import copy
import os
import pickle
import socket
from dataclasses import FrozenInstanceError
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import c10d
from gradwire.c10d import FileStore, HashStore, PrefixStore, TCPStore, rendezvous
from gradwire.errors import (
    CollectiveTimeoutError,
    RankLostError,
    RendezvousNetworkError,
    StoreNetworkError,
    StoreTimeoutError,
)
from torch._C._distributed_c10d import OpType
from torch.distributed.device_mesh import init_device_mesh

from tests.c10d.members import everywhere

# Groups


def check_group() -> None:
    world: Any = dist.group.WORLD
    world._set_sequence_number_for_group()
    before = world._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    assert world._get_sequence_number_for_group() == before + 2
    assert not world._has_hooks()
    assert not world.use_pg_for_symm_mem_rendezvous
    work = dist.all_reduce(torch.ones(1), async_op=True)
    world._wait_for_pending_works()
    assert work.is_completed()


def check_works() -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work._get_op_type() == int(OpType.ALLREDUCE)
    work.wait()
    for ask in (work._source_rank, work.source_rank):
        with pytest.raises(RuntimeError, match="receives only: all_reduce does not receive from one rank"):
            ask()
    rank, tensor = dist.get_rank(), torch.zeros(1)
    sent = dist.isend(torch.ones(1), 1 - rank)
    received = dist.irecv(tensor, 1 - rank)
    assert received._source_rank() == 1 - rank
    assert (sent._get_op_type(), received._get_op_type()) == (int(OpType.SEND), int(OpType.RECV))
    sent.wait()


@pytest.mark.parametrize("backend", ["gradwire_shm", "gradwire_gloo"])
def test_groups_and_works_have_torchs_methods(group_on, backend):
    members = group_on(backend, 2)
    everywhere(members, check_group)
    everywhere(members, check_works)


def barrier_alone() -> str | None:
    if dist.get_rank():
        return None
    with pytest.raises(CollectiveTimeoutError) as raised:
        dist.group.WORLD.barrier(timeout=timedelta(seconds=0.2)).wait()
    return str(raised.value)


@pytest.mark.parametrize("backend", ["gradwire_shm", "gradwire_gloo"])
def test_timeout_errors_have_torchs_phrases(group_on, backend):
    text = everywhere(group_on(backend, 2), barrier_alone)[0]
    assert "timed out" in text
    assert " timeout " in text


def test_loss_errors_have_torchs_phrases():
    assert "Connection closed by peer" in str(RankLostError(1, "it left the group"))


def meshes() -> list[timedelta]:
    dist.init_process_group("gradwire_shm", store=dist.HashStore(), rank=0, world_size=1)
    named = init_device_mesh("cpu", (1,), backend_override={0: ("gradwire_shm", c10d.GroupOptions(timeout=9))})
    alone = init_device_mesh("cpu", (1,), backend_override={0: c10d.GroupOptions(timeout=timedelta(seconds=10))})
    new = dist.new_group(pg_options=c10d.GroupOptions(timeout=11))
    said = dist.new_group(pg_options=c10d.GroupOptions(timeout=11), timeout=timedelta(seconds=12))
    found = [named.get_group(0).timeout, alone.get_group(0).timeout, new.timeout, said.timeout]
    dist.destroy_process_group()
    return found


def test_device_meshes_accept_group_options_and_their_timeout(workers):
    assert workers(1)[0].run(meshes) == [timedelta(seconds=s) for s in (9, 10, 11, 12)]


def test_options_are_immutable_except_for_torchs_timeout():
    options = c10d.GroupOptions(flight_recorder_size=5)
    assert options._timeout == timedelta(minutes=30)
    options._timeout = timedelta(seconds=8)
    for twin in (copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert (twin, twin._timeout) == (options, timedelta(seconds=8))
    with pytest.raises(FrozenInstanceError, match="flight_recorder_size of GroupOptions cannot be changed"):
        options.flight_recorder_size = 6
    with pytest.raises(ValueError, match="timeout is -1"):
        c10d.GroupOptions(timeout=-1)


# Stores


def test_tcp_store_accepts_the_arguments_of_torchs(free_port):
    limit = timedelta(seconds=5)
    given: tuple[Any, ...] = ("127.0.0.1", free_port, 1, True, limit, True, False, None, True)
    with TCPStore(*given) as store:
        assert not store.libuvBackend
        names = {"multi_tenant": False, "master_listen_fd": None, "use_libuv": False}
        with TCPStore(host_name="127.0.0.1", port=free_port, is_master=False, **names) as other:
            other.set("key", "value")
        assert store.get("key") == b"value"


def test_multi_tenant_masters_of_one_process_share_a_port(free_port):
    with TCPStore("127.0.0.1", free_port, is_master=True, multi_tenant=True) as first:
        with TCPStore("127.0.0.1", free_port, is_master=True, multi_tenant=True) as second:
            second.set("key", "value")
        assert first.get("key") == b"value"  # closing the second has not stopped the server
        with pytest.raises(StoreNetworkError, match="already in use"):
            TCPStore("127.0.0.1", free_port, is_master=True)
    with TCPStore("127.0.0.1", free_port, is_master=True, multi_tenant=True) as third:
        assert not third.check(["key"])


def test_a_master_listens_on_the_port_of_a_given_socket():
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    with TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=listening.detach()) as store:
        assert store.port == port
        with TCPStore("127.0.0.1", port) as other:
            other.set("key", "value")


def test_a_descriptor_that_is_no_socket_on_the_port_is_refused():
    reading, writing = os.pipe()
    with pytest.raises(ValueError, match="give the descriptor of a TCP socket"):
        TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=reading)
    os.close(writing)
    listening = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(ValueError, match=r"but the port is 1: give port=\d+ or 0"):
        TCPStore("127.0.0.1", 1, is_master=True, master_listen_fd=listening.detach())


def test_an_address_in_use_is_torchs_network_error(free_port):
    with TCPStore("127.0.0.1", free_port, is_master=True):
        with pytest.raises(dist.DistNetworkError, match=r"Address already in use \(EADDRINUSE\)"):
            TCPStore("127.0.0.1", free_port, is_master=True)
        with pytest.raises(RendezvousNetworkError, match="Address already in use") as raised:
            rendezvous(f"tcp://127.0.0.1:{free_port}", rank=0, world_size=1)
        assert isinstance(raised.value, dist.DistNetworkError)
    with pytest.raises(dist.DistNetworkError, match=r"connect\(\) timed out\."):
        TCPStore("127.0.0.1", free_port, timeout=0.05)


def test_a_closed_server_is_torchs_network_error(free_port):
    master = TCPStore("127.0.0.1", free_port, is_master=True)
    with TCPStore("127.0.0.1", free_port) as store:
        master.close()
        with pytest.raises(dist.DistNetworkError, match="Connection closed by peer"):
            store.set("key", "value")


def test_errors_of_torchs_classes_can_be_pickled():
    error = pickle.loads(pickle.dumps(StoreNetworkError("gone")))
    assert isinstance(error, dist.DistNetworkError)
    assert isinstance(error, dist.DistStoreError)


def test_store_timeouts_have_torchs_phrases():
    with HashStore(timeout=0.01) as store:
        with pytest.raises(dist.DistStoreError, match="Wait timeout: timed out after 0.01 s"):
            store.get("key")
        with pytest.raises(dist.QueueEmptyError, match="queue is empty"):
            store.queue_pop("queue", block=False)


class MinimalStore(dist.Store):
    """A Python store with the methods that torch's own classes need."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]


class StoreWithCheck(MinimalStore):
    """A Python store that also has `check`."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.mark.parametrize("kind", [MinimalStore, StoreWithCheck])
def test_a_prefix_of_a_store_without_wait(kind):
    store = kind()
    with PrefixStore("inner", store) as inner, PrefixStore("outer", inner) as prefix:
        prefix.set("key", "value")
        assert store.values == {"inner/outer/key": b"value"}
        assert prefix.get("key") == b"value"
        prefix.wait(["key"], 1)
        assert prefix.check(["key"])
        assert not prefix.check(["key", "other"])
        with pytest.raises(StoreTimeoutError, match="waiting for 'other'"):
            prefix.wait(["key", "other"], 0.02)
        assert prefix._underlying_non_prefix_store is store
        assert prefix.underlying_store is inner


def test_a_prefix_of_torchs_prefix_finds_the_innermost_store(tmp_path):
    with FileStore(str(tmp_path / "store")) as store:
        outer = PrefixStore("b", dist.PrefixStore("a", store))
        assert outer._underlying_non_prefix_store is store
        outer.close()


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_the_launchers_store_is_used_for_any_spelling_of_true(value, monkeypatch):
    launcher = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, text in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(launcher.port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": value,
    }.items():
        monkeypatch.setenv(name, text)
    met = rendezvous("env://")
    met.store.set("key", "value")
    assert any(key.endswith("/key") for key in launcher.list_keys())
    met.close()
