"""Agents with credentials: who is let in, whom they connect to, and certificates that are replaced."""

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from gradwire import rpc
from gradwire.errors import CredentialsError, RendezvousError
from gradwire.net.event_loop import acquire_event_loop
from gradwire.net.security import SHARED_HOST_NAME, Credentials, Identity, worker_host_name
from gradwire.net.security.issuing import Authority, Validity
from gradwire.net.user_sockets import UnsafePathError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.membership.addresses import ListenAddress
from gradwire.rpc.transports.grpc_endpoint import EXCHANGE_METHOD, TRANSFER_METHOD, GrpcEndpoint, aio

from tests.certificates import EXPIRED, OTHER_TOKEN, TOKEN, ca_pem, make_authority, write
from tests.net.http2 import grpc_request
from tests.remote_functions import add
from tests.workers import Worker, Workers


@pytest.fixture
def loop():
    events = acquire_event_loop()
    yield events
    events.release()


def certificate(authority: Authority, worker: str, validity: Validity | None = None) -> grpc.ChannelCredentials:
    chain, key = authority.issue(worker, validity or Validity.days(1))
    return grpc.ssl_channel_credentials(ca_pem(authority), key, chain)


def certificate_by_uri(authority: Authority, worker: str) -> grpc.ChannelCredentials:
    """Makes a certificate that has the host name of a worker as a URI, which some CAs let everybody choose."""
    chain, key = authority.issue(None, Validity.days(1))
    made = x509.load_pem_x509_certificate(chain)
    names = [x509.DNSName(SHARED_HOST_NAME), x509.UniformResourceIdentifier(worker_host_name(worker))]
    builder = x509.CertificateBuilder(made.issuer, made.subject, made.public_key(), made.serial_number)
    builder = builder.not_valid_before(made.not_valid_before_utc).not_valid_after(made.not_valid_after_utc)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    chain = builder.sign(authority.key, hashes.SHA256()).public_bytes(Encoding.PEM)
    return grpc.ssl_channel_credentials(ca_pem(authority), key, chain)


def of_token(token: str, worker: str) -> grpc.ChannelCredentials:
    return Credentials(token=token).identity(worker).grpc_channel_credentials()


def start_workers(workers: Workers, credentials: Sequence[Credentials]) -> list[Worker]:
    """Starts one worker for each credentials: worker0 and so on. They listen on TCP ports."""
    url = f"file://{workers.folder / 'rendezvous'}"
    started = workers(len(credentials))
    pending = [
        worker.start(join, worker.name, rank, len(started), url, credentials[rank])
        for rank, worker in enumerate(started)
    ]
    for each in pending:
        each.result()
    return started


def join(name: str, rank: int, size: int, url: str, credentials: Credentials) -> None:
    options = rpc.RpcBackendOptions(
        init_method=url, credentials=credentials, transports=("grpc",), host="127.0.0.1"
    )
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)


def own_address() -> str:
    agent = current_agent()
    return agent.peers.by_id[agent.info.id].member.address  # type: ignore[attr-defined]


def own_hello() -> bytes:
    return current_agent()._network._handshake.hello.SerializeToString()  # type: ignore[attr-defined]


def opening(method: str, hello: bytes) -> bytes:
    """Returns the first message of a stream."""
    kind = agent_pb2.Frame if method == EXCHANGE_METHOD else agent_pb2.Chunks
    return kind(hello=agent_pb2.Hello.FromString(hello)).SerializeToString()


async def say_hello(address: str, method: str, credentials: grpc.ChannelCredentials | None, first: bytes) -> str:
    """Connects to worker0. Returns "welcome", or the status with which it is refused."""
    options = [("grpc.ssl_target_name_override", worker_host_name("worker0"))]
    channel = (
        aio.secure_channel(address, credentials, options=options) if credentials else aio.insecure_channel(address)
    )
    async with channel, asyncio.timeout(20):
        try:
            if method == TRANSFER_METHOD:
                call = channel.stream_unary(method)()
                await call.write(first)
                await call.done_writing()
                await call
                return "welcome"
            call = channel.stream_stream(method)()
            await call.write(first)
            if await call.read() is not aio.EOF:
                return "welcome"
            return f"{(await call.code()).name}: {await call.details()}"
        except aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"


