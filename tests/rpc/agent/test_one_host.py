"""On one host, without any set-up, only processes of the same user get to a worker."""

import ctypes
import os
import pickle
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gradwire import rpc
from gradwire.c10d.stores.file import FileStore
from gradwire.errors import RendezvousError, RpcError, WorkerSuspectError
from gradwire.net.event_loop import acquire_event_loop
from gradwire.net.user_sockets import SocketDirectory
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.messages import MessageType
from gradwire.rpc.contracts.worker import Member
from gradwire.rpc.membership.roster import RosterLog
from gradwire.rpc.transports.grpc_endpoint import EXCHANGE_METHOD, aio

from tests.hosts import MEMORY, separate, why_unavailable
from tests.remote_functions import add, identity, wait_until
from tests.workers import Worker

NOBODY = 65534
MIB = 1 << 20

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
with_namespaces = pytest.mark.skipif(bool(why_unavailable()), reason=f"needs namespaces: {why_unavailable()}")


def ports() -> set[str]:
    """Returns the addresses on which this process listens by TCP."""
    sockets = psutil.Process().net_connections("inet")
    return {each.laddr.ip.removeprefix("::ffff:") for each in sockets if each.status == psutil.CONN_LISTEN}


def network() -> Any:
    agent: Any = rpc.api.current_agent()
    return agent._network


def own_address() -> str:
    return network().peers.of(network().me).member.address


def call_all(count: int) -> None:
    """Calls all workers, with what travels in envelopes and with what does not."""
    others = [f"worker{rank}" for rank in range(count) if rank != rpc.get_worker_info().id]
    for other in others:
        assert rpc.rpc_sync(other, add, (1, 2)) == 3
        assert rpc.rpc_sync(other, identity, (torch.ones(4 * MIB),)).sum() == 4 * MIB
    for future in rpc.broadcast_call(others, torch.sum, (torch.ones(MIB),)):
        assert future.wait() == MIB


@pytest.mark.parametrize("transports", [("unix", "tcp", "grpc"), ("unix", "grpc"), ("grpc",)])
@pytest.mark.parametrize("insecure", [False, True])
def test_no_port_is_open(workers, transports, insecure):
    started = workers.rpc(3, transports=transports, insecure=insecure)
    workers.each(started, call_all, 3)
    assert workers.each(started, ports) == [set()] * 3
    for worker in started:
        path = Path(worker.run(own_address).removeprefix("unix:"))
        for each, kind in ((path, stat.S_IFSOCK), (path.parent, stat.S_IFDIR)):
            status = each.lstat()
            assert (status.st_mode, status.st_uid) == (kind | 0o700, os.geteuid())


def test_bulk_connections_open_no_port_either(workers):
    started = workers.rpc(2, transports=("unix", "tcp", "grpc"), channels=rpc.ChannelOptions(max_shared_bytes=1))
    workers.each(started, call_all, 2)
    started[0].run(wait_until, lambda: network().peers.by_id[1].channels.bulk.is_connected)
    assert workers.each(started, ports) == [set()] * 2


def test_the_sockets_are_removed_at_the_end(workers):
    started = workers.rpc(2)
    paths = [worker.run(own_address).removeprefix("unix:") for worker in started]
    assert all(map(os.path.exists, paths))
    workers.each(started, rpc.shutdown)
    assert not any(map(os.path.exists, paths))


def test_the_socket_of_a_killed_worker_is_removed_when_another_one_starts(workers):
    (killed, other) = workers.rpc(2)
    left, alive = (worker.run(own_address).removeprefix("unix:") for worker in (killed, other))
    killed.kill()
    long_ago = os.stat(left).st_mtime - 100
    for path in (left, alive):
        os.utime(path, (long_ago, long_ago))
    workers(1)[0].run(join_alone, f"file://{workers.folder}/another")
    assert os.path.exists(alive)
    assert not os.path.exists(left)


def join_alone(url: str) -> None:
    settings = rpc.RpcBackendOptions(init_method=url)
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=settings)


