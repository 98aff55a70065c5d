"""The audit log of agents: who connects to one, who is refused, and which limits its peers reach."""

import asyncio
import json
import logging
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

import grpc
import pytest
from gradwire import rpc
from gradwire.c10d import Credentials
from gradwire.errors import LimitReachedError, LossCause, PolicyError, RemoteUnpicklableError
from gradwire.net.event_loop import EventLoop, acquire_event_loop
from gradwire.net.security import Audit
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.channels import base
from gradwire.rpc.contracts.agent import holder
from gradwire.rpc.contracts.messages import CALL, MessageType, Request
from gradwire.rpc.contracts.worker import WorkerEnd
from gradwire.rpc.transports import grpc_endpoint, sockets
from gradwire.rpc.transports.grpc_endpoint import EXCHANGE_METHOD, TRANSFER_METHOD, GrpcEndpoint, aio
from gradwire.rpc.wire.failures import decode_failure

from tests.docs.test_docs import run_code, snippets
from tests.net.audit_records import FIELDS, events, record_all, the_event
from tests.remote_functions import add, wait_until
from tests.rpc.agent.test_admission import HELLO, Stranger, check_calls, status_of
from tests.rpc.agent.test_credentials_of_agents import of_token, say_hello
from tests.rpc.channels.test_received_bounds import announcement
from tests.rpc.transports.test_envelope_sockets import frame
from tests.rpc.transports.test_tls_connections import address, dial, with_listener
from tests.rpc.transports.tls_pairs import TOKEN, authority, certified, identity_of

EVIL = "\x1b[31mworker1\n\u202e"
SHOWN = "\\x1b[31mworker1\\n\\u202e"


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    events = acquire_event_loop()
    yield events
    events.release()


def counts(agent: GrpcAgent) -> dict[str, dict[str, int]]:
    return agent.debug_info()["audit"]


def opening(method: str, **fields: Any) -> bytes:
    """Returns the first message of a stream, with a hello that has these fields."""
    hello = agent_pb2.Hello.FromString(HELLO.SerializeToString())
    for name, value in fields.items():
        setattr(hello, name, value)
    message = agent_pb2.Frame if method == EXCHANGE_METHOD else agent_pb2.Chunks
    return message(hello=hello).SerializeToString()


async def open_stream(agent: GrpcAgent, method: str, first: bytes) -> str:
    """Opens a stream, sends a message, and returns how the agent ends the stream."""
    async with Stranger(agent) as stranger:
        call = await stranger.open(method)
        with suppress(aio.AioRpcError):  # it may have ended by then
            await call.write(first)
        await status_of(call)
        return str(await call.details())


# The gRPC server.


@pytest.mark.parametrize("method", [EXCHANGE_METHOD, TRANSFER_METHOD])
@pytest.mark.parametrize(
    ("fields", "reason", "worker"),
    [
        ({"worker_name": EVIL}, f"knows no '{SHOWN}' with id 1", SHOWN),
        ({"group": EVIL}, "belongs to another job than 'agent1'", "agent1"),
        ({"protocol": 77}, "'agent1' speaks 77", "agent1"),
        ({"worker_name": "x" * 300}, "worker 'agent0' ", "x" * 199 + "…"),
    ],
    ids=["name", "group", "version", "long name"],
)
def test_a_refused_hello(agents, loop, caplog, method, fields, reason, worker):
    a, b = agents(2)
    told = loop.run(open_stream(a, method, opening(method, **fields)), 30)
    denied = the_event(caplog, event="deny", listener="agent")
    assert reason in denied["reason"]
    assert (denied["owner"], denied["worker"], denied["level"]) == ("agent0", worker, logging.WARNING)
    assert denied["peer"].startswith("unix:")
    assert len(denied["line"]) < 1000
    assert len(told) <= grpc_endpoint.MAX_REASON
    assert told.isprintable()
    assert counts(a)["agent"]["deny"] == 1
    check_calls(a, b)


@pytest.mark.parametrize(
    "first", [b"\xff\xff\xff", bytes(grpc_endpoint.MAX_HELLO_BYTES + 1)], ids=["no hello", "long"]
)
def test_what_is_no_hello(agents, loop, caplog, first):
    a, _ = agents(2)
    loop.run(open_stream(a, EXCHANGE_METHOD, first), 30)
    assert "hello" in the_event(caplog, event="deny", listener="agent")["reason"]