@pytest.mark.parametrize("method", [EXCHANGE_METHOD, TRANSFER_METHOD])
def test_who_is_let_in(workers, loop, tmp_path, method):
    ca = make_authority()
    a, b = start_workers(workers, [write(tmp_path / f"of-{rank}", ca, f"worker{rank}") for rank in range(2)])
    address, first = a.run(own_address), opening(method, b.run(own_hello))

    def attempt(credentials: grpc.ChannelCredentials | None) -> str:
        return loop.run(say_hello(address, method, credentials, first), 30)

    assert attempt(None).startswith("UNAVAILABLE")
    assert attempt(grpc.ssl_channel_credentials(ca_pem(ca))).startswith("UNAVAILABLE")  # no certificate
    assert attempt(certificate(make_authority(), "worker1")).startswith("UNAVAILABLE")
    assert attempt(of_token(TOKEN, "worker1")).startswith("UNAVAILABLE")
    assert attempt(certificate(ca, "worker1", EXPIRED)).startswith("UNAVAILABLE")
    for other in (certificate(ca, "worker2"), certificate_by_uri(ca, "worker1")):
        refusal = attempt(other)
        assert refusal.startswith("FAILED_PRECONDITION")
        assert "its certificate is not for worker 'worker1'" in refusal
    assert attempt(certificate(ca, "worker1")) == "welcome"


def test_a_server_with_another_workers_certificate_is_not_used(loop):
    """The dialling worker says nothing to a server that is not certified to be the one it dials."""
    served: list[bytes] = []

    async def serve(_requests: object, context: Any) -> None:
        served.append(await context.read())
        await context.write(b"answer")

    async def dial(name: str) -> str:
        server = GrpcEndpoint("eve", Credentials(token=TOKEN))
        server.serve({"Exchange": grpc.stream_stream_rpc_method_handler(serve)})
        port = await server.listen("127.0.0.1:0")
        client = GrpcEndpoint("agent0", Credentials(token=TOKEN))
        client.reach = str
        try:
            async with client.channel(name, f"127.0.0.1:{port}") as channel:
                call = channel.stream_stream(EXCHANGE_METHOD)()
                await call.write(b"hello")
                return str(await call.read())
        except aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            await server.stop()

    assert "Hostname Verification" in loop.run(dial("agent1"), 30)
    assert served == []
    assert loop.run(dial("eve"), 30) == "b'answer'"
    assert served == [b"hello"]


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
@pytest.mark.parametrize("transports", [("unix", "tcp", "grpc"), ("tcp", "grpc"), ("grpc",)])
def test_calls_with_a_token(workers, transports, host):
    a, b = workers.rpc(2, credentials=Credentials(token=TOKEN), transports=transports, host=host)
    assert a.run(rpc.rpc_sync, b.name, add, (1, 2)) == 3
    assert b.run(rpc.rpc_sync, a.name, torch.sum, (torch.ones(2**20),)) == 2**20


def test_calls_with_certificates_while_they_are_replaced(workers, tmp_path):
    ca, new_ca = make_authority(), make_authority()
    folders = [tmp_path / f"of-{rank}" for rank in range(3)]
    started = start_workers(workers, [write(folder, ca, f"worker{rank}") for rank, folder in enumerate(folders)])
    a, b, c = started
    assert a.run(rpc.rpc_sync, b.name, add, (1, 2)) == 3
    for rank, folder in enumerate(folders):
        write(folder, new_ca, f"worker{rank}")
    assert a.run(rpc.rpc_sync, b.name, add, (3, 4)) == 7  # on the connection from before
    assert c.run(rpc.rpc_sync, a.name, add, (5, 6)) == 11  # on a new one
    shown = served_certificate(a.run(own_address), write(tmp_path / "other", new_ca, "other").identity(), a.name)
    shown.verify_directly_issued_by(new_ca.certificate)


