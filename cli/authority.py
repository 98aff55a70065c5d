"""Makes the files of a CA, and of the workers that it certifies. Only their owner can read and write them."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from ..errors import CredentialsError
from ..net.peer_text import problem_of_name
from ..net.security.issuing import Authority, Validity, key_pem

__all__ = ["make_authority", "make_worker"]


def make_authority(folder: Path, days: float) -> list[Path]:
    """Makes a CA: `ca.pem`, which all workers get, and `ca-key.pem`, which none gets; returns the key first.

    The folder is made if it does not exist. Certificates are valid as long as the CA at most.

    Raises:
        CredentialsError: the files exist or cannot be written.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    authority = Authority.create(key, Validity.days(days))
    certificate = authority.certificate.public_bytes(Encoding.PEM)
    return _write(folder, {"ca-key.pem": key_pem(key), "ca.pem": certificate}, replace=False)


def make_worker(worker: str, authority: Path, folder: Path, days: float, *, replace: bool = False) -> list[Path]:
    """Makes the key of a worker, `WORKER-key.pem`, and its certificate, `WORKER.pem`; returns both files.

    Args:
        worker: its name.
        authority: the folder of the CA.
        folder: where the files go; it is made if it does not exist.
        days: how long the certificate is valid.
        replace: whether files that exist are replaced.

    Raises:
        CredentialsError: the CA cannot be read, the files exist or cannot be written, the CA ends before, or no
            worker can have this name.
    """
    if problem := problem_of_name(worker):
        raise CredentialsError(f"{problem}, but it is {worker!r}")
    issuer, validity = _read_authority(authority), Validity.days(days)
    if (end := issuer.certificate.not_valid_after_utc) < validity.end:
        raise CredentialsError(f"{days:g} days are too long: the CA in {str(authority)!r} is valid until {end}")
    certificate, key = issuer.issue(worker, validity)
    return _write(folder, {f"{worker}-key.pem": key, f"{worker}.pem": certificate}, replace=replace)


def _read_authority(folder: Path) -> Authority:
    try:
        certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        key = load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
    except OSError as error:
        raise CredentialsError(f"the CA cannot be read: {error.strerror}: {error.filename!r}") from None
    except (ValueError, TypeError):
        raise CredentialsError(
            f"ca.pem and ca-key.pem in {str(folder)!r} are no certificate and key in PEM"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise CredentialsError(f"ca-key.pem in {str(folder)!r} is not the key of ca.pem")
    return Authority(certificate, key)


def _write(folder: Path, files: Mapping[str, bytes], *, replace: bool) -> list[Path]:
    """Writes all files or none, each in one step, as workers may be reading them."""
    targets = [folder / name for name in files]
    if not replace and (existing := next((target for target in targets if target.exists()), None)):
        raise CredentialsError(f"{str(existing)!r} exists, and is not overwritten")
    written: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in files.items():
            made = folder / f".{name}.{secrets.token_hex(8)}"
            with open(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                written.append(made)
                file.write(data)
        for made, target in zip(written, targets, strict=True):
            made.rename(target)
    except OSError as error:
        raise CredentialsError(f"{error.filename!r} cannot be written: {error.strerror}") from None
    finally:
        for made in written:
            made.unlink(missing_ok=True)
    return targets
