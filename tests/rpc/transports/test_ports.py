"""With a range of ports set, all that a job listens on lies in it; others dial the advertised address."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire import c10d, rpc
from gradwire.c10d import TCPStore
from gradwire.errors import RpcError, StoreNetworkError
from gradwire.launch.hosting import hosted_spawn_store
from gradwire.net.addresses import ListenSettings, PortRange, parse_ports
from gradwire.rpc.contracts.agent import current_agent
from hypothesis import given
from hypothesis import strategies as st

from tests.certificates import TOKEN
from tests.remote_functions import add

FIRST, LAST = 29600, 29619
STORE_PORT = LAST
LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def join(rank: int, size: int, master: str, variables: dict[str, str], **options: Any) -> None:
    settings = {"MASTER_ADDR": master, "MASTER_PORT": str(STORE_PORT), "GRADWIRE_TOKEN": TOKEN}
    os.environ.update({**settings, **variables})
    made = rpc.RpcBackendOptions(**{"init_timeout": 40, **options})
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=made)


def call_all(size: int) -> None:
    """Calls each worker, with payloads that go by the bulk connections."""
    for rank in range(size):
        assert rpc.rpc_sync(f"worker{rank}", add, (1, 2)) == 3
        assert rpc.rpc_sync(f"worker{rank}", torch.sum, (torch.ones(2**20),)) == 2**20


def sum_in_a_group(rank: int, path: str) -> None:
    c10d.init_process_group("shm", init_method=f"file://{path}", rank=rank, world_size=2)
    ranks = torch.tensor([rank])
    c10d.all_reduce(ranks)
    assert ranks.item() == 1


def listening_ports() -> list[int]:
    """Returns the port of each TCP socket that listens in the network of this process."""
    text = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = [line.split() for line in text.splitlines()]
    return sorted(int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == LISTEN)


def own_address() -> str:
    agent: Any = current_agent()
    return str(next(m.address for m in [peer.member for peer in agent.peers.all()] if m.info == agent.info))


def test_every_listening_socket_of_a_job_lies_in_the_range(hosts, tmp_path):
    net = hosts(2, 1)
    variables = {"GRADWIRE_PORTS": f"{FIRST}-{LAST}", "GRADWIRE_VIEW": "0"}
    joining = [w.start(join, rank, 3, net.address(0), variables) for rank, w in enumerate(net.workers)]
    for each in joining:
        each.result()
    grouping = [w.start(sum_in_a_group, rank, str(tmp_path / "group")) for rank, w in enumerate(net.workers[:2])]
    for each in grouping:
        each.result()
    for worker in net.workers:
        worker.run(call_all, 3)
    found = [net.workers[0].run(listening_ports), net.workers[2].run(listening_ports)]
    assert len(found[0]) == 8, found  # store, failure detector, and each worker's agent, sockets and view
    assert len(found[1]) == 3, found
    assert all(FIRST <= port <= LAST for ports in found for port in ports), found


def test_one_port_is_enough_for_grpc(hosts):
    net = hosts(1, 1)
    options: dict[str, Any] = {"ports": FIRST, "transports": ("grpc",)}
    joining = [w.start(join, rank, 2, net.address(0), {}, **options) for rank, w in enumerate(net.workers)]
    for each in joining:
        each.result()
    for worker in net.workers:
        worker.run(call_all, 2)
    assert net.workers[0].run(listening_ports) == [FIRST, STORE_PORT]
    assert net.workers[1].run(listening_ports) == [FIRST]


def test_others_dial_the_advertised_address(hosts):
    net = hosts(1, 1)
    net.ip(0, "addr add 10.91.0.101/24 dev eth0")
    variables = {"GRADWIRE_HOST": "0.0.0.0", "GRADWIRE_ADVERTISED_HOST": "10.91.0.101"}
    joining = [net.workers[0].start(join, 0, 2, net.address(0), variables, ports=f"{FIRST}-{LAST}")]
    joining.append(net.workers[1].start(join, 1, 2, net.address(0), {}))
    for each in joining:
        each.result()
    net.workers[1].run(call_all, 2)
    assert net.workers[0].run(own_address) == f"10.91.0.101:{FIRST}"


def test_a_range_without_a_free_port_is_an_error(workers, free_port, monkeypatch):
    monkeypatch.setenv("GRADWIRE_PORTS", str(free_port))
    with socket.create_server(("127.0.0.1", free_port)):
        with pytest.raises(StoreNetworkError, match=f"no port of {free_port} is free at 127.0.0.1:{free_port}"):
            TCPStore("127.0.0.1", 0, is_master=True)
        (worker,) = workers(1)
        with pytest.raises(RpcError, match=f"'worker0' cannot listen: no port of {free_port} is free"):
            worker.run(join_alone, free_port)


def join_alone(port: int) -> None:
    with c10d.HashStore() as store:
        options = rpc.RpcBackendOptions(ports=port, host="127.0.0.1", insecure=True)
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options, store=store)


def test_the_store_of_spawned_processes_lies_in_the_range(free_port, monkeypatch):
    monkeypatch.setenv("GRADWIRE_PORTS", f"{free_port}-{free_port + 9}")
    with hosted_spawn_store() as store:
        assert free_port <= store.port < store.master_port <= free_port + 9


@pytest.mark.parametrize(
    ("value", "ports"),
    [(1, (1, 1)), ("29600", (29600, 29600)), ("29600-29609", (29600, 29609)), (PortRange(5, 6), (5, 6))],
)
def test_ports_are_a_number_or_a_range(value, ports):
    assert parse_ports(value, "ports") == PortRange(*ports)
    assert rpc.RpcBackendOptions(ports=value).find_listening().ports == PortRange(*ports)


@pytest.mark.parametrize(
    "value", [0, -1, 65536, True, "", "0", "2-1", "1-", "-1", "1-2-3", "1:2", "x", "\u0663", 1.5, (1, 2)]
)
def test_what_is_no_range_is_refused(value):
    with pytest.raises(ValueError, match=r"ports is .*: give a port or a range from 1 to 65535, such as"):
        rpc.RpcBackendOptions(ports=value)


@given(st.text(st.sampled_from("0123456789- "), max_size=12))
def test_any_text_is_a_range_or_refused(text):
    try:
        found = parse_ports(text, "ports")
    except ValueError:
        return
    assert 0 < found.first <= found.last < 65536


def test_options_come_before_the_environment(monkeypatch):
    monkeypatch.setenv("GRADWIRE_PORTS", "10-20")
    monkeypatch.setenv("GRADWIRE_HOST", "[::1]")
    monkeypatch.setenv("GRADWIRE_ADVERTISED_HOST", "[fd00::1]")
    found = rpc.RpcBackendOptions(ports=30).find_listening()
    assert found == ListenSettings(host="::1", advertised_host="fd00::1", ports=PortRange(30, 30))
    monkeypatch.setenv("GRADWIRE_PORTS", "many")
    with pytest.raises(ValueError, match="GRADWIRE_PORTS is 'many'"):
        rpc.RpcBackendOptions().find_listening()
