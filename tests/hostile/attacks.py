"""What strangers say to a listening socket, in the protocol of each listener of a job and in none."""

import asyncio
import os
import pickle
import re
import secrets
import ssl
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from cryptography import x509
from gradwire.c10d.stores.server import EXECUTE, POP
from gradwire.net.security import SHARED_HOST_NAME
from gradwire.proto.v1 import agent_pb2, store_pb2
from gradwire.rpc.contracts.messages import MessageType
from gradwire.rpc.transports.grpc_endpoint import EXCHANGE_METHOD, TRANSFER_METHOD, VOUCH_METHOD
from gradwire.rpc.transports.socket_frames import HEADER, FrameKind

from tests.net.http2 import PREFACE, data_in, grpc_request

__all__ = ["Attempt", "Outcome", "TlsClient", "attempt_all", "become", "openings", "served_serial_number"]

CLOSE_TIMEOUT_S = 45.0
"""Seconds after which a connection counts as one that stays open for ever."""

NOBODY = 65534

_ALERT = re.compile(rb"\A\x15\x03.\x00\x02..\Z", re.DOTALL)
"""The record (RFC 8446, section 6) with which TLS refuses what is in the clear. A peer that has sent more
gets it only at times."""


@dataclass(frozen=True, slots=True)
class TlsClient:
    """How a stranger speaks TLS: it takes every certificate for that of a server, and shows its own, if any.

    certificate: the certificate and its key, in PEM; empty for none.
    """

    certificate: bytes = b""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One connection.

    label: says in a failure which one it was.
    address: what to connect to.
    tls: how the connection is encrypted; None if it is not.
    said: the bytes that are sent once it stands.
    """

    label: tuple[str, ...]
    address: tuple[str, int] | str
    tls: TlsClient | None
    said: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a connection has ended.

    label, address: of the attempt.
    received: the bytes that the other end has sent, decrypted.
    is_closed: whether the other end has answered or closed it, or has never let it stand.
    reason: the error with which it ended, if any.
    seconds: for which it stood.
    """

    label: tuple[str, ...]
    address: tuple[str, int] | str
    received: bytes
    is_closed: bool
    reason: str
    seconds: float

    @property
    def answer(self) -> bytes:
        """What the other end has said, apart from what belongs to HTTP/2, and from an alert of TLS."""
        return data_in(_ALERT.sub(b"", self.received))


class _Canary:
    """Makes a directory where it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


def openings(hello: bytes, canary: str, nonce: bytes = b"", word: str = "", pmi_id: int = 1) -> dict[str, bytes]:
    """Returns what one may say on a new connection, by name. Wherever a pickle can be, there is a canary.

    Args:
        hello: of the worker as which the stranger introduces himself, serialized.
        canary: the directory that is made by whoever loads one of the pickles.
        nonce: what admits to a socket beside gRPC; a random one by default.
        word: what admits to the failure detector; a random one by default.
        pmi_id: what admits to PMI.
    """
    body = agent_pb2.Payload(inline=pickle.dumps(_Canary(canary)))
    kinds = (MessageType.CALL, MessageType.RREF_CREATE, MessageType.RESULT, MessageType.ERROR)
    envelopes = [agent_pb2.Envelope(id=1, type=kind, body=body) for kind in kinds]
    opening = agent_pb2.Hello.FromString(hello)
    question = agent_pb2.VouchRequest(
        group=opening.group, worker_name=opening.worker_name, member_id=opening.worker_id
    )
    frames = [
        agent_pb2.Frame(hello=opening),
        agent_pb2.Frame(choice=agent_pb2.SocketChoice()),
        agent_pb2.Frame(envelopes=envelopes),
    ]
    chunks = [
        agent_pb2.Chunks(hello=opening),
        agent_pb2.Chunks(chunks=[agent_pb2.Chunk(transfer_id=1, data=body.inline)]),
    ]
    contents = [each.SerializeToString() for each in envelopes]
    socket_frames = b"".join(HEADER.pack(len(each), FrameKind.ENVELOPE) + each for each in contents)
    return {
        "nothing": b"",
        "HTTP/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "HTTP/2": PREFACE,
        "stream": grpc_request(EXCHANGE_METHOD, *(each.SerializeToString() for each in frames)),
        "payloads": grpc_request(TRANSFER_METHOD, *(each.SerializeToString() for each in chunks)),
        "question": grpc_request(VOUCH_METHOD, question.SerializeToString()),
        "store": grpc_request(EXECUTE, store_pb2.Operation(kind=store_pb2.LIST_KEYS).SerializeToString()),
        "queue": grpc_request(POP, store_pb2.Operation(kind=store_pb2.QUEUE_POP, keys=["q"]).SerializeToString()),
        "socket": (nonce or secrets.token_bytes(32)) + socket_frames,
        "failure detector": f"{word or secrets.token_hex(16)} 1\n".encode(),
        "PMI": f"cmd=initack pmiid={pmi_id}\ncmd=get kvsname=x key=PMI_process_mapping\n".encode(),
        "many empty messages": bytes(32) + b"\x0a\x00" * (1 << 19),
    }


# What follows runs in the process of a stranger.


def become(user: int = NOBODY) -> None:
    """Has this process go on as another user."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def attempt_all(attempts: Sequence[Attempt]) -> list[Outcome]:
    """Makes all attempts at once; each ends when the other end answers or closes it, or after CLOSE_TIMEOUT_S."""

    async def attempt_each() -> list[Outcome]:
        return await asyncio.gather(*map(_attempt, attempts))

    return asyncio.run(attempt_each())


async def _attempt(attempt: Attempt) -> Outcome:
    received, reason, is_closed = b"", "", True
    began = time.monotonic()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            reader, writer = await _connect(attempt.address, attempt.tls)
            try:
                writer.write(attempt.said)
                while not data_in(received) and (data := await reader.read(1 << 16)):
                    received += data
            finally:
                writer.transport.abort()
    except TimeoutError:
        is_closed = False
    except OSError as error:  # which those of TLS are
        reason = repr(error)
    return Outcome(attempt.label, attempt.address, received, is_closed, reason, time.monotonic() - began)


async def _connect(
    address: tuple[str, int] | str, tls: TlsClient | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    options: dict[str, Any] = {}
    if tls is not None:
        options = {
            "ssl": _context(tls),
            "server_hostname": SHARED_HOST_NAME,
            "ssl_handshake_timeout": CLOSE_TIMEOUT_S,
        }
    if isinstance(address, str):
        return await asyncio.open_unix_connection(address, **options)
    return await asyncio.open_connection(*address, **options)


@cache
def _context(tls: TlsClient) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # gRPC demands it
    if tls.certificate:
        with tempfile.NamedTemporaryFile() as file:
            file.write(tls.certificate)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def served_serial_number(address: tuple[str, int]) -> int:
    """Returns the serial number of the certificate that a listener shows to a new connection."""

    async def ask() -> bytes:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            while True:
                with suppress(ConnectionError, ssl.SSLError):  # this process was too slow, and has been cut off
                    _, writer = await _connect(address, TlsClient())
                    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                    writer.transport.abort()
                    return bytes(certificate)

    return x509.load_der_x509_certificate(asyncio.run(ask())).serial_number