@pytest.mark.parametrize("transports", [("tcp", "grpc"), ("grpc", "tcp")])
def test_sockets_by_tcp_that_are_asked_for(workers, transports):
    started = workers.rpc(2, transports=transports)
    workers.each(started, call_all, 2)
    assert started[0].run(rpc.debug_info)["transports"]["worker1"] == "tcp"
    assert set().union(*workers.each(started, ports)) == {"127.0.0.1"}
    assert started[0].run(own_address).startswith("unix:")


# Another user.


def become(user: int) -> None:
    "localhost".encode("idna")  # loads a module that the other user may not be able to read
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


class Burglary:
    """Runs code where it is unpickled."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self.trace,)


def hello_of(worker: rpc.WorkerInfo) -> bytes:
    """Returns a frame with which a worker of this worker's group would introduce itself."""
    hello = agent_pb2.Hello()
    hello.CopyFrom(network()._handshake.hello)
    hello.worker_id, hello.worker_name = worker.id, worker.name
    return agent_pb2.Frame(hello=hello).SerializeToString()


def break_in(address: str, hello: bytes, trace: str) -> bool:
    """Says that this process is a worker, and sends a pickle; returns whether it was let in."""
    body = agent_pb2.Payload(inline=pickle.dumps(Burglary(trace)))
    call = agent_pb2.Envelope(id=1, type=MessageType.CALL, body=body)

    async def send() -> bool:
        async with aio.insecure_channel(address) as channel:
            stream = channel.stream_stream(EXCHANGE_METHOD)()
            try:
                await stream.write(hello)
                if await stream.read() is aio.EOF:
                    return False
                await stream.write(agent_pb2.Frame(choice=agent_pb2.SocketChoice()).SerializeToString())
                await stream.write(agent_pb2.Frame(envelopes=[call]).SerializeToString())
                return await stream.read() is not aio.EOF
            except aio.AioRpcError:
                return False

    events = acquire_event_loop()
    try:
        return events.run(send(), 20)
    finally:
        events.release()


def speak(name: str) -> bytes:
    """Connects to a unix socket in the abstract namespace; returns what it says before it closes that."""
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(20)
        made.connect(name)
        try:
            made.sendall(bytes(32))
            return made.recv(1)
        except OSError:
            return b""


@as_root
def test_another_user_runs_no_code(workers, tmp_path):
    started = workers.rpc(3, transports=("unix", "tcp", "grpc"))
    victim, connected, _ = started
    connected.run(rpc.rpc_sync, "worker0", add, (1, 2))
    (burglar,) = workers(1)
    tmp_path.chmod(0o777)
    burglar.run(become, NOBODY)
    listening = psutil.Process(victim.pid).net_connections("all")
    doors = [f"{each.laddr.ip}:{each.laddr.port}" for each in listening if each.status == psutil.CONN_LISTEN]
    doors.append(victim.run(own_address))
    for number, door in enumerate(doors):
        for other in (rpc.WorkerInfo("worker1", 1), rpc.WorkerInfo("worker2", 2)):
            trace = f"{tmp_path}/trace{number}{other.id}"
            assert not burglar.run(break_in, door, victim.run(hello_of, other), trace)
            assert not os.path.exists(trace)
    abstract = {each.laddr for each in listening if isinstance(each.laddr, str) and each.laddr.startswith("@grad")}
    assert abstract  # the socket for envelopes
    for name in abstract:
        assert burglar.run(speak, "\0" + name[1:]) == b""
    workers.each(started, call_all, 3)
    assert victim.run(rpc.debug_info)["lost_workers"] == {}


@as_root
def test_the_same_user_would_run_it(workers, tmp_path):
    """Shows that the attempts above would succeed without their obstacle."""
    started = workers.rpc(2, transports=("unix", "grpc"))
    (friend,) = workers(1)
    hello = started[0].run(hello_of, rpc.WorkerInfo("worker1", 1))
    assert friend.run(break_in, started[0].run(own_address), hello, f"{tmp_path}/trace")
    assert os.path.exists(f"{tmp_path}/trace")


