"""Making a CA, and certificates that it signs; from a token, every process derives the same CA.

Anybody who connects to a process sees its certificate, and can try tokens on that without being noticed. So only
the number of possible tokens protects a job.
"""

import datetime
from dataclasses import dataclass
from typing import final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .identity import Material, host_names

__all__ = ["Authority", "TokenSource", "Validity", "derive_key", "key_pem"]

_COMMON_NAME_LIMIT = 64

_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@dataclass(frozen=True, slots=True)
class Validity:
    """When a certificate is valid: both times in UTC."""

    start: datetime.datetime
    end: datetime.datetime

    @classmethod
    def days(cls, days: float) -> "Validity":
        """Returns a validity of some days from now. It begins an hour ago, as the clocks of hosts differ."""
        now = datetime.datetime.now(datetime.UTC)
        return cls(now - datetime.timedelta(hours=1), now + datetime.timedelta(days=days))


ALWAYS = Validity(
    datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC),
)
"""For certificates that need not expire, because who has made them can make others at any time."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class Authority:
    """A CA: its certificate and its private key."""

    certificate: x509.Certificate
    key: CertificateIssuerPrivateKeyTypes

    @classmethod
    def create(cls, key: ec.EllipticCurvePrivateKey, validity: Validity) -> "Authority":
        """Makes a CA with this key."""
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        name = _name(f"gradwire job {identifier.digest.hex()[:16]}")
        builder = _builder(name, name, key.public_key(), validity)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
        builder = builder.add_extension(identifier, critical=False)
        return cls(builder.sign(key, hashes.SHA256()), key)

    def issue(self, worker: str | None, validity: Validity) -> tuple[bytes, bytes]:
        """Makes a certificate of a worker, or of a process without a name; returns it and its key, in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName(each) for each in host_names(worker)])
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        subject = _name((worker or "gradwire")[:_COMMON_NAME_LIMIT])
        builder = _builder(subject, self.certificate.subject, key.public_key(), validity)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(purposes, critical=False)
        builder = builder.add_extension(names, critical=False)
        builder = builder.add_extension(issuer_key, critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        return certificate.public_bytes(Encoding.PEM), key_pem(key)


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


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Returns a private key in PEM, not encrypted."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, validity: Validity
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(validity.start)
        .not_valid_after(validity.end)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
