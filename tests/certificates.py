"""Credentials for tests: tokens, and certificates that are right, expired, or of another CA."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from gradwire.net.security import Credentials
from gradwire.net.security.issuing import Authority, Validity

__all__ = ["EXPIRED", "OTHER_TOKEN", "TOKEN", "ca_pem", "make_authority", "write"]

TOKEN = "Kq8vY0m3Zt5nWc1xRb7uEj2s"
OTHER_TOKEN = "pL4gT9wHs6dVf0yNx3aQz8Cm"
EXPIRED = Validity(datetime.now(UTC) - timedelta(days=2), datetime.now(UTC) - timedelta(days=1))


def make_authority() -> Authority:
    """Makes a CA that is valid for a day."""
    return Authority.create(ec.generate_private_key(ec.SECP256R1()), Validity.days(1))


def ca_pem(authority: Authority) -> bytes:
    """Returns the certificate of a CA."""
    return authority.certificate.public_bytes(Encoding.PEM)


def write(folder: Path, authority: Authority, worker: str | None, validity: Validity | None = None) -> Credentials:
    """Writes a new certificate of a worker into a folder, as other files in place of those before."""
    certificate, key = authority.issue(worker, validity or Validity.days(1))
    folder.mkdir(exist_ok=True)
    for name, data in {"ca": ca_pem(authority), "key": key, "certificate": certificate}.items():
        (folder / "new").write_bytes(data)
        (folder / "new").rename(folder / name)
    return Credentials(ca=folder / "ca", certificate=folder / "certificate", key=folder / "key")