def test_who_is_let_in(agents, caplog):
    record_all(caplog)
    a, b = agents(2)
    check_calls(a, b)
    let_in = the_event(caplog, event="authenticate", listener="agent")
    assert {let_in["owner"], let_in["worker"]} == {"agent0", "agent1"}
    assert let_in["level"] == logging.INFO
    by_socket = the_event(caplog, event="authenticate", listener="unix")
    assert by_socket["owner"] == let_in["owner"]
    assert re.fullmatch(r"unix:pid=\d+,uid=\d+", by_socket["peer"])
    called = a if let_in["owner"] == "agent0" else b
    assert counts(called) == {
        "agent": {"connect": 1, "authenticate": 1},
        "unix": {"connect": 1, "authenticate": 1},
    }
    assert not events(caplog, level=logging.WARNING)


def test_a_stream_that_says_nothing(agents, loop, caplog, monkeypatch):
    monkeypatch.setattr(grpc_endpoint, "HELLO_TIMEOUT_S", 0.2)
    a, _ = agents(2)

    async def wait_in_silence() -> None:
        async with Stranger(a) as stranger:
            await status_of(await stranger.open())

    loop.run(wait_in_silence(), 30)
    assert the_event(caplog, event="deny")["reason"] == "no hello within 0.2 s"


def test_the_limit_of_streams(agents, loop, caplog, monkeypatch):
    monkeypatch.setattr(grpc_endpoint, "MAX_UNADMITTED", 0)
    a, _ = agents(2)
    loop.run(open_stream(a, EXCHANGE_METHOD, opening(EXCHANGE_METHOD)), 30)
    assert the_event(caplog, event="limit", listener="agent")["limit"] == "MAX_UNADMITTED=0"
    assert counts(a)["agent"] == {"connect": 1, "limit": 1}


def test_a_stream_that_is_left_is_not_denied(agents, loop):
    a, b = agents(2)

    async def leave() -> None:
        async with Stranger(a) as stranger:
            call = await stranger.open()
            await call.done_writing()
            await status_of(call)

    loop.run(leave(), 30)
    assert counts(a) == {"agent": {"connect": 1}}
    check_calls(a, b)


def test_a_flood_of_hellos(agents, loop, caplog):
    a, _ = agents(2)

    async def flood() -> None:
        async with Stranger(a) as stranger:
            for _ in range(60):
                call = await stranger.open()
                await call.write(opening(EXCHANGE_METHOD, group="other"))
                await status_of(call)

    loop.run(flood(), 60)
    assert counts(a)["agent"]["deny"] == 60
    assert len(events(caplog, event="deny")) == 20
    a.shutdown(graceful=False, timeout=0)
    assert events(caplog, event="deny")[-1]["omitted"] == 40


def test_a_certificate_of_another_worker(loop, caplog):
    """Of connections that fail before, gRPC tells that they were made, and nothing else."""
    record_all(caplog)
    endpoint = GrpcEndpoint("worker0", Credentials(token=TOKEN))

    async def serve(_requests: object, context: Any) -> None:
        peer = endpoint.on_stream(context)
        endpoint.audit.deny("agent", endpoint.why_refused(context, EVIL), peer=peer)
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "refused")

    async def run() -> None:
        endpoint.serve({"Exchange": grpc.stream_stream_rpc_method_handler(serve)})
        port = await endpoint.listen("127.0.0.1:0")
        for credentials in (of_token(TOKEN, "worker2"), of_token("pL4gT9wHs6dVf0yNx3aQz8Cm", "worker2")):
            await say_hello(f"127.0.0.1:{port}", EXCHANGE_METHOD, credentials, b"hello")
        await endpoint.stop()

    loop.run(run(), 60)
    denied = the_event(caplog, event="deny")
    assert denied["reason"] == f"its certificate is not for worker '{SHOWN}'"
    assert denied["peer"].startswith("ipv4:127.0.0.1:")
    assert endpoint.audit.counts()["agent"]["connect"] >= 2
    assert TOKEN not in caplog.text


# Sockets.


