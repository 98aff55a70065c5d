"""The host names in certificates, which say whose they are.

TLS libraries compare the host name of a server with the subject alternative names of its certificate, so that the
host that dials a worker needs nothing else to check that it is that worker. These names do not resolve: no host of
the top-level domain `invalid` exists (RFC 6761).
"""

import hashlib
import re
from base64 import b32encode
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

__all__ = ["SHARED_HOST_NAME", "certified_names", "grpc_certified_names", "host_names", "worker_host_name"]

SHARED_HOST_NAME = "gradwire.invalid"
"""The name in the certificates of all processes of a job; those without a worker name have no other."""

_PLAIN = re.compile(r"(?!x--)[a-z0-9_-]{1,48}")
"""Worker names that are used as they are. Host names are compared without regard to case, and dots divide them."""


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
