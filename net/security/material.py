"""A certificate with its key and its CA, from files or from memory, and whether they can be used together."""

import datetime
import logging
import os
import threading
from pathlib import Path
from typing import final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from ...errors import CredentialsError
from .identity import SHARED_HOST_NAME, Material, host_names, worker_host_name

__all__ = ["PemSource"]

Pem = str | Path | bytes
"""The path of a PEM file, or what is in it."""

MAX_FILE_BYTES = 1 << 20
"""Bytes of the largest file that is read."""

MAX_CHAIN = 8
"""The number of CAs between a certificate and the job's CA, at most."""

log = logging.getLogger(__name__)


@final
class PemSource:
    """A certificate in files that may be replaced, or in memory."""

    def __init__(self, ca: Pem, certificate: Pem, key: Pem, worker: str | None) -> None:
        """Reads the files.

        Raises:
            CredentialsError: as `Credentials.identity`.
        """
        self._parts = {"ca": ca, "certificate": certificate, "key": key}
        self._worker = worker
        self._lock = threading.Lock()
        self._versions = self._read_versions()
        self._material = self._load()

    def current(self) -> Material:
        """Returns what is in the files. What they had before, as long as that is not valid."""
        with self._lock:
            if (versions := self._read_versions()) != self._versions:
                try:
                    self._material = self._load()
                except CredentialsError as error:  # such as a new certificate whose key is not written yet
                    log.warning("new connections use the certificate from before: %s", error)
                self._versions = versions
            return self._material

    def _read_versions(self) -> list[tuple[int, int, int] | None]:
        return [_version(part) for part in self._parts.values()]

    def _load(self) -> Material:
        data = {name: _read(name, part) for name, part in self._parts.items()}
        return _checked(data, {name: _described(part) for name, part in self._parts.items()}, self._worker)


def _version(part: Pem) -> tuple[int, int, int] | None:
    """Returns what changes when a file is replaced or written to; None if it is not there, or no file."""
    if isinstance(part, bytes):
        return None
    try:
        found = os.stat(part)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read(name: str, part: Pem) -> bytes:
    if isinstance(part, bytes):
        return part
    try:
        with open(part, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CredentialsError(f"the {name} file {str(part)!r} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise CredentialsError(f"the {name} file {str(part)!r} has more than {MAX_FILE_BYTES} bytes")
    return data


def _described(part: Pem) -> str:
    return "in memory" if isinstance(part, bytes) else f"in {str(part)!r}"


def _checked(data: dict[str, bytes], where: dict[str, str], worker: str | None) -> Material:
    """Returns what is in the files. Raises CredentialsError if its parts do not fit each other, or the worker."""
    authorities = _certificates(data["ca"], f"the CA {where['ca']}")
    shown = f"the certificate {where['certificate']}"
    certificate, *others = _certificates(data["certificate"], shown)
    try:
        key = load_pem_private_key(data["key"], None)
    except TypeError:
        raise CredentialsError(f"the key {where['key']} is encrypted: give one without a passphrase") from None
    except Exception:  # what cryptography raises may quote what it has read
        raise CredentialsError(f"the key {where['key']} is not a private key in PEM") from None
    if _public_bytes(key.public_key()) != _public_bytes(certificate.public_key()):
        raise CredentialsError(f"the key {where['key']} does not belong to {shown}")
    now = datetime.datetime.now(datetime.UTC)
    if certificate.not_valid_after_utc < now:
        raise CredentialsError(f"{shown} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if certificate.not_valid_before_utc > now:
        raise CredentialsError(f"{shown} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on")
    if not _is_signed_by(certificate, others, authorities):
        raise CredentialsError(f"{shown} is not signed by the CA {where['ca']}")
    _check_purposes(certificate, shown)
    _check_names(certificate, shown, worker)
    return Material(_pem(authorities), _pem([certificate, *others]), data["key"])


def _certificates(pem: bytes, shown: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise CredentialsError(f"{shown} is not in PEM") from None


def _pem(certificates: list[x509.Certificate]) -> bytes:
    """Returns certificates in PEM, without the comments that files may have."""
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


def _public_bytes(key: object) -> bytes:
    encoded: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    return encoded


def _is_signed_by(
    certificate: x509.Certificate, others: list[x509.Certificate], authorities: list[x509.Certificate]
) -> bool:
    """Returns whether a chain of signatures leads from an authority by way of the others to a certificate."""
    for _ in range(MAX_CHAIN):
        if any(_issued(authority, certificate) for authority in authorities):
            return True
        above = next((other for other in others if other != certificate and _issued(other, certificate)), None)
        if above is None:
            return False
        certificate = above
    return False


def _issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_purposes(certificate: x509.Certificate, shown: str) -> None:
    try:
        purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return  # it is for all
    for purpose, name in (
        (ExtendedKeyUsageOID.SERVER_AUTH, "server"),
        (ExtendedKeyUsageOID.CLIENT_AUTH, "client"),
    ):
        if purpose not in purposes:
            raise CredentialsError(
                f"{shown} is not for {name} authentication (extended key usage): workers need it for both, "
                "server and client"
            )


def _check_names(certificate: x509.Certificate, shown: str, worker: str | None) -> None:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = extension.value.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        names = []
    missing = [name for name in host_names(worker) if name not in names]
    if not missing:
        return
    listed = ", ".join(names) or "none"
    if worker is not None and missing == [worker_host_name(worker)]:
        raise CredentialsError(
            f"{shown} is not for worker {worker!r}: it is for {listed}, and not for {missing[0]}. Each worker "
            "needs a certificate of its own"
        )
    raise CredentialsError(
        f"{shown} is not for gradwire: among its DNS names ({listed}) is no {SHARED_HOST_NAME}; `gradwire "
        "certs names WORKER` prints those that it needs"
    )
