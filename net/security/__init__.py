"""Credentials: with them, processes of one job recognize each other, and encrypt their connections by TLS 1.3.

All processes of a job either share a token, or have certificates of the job's CA. Either way, each process has a
certificate, and connections are authenticated in both directions. The certificate of a worker has the worker's
name, so that no other worker can pose as it.

    credentials = Credentials.from_environment()
    identity = credentials.identity("worker0")
    server = identity.server_context()                  # an ssl.SSLContext, for a connection that is accepted now
    client = identity.client_context()                  # for one to worker1:
    client.wrap_socket(connection, server_hostname=worker_host_name("worker1"))

What listens records in an Audit who connects and who is let in.

This package imports nothing of gradwire but errors, and how texts of others are shown.
"""

from ..peer_text import printable, printable_lines
from .audit import Audit, AuditEvent
from .credentials import Credentials
from .identity import (
    NO_CREDENTIALS_THERE,
    SHARED_HOST_NAME,
    Identity,
    certified_names,
    grpc_certified_names,
    tls_problem,
    worker_host_name,
)

__all__ = [
    "NO_CREDENTIALS_THERE",
    "SHARED_HOST_NAME",
    "Audit",
    "AuditEvent",
    "Credentials",
    "Identity",
    "certified_names",
    "grpc_certified_names",
    "printable",
    "printable_lines",
    "tls_problem",
    "worker_host_name",
]
