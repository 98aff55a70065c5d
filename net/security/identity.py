"""The identity of a process on its connections, for the ssl module and for gRPC, and the host names that it shows.

TLS libraries compare the host name of a server with the subject alternative names of its certificate, so that the
host that dials a worker needs nothing else to check that it is that worker. These names do not resolve: no host of
the top-level domain `invalid` exists (RFC 6761).
"""

import hashlib
import os
import re
import socket
import ssl
import threading
from base64 import b32encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, final

import grpc

__all__ = [
    "NO_CREDENTIALS_THERE",
    "SHARED_HOST_NAME",
    "Identity",
    "Material",
    "Source",
    "certified_names",
    "grpc_certified_names",
    "host_names",
    "tls_problem",
    "worker_host_name",
]

SHARED_HOST_NAME = "gradwire.invalid"
"""The name in the certificates of all processes of a job; those without a worker name have no other."""

_PLAIN = re.compile(r"(?!x--)[a-z0-9_-]{1,48}")
"""Worker names that are used as they are. Host names are compared without regard to case, and dots divide them."""

_ALL = "all processes of a job need the same token, or certificates of one CA"

NO_CREDENTIALS_THERE = f"it has no credentials, and this process has; {_ALL}"

_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
"""What OpenSSL says of bytes that are no TLS."""


def worker_host_name(worker: str) -> str:
    """Returns the host name in the certificate of a worker, another one for each worker name.

    It is `NAME.worker.gradwire.invalid`. In place of a NAME of more than 48 characters, or with others than
    lower-case letters, digits, `-` and `_`, it has a hash of the name.
    """
    label = worker
    if not _PLAIN.fullmatch(worker):
        label = "x--" + b32encode(hashlib.sha256(worker.encode()).digest()).decode().rstrip("=").lower()
    return f"{label}.worker.{SHARED_HOST_NAME}"


def host_names(worker: str | None) -> list[str]:
    """Returns all host names that a certificate has, of a worker or of a process without a worker name."""
    return [SHARED_HOST_NAME] if worker is None else [SHARED_HOST_NAME, worker_host_name(worker)]


def certified_names(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """Returns the host names in the certificate of a peer, as `ssl.SSLSocket.getpeercert` returns it."""
    return frozenset(value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "DNS")


def grpc_certified_names(context: Mapping[str, Any]) -> frozenset[str]:
    """Returns the host names in the certificate of a peer, by the `auth_context` of a gRPC call.

    What gRPC lists as its names has other kinds as well, such as URIs, which some CAs let everybody choose.
    """
    return _dns_names(next(iter(context.get("x509_pem_cert", ())), b""))


@lru_cache(maxsize=1024)
def _dns_names(pem: bytes) -> frozenset[str]:
    from cryptography import x509  # here, because it is needed with credentials only

    try:
        extensions = x509.load_pem_x509_certificate(pem).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return frozenset()
    return frozenset(names.get_values_for_type(x509.DNSName))


@final
@dataclass(frozen=True, slots=True, repr=False)
class Material:
    """What TLS needs, all in PEM: certificates of the CA, those of the process, and its private key."""

    ca: bytes
    certificate: bytes
    key: bytes


class Source(Protocol):
    """Where the certificate of a process comes from. Called on any thread."""

    def current(self) -> Material:
        """Returns what connections that are made now use: the same object as long as it has not changed."""


@final
class Identity:
    """What a process shows and demands on connections. Ask again for each connection, as files may change.

    All connections are TLS 1.3, and both sides show a certificate that the job's CA has signed. The dialling side
    demands a name, by `server_hostname` or gRPC's `grpc.ssl_target_name_override`: `worker_host_name(worker)`, or
    SHARED_HOST_NAME for any process of the job. The accepting side looks at the names of the peer's certificate.
    All methods may be called on any thread.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._contexts: dict[int, ssl.SSLContext] = {}
        """By protocol, made of `_used`."""
        self._used: Material | None = None

    def server_context(self) -> ssl.SSLContext:
        """Returns the context for connections that this process accepts."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def page_context(self) -> ssl.SSLContext:
        """Returns a context to serve pages to browsers, which show no certificate: a secret has to admit them."""
        context = _make_context(ssl.PROTOCOL_TLS_SERVER, self._source.current())
        context.verify_mode = ssl.CERT_NONE
        return context

    def client_context(self) -> ssl.SSLContext:
        """Returns the context for connections that this process makes. They need a `server_hostname`."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def grpc_server_credentials(self, on_connection: Callable[[], None] = lambda: None) -> grpc.ServerCredentials:
        """Returns the credentials of a gRPC server, which look for new files at each connection.

        Args:
            on_connection: called on any thread when a connection is about to be authenticated. gRPC does not tell
                where it comes from, nor whether it is refused.
        """
        material = self._source.current()
        given = [material]

        def changed() -> Any:  # None if nothing has, which the type stubs lack
            on_connection()
            if (material := self._source.current()) is given[0]:
                return None
            given[0] = material
            return _certificate_configuration(material)

        return grpc.dynamic_ssl_server_credentials(
            _certificate_configuration(material), changed, require_client_authentication=True
        )

    def grpc_channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of a gRPC channel that is made now."""
        material = self._source.current()
        return grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)

    def _context(self, protocol: int) -> ssl.SSLContext:
        material = self._source.current()
        with self._lock:
            if material is not self._used:
                self._contexts.clear()
                self._used = material
            if protocol not in self._contexts:
                self._contexts[protocol] = _make_context(protocol, material)
            return self._contexts[protocol]


def _make_context(protocol: int, material: Material) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each connection shows the certificates anew
    context.load_verify_locations(cadata=material.ca.decode("ascii"))
    memory = os.memfd_create("gradwire-certificate", os.MFD_CLOEXEC)  # ssl reads certificates from files only
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(material.certificate + b"\n" + material.key)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


def _certificate_configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    pair = (material.key, material.certificate)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=material.ca)


def tls_problem(host: str, port: int, identity: Identity | None, seconds: float) -> str:
    """Connects to a server of the job, and returns why this process cannot use it; empty if that is not known.

    This process has the identity, or no credentials if that is None, and waits so many seconds for the server.
    gRPC itself only tries again, and tells nothing.
    """
    context = _any_server() if identity is None else identity.client_context()
    try:
        with socket.create_connection((host, port), seconds) as connection:
            connection.settimeout(seconds)
            with context.wrap_socket(connection, server_hostname=SHARED_HOST_NAME) as encrypted:
                if identity is None:
                    return "it demands credentials, and this process has none (GRADWIRE_TOKEN or credentials=)"
                encrypted.recv(1)  # in TLS 1.3, a client hears after its handshake whether the server accepts it
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not of this job ({error.verify_message}); {_ALL}"
    except ssl.SSLError as error:
        if identity is not None and error.reason in _NOT_TLS:
            return NO_CREDENTIALS_THERE
        if identity is not None and "ALERT" in (error.reason or ""):
            return f"it does not accept the certificate of this process ({error.reason}); {_ALL}"
    except OSError:
        pass  # nobody listens there, or nothing comes from there
    return ""


def _any_server() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
