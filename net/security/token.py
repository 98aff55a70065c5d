"""Certificates from a token: every process derives the same CA from it, and makes itself a certificate.

Anybody who connects to a process sees its certificate, and can try tokens on that without being noticed. So only
the number of possible tokens protects a job.
"""

from typing import final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding

from .issuing import ALWAYS, Authority
from .material import Material

__all__ = ["TokenSource", "derive_key"]

_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@final
class TokenSource:
    """The certificate that a process has made itself from a token."""

    def __init__(self, token: str, worker: str | None) -> None:
        # 128 bits more than the order has, so that the remainder is as good as uniform.
        secret = int.from_bytes(derive_key(token, "CA key", 48))
        authority = Authority.create(ec.derive_private_key(secret % (_P256_ORDER - 1) + 1, ec.SECP256R1()), ALWAYS)
        self._material = Material(
            authority.certificate.public_bytes(Encoding.PEM), *authority.issue(worker, ALWAYS)
        )

    def current(self) -> Material:
        """Returns the certificate, always the same."""
        return self._material


def derive_key(token: str, purpose: str, nbytes: int) -> bytes:
    """Returns a key that only those who know the token can compute; another one for each purpose."""
    kdf = HKDF(algorithm=hashes.SHA256(), length=nbytes, salt=None, info=f"gradwire 1 {purpose}".encode())
    return kdf.derive(token.encode())
