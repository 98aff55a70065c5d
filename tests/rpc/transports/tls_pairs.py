"""Two ends of a connection with TLS in one process, for tests."""

import asyncio
import functools
import socket
from datetime import UTC, datetime, timedelta

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from gradwire.c10d import Credentials
from gradwire.net.security import Identity, worker_host_name
from gradwire.net.security.issuing import Authority, Validity
from gradwire.rpc.transports.tls_socket import TlsSocket

__all__ = ["TOKEN", "authority", "certified", "expired", "identity_of", "tls_pair"]

TOKEN = "Kq8vY0m3Zt5nWc1xRb7uEj2s"


def authority() -> Authority:
    """Makes a CA."""
    return Authority.create(ec.generate_private_key(ec.SECP256R1()), Validity.days(1))


def certified(ca: Authority, worker: str) -> Credentials:
    """Returns credentials with a new certificate of a worker."""
    certificate, key = ca.issue(worker, Validity.days(1))
    return Credentials(ca=ca.certificate.public_bytes(Encoding.PEM), certificate=certificate, key=key)


def expired(ca: Authority, worker: str, monkeypatch) -> Identity:
    """Returns the identity of a worker whose certificate has expired."""
    now = datetime.now(UTC)
    certificate, key = ca.issue(worker, Validity(now - timedelta(days=2), now - timedelta(days=1)))
    credentials = Credentials(ca=ca.certificate.public_bytes(Encoding.PEM), certificate=certificate, key=key)
    with monkeypatch.context() as patched:
        patched.setattr("gradwire.net.security.material.datetime", _Clock(now - timedelta(days=1.5)))
        return credentials.identity(worker)


class _Clock:
    """Stands for the module datetime, at an earlier time."""

    UTC = UTC

    def __init__(self, now: datetime) -> None:
        self.datetime = self
        self._now = now

    def now(self, _zone: object) -> datetime:
        return self._now


@functools.cache
def identity_of(worker: str) -> Identity:
    """Returns the identity of a worker of the job whose token is TOKEN."""
    return Credentials(token=TOKEN).identity(worker)


def tls_pair(ours: socket.socket | None = None, theirs: socket.socket | None = None) -> list[TlsSocket]:
    """Connects two ends, of which the first has accepted the connection.

    Args:
        ours: the socket of the first; both are the ends of a new socket pair by default.
        theirs: the other one.
    """
    if ours is None or theirs is None:
        ours, theirs = socket.socketpair()
    ends = [
        TlsSocket(ours, identity_of("a").server_context(), None),
        TlsSocket(theirs, identity_of("b").client_context(), worker_host_name("a")),
    ]

    async def connect() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(asyncio.gather(*(end.handshake(loop) for end in ends)), 20)

    asyncio.run(connect())
    return ends
