"""The identity of a process on its connections, for the ssl module and for gRPC."""

import os
import ssl
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import grpc

if TYPE_CHECKING:  # what it imports is loaded where there are credentials only
    from .material import Material, Source

__all__ = ["Identity"]


@final
class Identity:
    """What a process shows and demands on connections. Ask again for each connection, as files may change.

    All connections are TLS 1.3, and both sides show a certificate that the job's CA has signed. The dialling side
    demands a name, by `server_hostname` or gRPC's `grpc.ssl_target_name_override`: `worker_host_name(worker)`, or
    SHARED_HOST_NAME for any process of the job. The accepting side looks at the names of the peer's certificate.
    All methods may be called on any thread.
    """

    def __init__(self, source: "Source") -> None:
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


def _make_context(protocol: int, material: "Material") -> ssl.SSLContext:
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


def _certificate_configuration(material: "Material") -> grpc.ServerCertificateConfiguration:
    pair = (material.key, material.certificate)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=material.ca)