@pytest.mark.parametrize(
    ("sent", "reason"),
    [(bytes(32), "its nonce is of no offer"), (b"", "it has not said its nonce within 0.2 s")],
    ids=["wrong nonce", "no nonce"],
)
def test_a_socket_without_its_nonce(caplog, monkeypatch, sent, reason):
    monkeypatch.setattr(sockets, "NONCE_TIMEOUT_S", 0.2)

    async def test(listener: sockets.SocketListener, offered: sockets.OfferedSocket) -> None:
        with socket.create_connection(address(offered)) as stranger:
            stranger.settimeout(0)
            await asyncio.get_running_loop().sock_sendall(stranger, sent)
            with suppress(ConnectionError):
                assert not await asyncio.get_running_loop().sock_recv(stranger, 1)
        assert listener.audit.counts() == {"tcp": {"connect": 1, "deny": 1}}

    with_listener(test, None)
    denied = the_event(caplog, event="deny", listener="tcp")
    assert denied["reason"].startswith(reason)
    assert denied["peer"].startswith("127.0.0.1:")


def test_a_socket_of_the_worker_that_it_is_offered_to(caplog):
    record_all(caplog)
    nonces: list[bytes] = []

    async def test(_: sockets.SocketListener, offered: sockets.OfferedSocket) -> None:
        nonces.append(offered.offer.nonce)
        assert await dial(identity_of("b"), offered)

    with_listener(test, identity_of("a"))
    assert the_event(caplog, event="authenticate", listener="tcp")["worker"] == "b"
    assert not events(caplog, event="deny")
    text = caplog.text
    assert nonces[0].hex() not in text
    assert repr(nonces[0])[2:-1] not in text


def test_a_socket_with_another_certificate(caplog):
    ca = authority()

    async def test(_: sockets.SocketListener, offered: sockets.OfferedSocket) -> None:
        assert not await dial(certified(ca, "c").identity("c"), offered)

    with_listener(test, certified(ca, "a").identity("a"))
    assert the_event(caplog, event="deny", listener="tcp")["reason"] == "its certificate is not for worker 'b'"