# Forged entries of the store.


@pytest.fixture
def foreign(tmp_path):
    """A TCP port and a unix socket of somebody else: (port, path, was anything connected?)."""
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as unix:
        path = f"{tmp_path}/foreign.sock"
        unix.bind(path)
        unix.listen()

        def is_untouched() -> bool:
            for each in (port, unix):
                each.settimeout(0)
                with pytest.raises(BlockingIOError):
                    each.accept()
            return True

        yield port.getsockname()[1], path, is_untouched


def join(name: str, rank: int, url: str, **options: Any) -> None:
    settings = rpc.RpcBackendOptions(init_method=url, init_timeout=20, **options)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=settings)


def join_with_address(address: str, name: str, rank: int, url: str) -> None:
    """Joins as somebody would who writes another address into the store."""
    listen = GrpcAgent.listen

    def forge(*args: Any) -> str:
        listen(*args)
        return address

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrpcAgent, "listen", forge)
        join(name, rank, url)


def test_a_forged_tcp_address_is_not_dialled(workers, tmp_path, foreign):
    port, _, is_untouched = foreign
    a, b = workers(2)
    url = f"file://{tmp_path}/rendezvous"
    pending = [
        a.start(join, "a", 0, url),
        b.start(join_with_address, f"127.0.0.1:{port}", "b", 1, url),
    ]
    for each in pending:
        with pytest.raises(RendezvousError, match="some have unix sockets, and others insecure=True or host="):
            each.result()
    assert is_untouched()


def call_b() -> str:
    with pytest.raises(WorkerSuspectError) as caught:
        rpc.rpc_sync("b", add, (1, 2))
    return str(caught.value)


def test_a_forged_path_is_not_dialled(workers, tmp_path, foreign):
    _, path, is_untouched = foreign
    a, b = workers(2)
    url = f"file://{tmp_path}/rendezvous"
    pending = [a.start(join, "a", 0, url), b.start(join_with_address, f"unix:{path}", "b", 1, url)]
    for each in pending:
        each.result()
    directory = SocketDirectory.of_this_user().path
    expected = f"it cannot be reached at unix:{path} ('{path}' is not a worker's socket in {directory})"
    assert expected in a.run(call_b)
    assert is_untouched()


def test_a_forged_link_is_not_dialled(workers, tmp_path, foreign):
    _, path, is_untouched = foreign
    link = f"{SocketDirectory.of_this_user().path}/{os.getpid()}-0123456789abcdef.sock"
    a, b = workers(2)
    url = f"file://{tmp_path}/rendezvous"
    pending = [a.start(join, "a", 0, url), b.start(join_with_address, f"unix:{link}", "b", 1, url)]
    for each in pending:
        each.result()
    os.symlink(path, link)
    try:
        assert "is no socket but a link" in a.run(call_b)
    finally:
        os.unlink(link)
    assert is_untouched()


def join_dynamic(name: str, url: str, init_timeout: float = 20, **options: Any) -> None:
    settings = rpc.RpcBackendOptions(init_method=url, init_timeout=init_timeout, **options)
    rpc.init_rpc(name, rpc_backend_options=settings)


@pytest.mark.parametrize("name", ["eve", "b"])
def test_a_forged_entry_of_a_dynamic_group_is_not_dialled(workers, tmp_path, foreign, name):
    """Neither to join, nor to find out whether the worker that had the same name before is dead."""
    port, _, is_untouched = foreign
    a, b = workers(2)
    url = f"file://{tmp_path}/rendezvous"
    a.run(join_dynamic, "a", url)
    with FileStore(f"{tmp_path}/rendezvous") as store:
        log = RosterLog(store)
        log.catch_up()
        (real,) = log.members()
        forged = Member(rpc.WorkerInfo(name, 7), f"127.0.0.1:{port}", directory=real.directory)
        assert log.join(forged)
    text = "some have unix sockets, and others" if name == "eve" else "'b' cannot take its place"
    with pytest.raises(RendezvousError, match=text):
        b.run(join_dynamic, "b", url, 8)
    assert is_untouched()


