"""The attacks on running jobs, by those who may: each opening is what a listener takes, and its canary runs."""

import json
import os
import socket
import threading
from datetime import timedelta

from gradwire.c10d import FileStore, TCPStore
from gradwire.c10d.engines.mpi.pmi import PmiServer
from gradwire.c10d.groups.failure_detector import FailureDetector
from gradwire.net.event_loop import acquire_event_loop
from gradwire.net.user_sockets import SocketDirectory, store_socket_name
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.transports.sockets import OfferedSocket

from tests.certificates import make_authority, write
from tests.hostile.attacks import Attempt, TlsClient, attempt_all, openings
from tests.remote_functions import wait_until


def answer(address: tuple[str, int] | str, said: bytes, tls: TlsClient | None = None) -> bytes:
    (outcome,) = attempt_all([Attempt((), address, tls, said)])
    return outcome.answer


def say(agent: GrpcAgent, other: GrpcAgent, opening: str, canary: str = "") -> socket.socket:
    """Connects to the gRPC server of an agent, in the name of another one."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(agent.peers.by_id[agent.info.id].member.address.removeprefix("unix:"))
    connection.sendall(openings(other._network._handshake.hello.SerializeToString(), canary)[opening])
    return connection


def test_a_stream_runs_the_canary(agents, tmp_path):
    a, b = agents(2)
    canary = str(tmp_path / "canary")
    with say(a, b, "stream", canary):
        wait_until(lambda: os.path.exists(canary))


def test_a_stream_for_payloads_is_served(agents):
    a, b = agents(2)
    with say(a, b, "payloads"):
        wait_until(lambda: a.peers.by_id[1].channels.chunked.is_served)


def test_a_socket_is_admitted_by_its_nonce(agents):
    a, b = agents(2)
    events = acquire_event_loop()

    async def make_offer() -> OfferedSocket | None:
        return a._network._sockets.offer(b.info, same_host=True)

    try:
        offered = events.run(make_offer(), 20)
        assert offered is not None
        said = openings(b"", "", nonce=offered.offer.nonce)["socket"]
        assert answer(f"\0{offered.offer.address}", said) == b"\x01"
        events.loop.call_soon_threadsafe(offered.withdraw)
    finally:
        events.release()


def test_a_store_answers_its_own(tmp_path):
    credentials = write(tmp_path / "a", make_authority(), "a")
    pem = b"".join((tmp_path / "a" / name).read_bytes() for name in ("certificate", "key"))
    said = openings(b"", "")
    for given, tls in ((None, None), (credentials, TlsClient(pem))):
        with TCPStore("127.0.0.1", 0, is_master=True, credentials=given) as store:
            store.set("the key", "")
            store.queue_push("q", "the item")
            path = f"{SocketDirectory.of_this_user().path}/{store_socket_name(store.port)}"
            address = path if given is None else ("127.0.0.1", store.port)
            assert b"the key" in answer(address, said["store"], tls)
            assert b"the item" in answer(address, said["queue"], tls)


def test_a_failure_detector_welcomes_its_word(tmp_path):
    with FileStore(str(tmp_path / "store")) as store, FileStore(str(tmp_path / "store")) as other:
        made: list[FailureDetector] = []
        thread = threading.Thread(
            target=lambda: made.append(FailureDetector(store, 0, 2, 60, on_lost=print, on_left=print))
        )
        thread.start()
        other.set("host/1", other.get("host/0"))
        other.wait(["address"], timedelta(seconds=60))
        host, port, word = json.loads(other.get("address"))
        address = f"\0{host[1:]}" if host.startswith("@") else (host, port)
        assert answer(address, openings(b"", "", word=word)["failure detector"]) == b"welcome\n"
        thread.join()
        made[0].close()


def test_pmi_greets_its_ranks():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        server = PmiServer(listener, [0])
        assert answer(address, openings(b"", "", pmi_id=server.ids[0])["PMI"]).startswith(b"cmd=initack rc=0")
        server._thread.join(30)
        assert not server._thread.is_alive()