def test_sockets_that_wait_to_be_let_in(caplog, monkeypatch):
    record_all(caplog)
    monkeypatch.setattr(sockets, "NONCE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(sockets, "MAX_UNADMITTED", 1)

    async def test(listener: sockets.SocketListener, offered: sockets.OfferedSocket) -> None:
        strangers = [socket.create_connection(address(offered)) for _ in range(2)]
        for stranger in strangers:
            stranger.settimeout(0)
            with suppress(ConnectionError):
                await asyncio.get_running_loop().sock_recv(stranger, 1)
            stranger.close()
        assert listener.audit.counts()["tcp"]["limit"] == 1

    with_listener(test, None)
    waited = the_event(caplog, event="limit")
    assert (waited["limit"], waited["level"]) == ("MAX_UNADMITTED=1", logging.INFO)


def test_the_process_of_another_user(caplog, monkeypatch):
    monkeypatch.setattr(sockets, "is_of_same_user", lambda _: False)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listener = sockets.SocketListener(loop, [sockets.UNIX])
        offered = listener.offer(rpc.WorkerInfo("b", 1), same_host=True)
        assert offered is not None
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(0)
            await loop.sock_connect(stranger, f"\0{offered.offer.address}")
            assert not await loop.sock_recv(stranger, 1)
        await listener.close()

    asyncio.run(run())
    denied = the_event(caplog, event="deny", listener="unix")
    assert denied["reason"] == "it belongs to another user"
    assert re.fullmatch(r"unix:pid=\d+,uid=\d+", denied["peer"])


def test_bytes_on_a_socket_that_are_no_message(agents, caplog):
    a, b = agents(2)
    check_calls(a, b)
    connection = b.peers.by_id[0].stream.outbox.socket._connection
    connection.sendall(struct.pack("<IB", 4, 0) + b"\xff\xff\xff\xff")
    wait_until(lambda: counts(a).get("unix", {}).get("deny") == 1)  # either may have dialled
    denied = the_event(caplog, event="deny", listener="unix")
    assert (denied["owner"], denied["worker"]) == ("agent0", "agent1")
    wait_until(lambda: a.end_of(1) is not None)


def test_bytes_on_a_bulk_connection_that_are_no_payload(agents, caplog):
    a, _ = agents(2)
    a._network.channels.dependencies.sockets.on_malformed(a.peers.by_id[1], ValueError(EVIL))
    denied = the_event(caplog, event="deny", listener="bulk")
    assert (denied["worker"], denied["reason"]) == ("agent1", SHOWN)


# Messages.


def test_a_malformed_message(agents, caplog):
    a, b = agents(2)
    envelope = agent_pb2.Envelope(id=5, type=CALL, has_payloads=True)
    envelope.body.segment.number, envelope.body.segment.nbytes = 99, 10
    a.peers.of(b.info).on_envelope(envelope, 100)
    wait_until(lambda: counts(a).get("messages") == {"deny": 1})
    assert the_event(caplog, event="deny", listener="messages")["worker"] == "agent1"
    unknown = agent_pb2.Envelope(id=6, type=MessageType.CALL + 90)
    unknown.body.inline = frame(unknown)
    a.peers.of(b.info).on_envelope(unknown, 100)
    wait_until(lambda: counts(a).get("messages") == {"deny": 2})


def test_a_limit_of_what_a_worker_announces(agents, caplog, monkeypatch):
    monkeypatch.setattr(base, "MAX_ANNOUNCED", 1)
    a, b = agents(2)
    for number in (1, 2):
        a.peers.of(b.info).on_envelope(announcement(number, 1000), 100)
    wait_until(lambda: counts(a).get("messages") == {"limit": 1})
    reached = the_event(caplog, event="limit", listener="messages")
    assert reached["limit"] == "MAX_ANNOUNCED=1"
    assert reached["worker"] == "agent1"


def reach_limit() -> None:
    raise LimitReachedError("too many", "MAX=3")


def reach_limit_of(name: str) -> None:
    rpc.rpc_sync(name, reach_limit)


def test_a_limit_that_a_handler_reaches(agents, caplog):
    a, b, c = agents(3)
    with holder.using(a), pytest.raises(LimitReachedError, match="too many") as caught:
        rpc.rpc_sync(b.info, reach_limit_of, (c.info.name,))
    assert caught.value.limit == "MAX=3"
    assert "messages" not in counts(b)  # it is a limit of the other one
    reached = the_event(caplog, event="limit", listener="messages")
    assert (reached["owner"], reached["worker"], reached["limit"]) == ("agent2", "agent1", "MAX=3")


def test_a_message_that_the_policy_refuses(agents, caplog):
    a, b = agents(2, policy=rpc.Policy(accepts="plain"))
    with holder.using(a), pytest.raises(PolicyError):
        rpc.rpc_sync(b.info, add, (1, 2))
    denied = the_event(caplog, event="deny", listener="policy")
    assert (denied["owner"], denied["worker"]) == ("agent1", "agent0")
    assert "tests.remote_functions.add" in denied["reason"]
    assert counts(b)["policy"] == {"deny": 1}
    assert b.debug_info()["refused_messages"] == {"agent0": 1}


# Texts of peers in errors.


def test_reasons_and_errors_of_peers_are_shown_without_control_characters():
    failure = agent_pb2.RemoteFailure(type_name=EVIL, text=EVIL, traceback=f"line 1\n{EVIL}")
    error = decode_failure(failure.SerializeToString(), "worker1")
    assert isinstance(error, RemoteUnpicklableError)
    assert str(error).replace("\n", "").isprintable()
    assert "line 1\n\\x1b" in str(error)
    for reason in (EVIL, "x" * 10**6):
        end = WorkerEnd(LossCause.DISCONNECTED, f"its connection broke: {reason}")
        assert end.reason.isprintable()
        assert len(end.reason) <= 500


def test_a_call_on_the_machine_of_a_peer_says_nothing_else(agents):
    """A call that works leaves no trace in the audit log."""
    a, b = agents(2)
    check_calls(a, b)
    before = counts(a)
    with holder.using(a):
        assert a.request(b.info, Request(MessageType.CALL, (add, (1, 2), {}))).wait() == 3
    assert counts(a) == before


# The documentation.


def test_the_formatter_in_the_documentation_writes_json(capsys):
    (code,) = [each for each in snippets("docs/security.md") if "class JsonLines" in each]
    log = logging.getLogger("gradwire.audit")
    before = list(log.handlers), log.level, log.propagate
    try:
        run_code(code, ModuleType("program"))
        Audit("worker0").deny("agent", EVIL, peer="ipv4:10.0.0.1:99", worker="worker1")
    finally:
        log.handlers, log.level, log.propagate = before
    line = json.loads(capsys.readouterr().err)
    assert line.keys() >= {*FIELDS}
    assert (line["event"], line["reason"], line["count"]) == ("deny", SHOWN, 1)