def served_certificate(address: str, identity: Identity, worker: str) -> x509.Certificate:
    """Returns the certificate that a worker shows to a new connection."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        context = identity.client_context()
        with context.wrap_socket(connection, server_hostname=worker_host_name(worker)) as encrypted:
            der = encrypted.getpeercert(binary_form=True)
            assert der is not None
            return x509.load_der_x509_certificate(der)


def test_credentials_that_are_not_valid_fail_at_once(tmp_path: Path):
    def start(name: str, credentials: Credentials) -> None:
        url = f"file://{tmp_path / 'rendezvous'}"
        options = rpc.RpcBackendOptions(init_method=url, credentials=credentials)
        rpc.init_rpc(name, rank=0, world_size=2, rpc_backend_options=options)

    ca = make_authority()
    with pytest.raises(CredentialsError, match="not for worker 'a'"):
        start("a", write(tmp_path / "b", ca, "b"))
    with pytest.raises(CredentialsError, match="expired"):
        start("a", write(tmp_path / "a", ca, "a", EXPIRED))
    with pytest.raises(TypeError, match="credentials is of type str"):
        rpc.RpcBackendOptions(credentials=TOKEN)


def test_the_environment_has_the_credentials(workers):
    def join_with(token: str, name: str, rank: int, url: str) -> None:
        os.environ["GRADWIRE_TOKEN"] = token
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=rpc.RpcBackendOptions(init_method=url))

    a, b = workers(2)
    url = f"file://{workers.folder / 'rendezvous'}"
    pending = [worker.start(join_with, TOKEN, worker.name, rank, url) for rank, worker in enumerate((a, b))]
    for each in pending:
        each.result()
    assert a.run(rpc.rpc_sync, b.name, add, (1, 2)) == 3
    (c,) = workers(1)
    with pytest.raises(RendezvousError, match="is not sealed with this job's token"):
        c.run(join_with, OTHER_TOKEN, c.name, 1, url)


def test_a_certified_peer_that_speaks_tls_1_2_is_refused(workers):
    """gRPC cannot be told the version of TLS, so the test speaks HTTP/2 itself."""
    token = Credentials(token=TOKEN)
    a, b = start_workers(workers, [token, token])
    host, _, port = a.run(own_address).rpartition(":")
    request = grpc_request(EXCHANGE_METHOD, opening(EXCHANGE_METHOD, b.run(own_hello)))
    context = token.identity("worker1").client_context()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    connection = socket.create_connection((host, int(port)), 20)
    with context.wrap_socket(connection, server_hostname=worker_host_name("worker0")) as encrypted:
        encrypted.sendall(request)
        answer = data = encrypted.recv(4096)
        while data and b"does not use TLS 1.3" not in answer:
            data = encrypted.recv(4096)
            answer += data
        assert b"does not use TLS 1.3" in answer


@pytest.mark.parametrize(
    "address",
    [
        "unix:/tmp/x",
        "unix-abstract:x",
        "dns:///worker:1",
        "worker:1",
        "ipv4:127.0.0.1:1",
        "127.0.0.1",
        "127.0.0.1:0",
        "127.0.0.1:99999",
        "127.0.0.1:999999999999",
        "[::1:5",
        "::1]:5",
        "",
    ],
)
def test_addresses_that_are_no_tcp_address_are_not_dialled(address):
    """gRPC would connect to some of them without TLS, whoever listens there."""
    endpoint = GrpcEndpoint("agent0", Credentials(token=TOKEN))
    endpoint.reach = ListenAddress(None, any_host=True).reach
    with pytest.raises(UnsafePathError, match="is no numeric address and port"):
        endpoint.channel("agent1", address)


def test_numeric_addresses_are_dialled():
    where = ListenAddress(None, any_host=True)
    assert [where.reach(each) for each in ("10.0.0.7:40000", "[::1]:1")] == ["10.0.0.7:40000", "[::1]:1"]