# Workers of one host that share less.


def hide_sockets(folder: Path) -> None:
    """Gives this process a directory for sockets of its own, as containers have with their own /tmp."""
    separate("container", folder, MEMORY)
    directory = SocketDirectory.of_this_user().path.encode()
    assert ctypes.CDLL(None).mount(b"tmpfs", directory, b"tmpfs", 0, b"mode=700") == 0


def become_nobody(folder: Path) -> None:
    become(NOBODY)


APART = {
    "users": pytest.param(become_nobody, marks=as_root),
    "file systems": pytest.param(hide_sockets, marks=with_namespaces),
}


@with_namespaces
def test_workers_that_share_no_directory_are_told(workers, tmp_path):
    a, b = workers(2)
    b.run(hide_sockets, workers.folder)
    url = f"file://{tmp_path}/rendezvous"
    errors = set()
    for each in [a.start(join, "a", 0, url), b.start(join, "b", 1, url)]:
        with pytest.raises(RendezvousError, match="share no directory for their sockets") as caught:
            each.result()
        errors.add(str(caught.value))
    (error,) = errors
    assert "/tmp/gradwire-0 of user 0" in error
    assert "insecure=True" in error


@pytest.mark.parametrize("separate_worker", APART.values(), ids=APART)
def test_workers_that_share_no_directory_use_tcp_if_they_may(workers, free_port, separate_worker):
    a, b = workers(2)
    b.run(separate_worker, workers.folder)
    url = f"tcp://127.0.0.1:{free_port}"
    for each in [
        worker.start(join, f"worker{rank}", rank, url, insecure=True) for rank, worker in ((0, a), (1, b))
    ]:
        each.result()
    workers.each([a, b], call_all, 2)
    assert b.run(ports) == {"127.0.0.1"}


def test_a_worker_without_a_directory_says_so(workers, tmp_path):
    a, b = workers(2)
    url = f"file://{tmp_path}/rendezvous"
    pending = [a.start(join, "a", 0, url), b.start(join_without_directory, "b", 1, url)]
    with pytest.raises(RpcError, match=r"mode 0755, not 0700.*set XDG_RUNTIME_DIR.*insecure=True"):
        pending[1].result()
    with pytest.raises(RendezvousError, match=r"'b' .* cannot start: .*mode 0755, not 0700"):
        pending[0].result()


def join_without_directory(name: str, rank: int, url: str) -> None:
    from gradwire.net import user_sockets

    folder = Path(url.removeprefix("file://")).parent / "tmp"
    (folder / f"gradwire-{os.geteuid()}").mkdir(parents=True, mode=0o755)
    user_sockets._TEMPORARY = str(folder)
    os.environ.pop("XDG_RUNTIME_DIR", None)
    join(name, rank, url)


def test_a_loopback_address_may_be_given(workers, tmp_path):
    started: list[Worker] = workers(2)
    url = f"file://{tmp_path}/rendezvous"
    with pytest.raises(RpcError, match="host is '127.0.0.1', which every user of this host can reach"):
        started[0].run(join, "worker0", 0, url, host="127.0.0.1")
    for each in [
        worker.start(join, f"worker{rank}", rank, url, host="127.0.0.1", insecure=True)
        for rank, worker in enumerate(started)
    ]:
        each.result()
    workers.each(started, call_all, 2)
    assert workers.each(started, ports) == [{"127.0.0.1"}] * 2


def test_a_loopback_address_has_to_be_given_to_all(workers, tmp_path):
    a, b = workers(2)
    url = f"file://{tmp_path}/rendezvous"
    for each in [a.start(join, "a", 0, url), b.start(join, "b", 1, url, host="127.0.0.1", insecure=True)]:
        with pytest.raises(RendezvousError, match="started with different options"):
            each.result()
