"""Why a connection by TLS to a server does not come about, in words; gRPC tries again and tells nothing."""

import socket
import ssl

from .identity import Identity
from .names import SHARED_HOST_NAME

__all__ = ["NO_CREDENTIALS_THERE", "tls_problem"]

_ALL = "all processes of a job need the same token, or certificates of one CA"

NO_CREDENTIALS_THERE = f"it has no credentials, and this process has; {_ALL}"

_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
"""What OpenSSL says of bytes that are no TLS."""


def tls_problem(host: str, port: int, identity: Identity | None, seconds: float) -> str:
    """Connects to a server of the job, and returns why this process cannot use it; empty if that is not known.

    This process has the identity, or no credentials if that is None, and waits so many seconds for the server.
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
