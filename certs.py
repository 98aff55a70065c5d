"""Makes the credentials of a job: a token, or a CA and certificates of its workers.

    python -m gradwire.certs token > token           # for GRADWIRE_TOKEN_FILE; a secret that all workers share
    python -m gradwire.certs ca DIR                  # or: makes DIR/ca.pem and DIR/ca-key.pem
    python -m gradwire.certs worker NAME --ca DIR    # makes DIR/NAME.pem and DIR/NAME-key.pem
    python -m gradwire.certs names NAME              # prints the DNS names that another CA has to certify

Files can be read and written by their owner only, and are not overwritten.
"""

import argparse
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from .c10d.security.issuing import Authority, Validity, key_pem
from .c10d.security.names import host_names
from .errors import CredentialsError, WorkerNameError
from .rpc.contracts.worker import check_worker_name

__all__ = ["main", "make_authority", "make_worker"]

CA_DAYS = 365.0
WORKER_DAYS = 30.0
MAX_DAYS = 36_500.0
TOKEN_BYTES = 32


def main(arguments: Sequence[str]) -> None:
    """Runs the command line."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (CredentialsError, WorkerNameError) as error:
        sys.exit(f"gradwire.certs: {error}")


def make_authority(folder: Path, days: float = CA_DAYS) -> list[Path]:
    """Makes a CA: `ca.pem`, which all workers get, and `ca-key.pem`, which none gets.

    Args:
        folder: where the files go; it is made if it does not exist.
        days: how long the CA is valid, and certificates at most.

    Returns:
        The two files.

    Raises:
        CredentialsError: the files exist or cannot be written.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    authority = Authority.create(key, Validity.days(days))
    certificate = authority.certificate.public_bytes(Encoding.PEM)
    return _write(folder, {"ca-key.pem": key_pem(key), "ca.pem": certificate}, replace=False)


def make_worker(
    worker: str, authority: Path, folder: Path, days: float = WORKER_DAYS, *, replace: bool = False
) -> list[Path]:
    """Makes the certificate of a worker, `WORKER.pem`, and its key, `WORKER-key.pem`.

    Args:
        worker: the name of the worker.
        authority: the folder of the CA.
        folder: where the files go; it is made if it does not exist.
        days: how long the certificate is valid.
        replace: whether files that exist are replaced. Workers that run use the new ones for new connections.

    Returns:
        The two files.

    Raises:
        CredentialsError: the CA cannot be read, the files exist or cannot be written, or the CA ends before.
        WorkerNameError: no worker can have this name.
    """
    check_worker_name(worker)
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


def _run_token(_options: argparse.Namespace) -> None:
    print(secrets.token_urlsafe(TOKEN_BYTES))


def _run_authority(options: argparse.Namespace) -> None:
    key, certificate = make_authority(options.folder, options.days)
    print(f"{certificate}: for all workers\n{key}: signs certificates; keep it away from the workers")


def _run_worker(options: argparse.Namespace) -> None:
    folder = options.out or options.ca
    key, certificate = make_worker(options.name, options.ca, folder, options.days, replace=options.replace)
    print(f"GRADWIRE_CA={options.ca / 'ca.pem'}\nGRADWIRE_CERTIFICATE={certificate}\nGRADWIRE_KEY={key}")


def _run_names(options: argparse.Namespace) -> None:
    print("\n".join(host_names(check_worker_name(options.name))))


def _days(text: str) -> float:
    days = float(text)
    if not 0 < days <= MAX_DAYS:
        raise argparse.ArgumentTypeError(f"{text} is not a number of days, more than 0 and at most {MAX_DAYS:g}")
    return days


def _parser() -> argparse.ArgumentParser:
    description, _, examples = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.certs",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    token = commands.add_parser("token", help="print a new token")
    token.set_defaults(run=_run_token)
    authority = commands.add_parser("ca", help="make a CA")
    authority.add_argument("folder", type=Path, metavar="DIR", help="where its files go")
    authority.add_argument("--days", type=_days, default=CA_DAYS, help="days of validity (default %(default)g)")
    authority.set_defaults(run=_run_authority)
    worker = commands.add_parser("worker", help="make a certificate of a worker")
    worker.add_argument("name", metavar="NAME", help="the name of the worker")
    worker.add_argument("--ca", type=Path, required=True, metavar="DIR", help="the folder of the CA")
    worker.add_argument("--out", type=Path, metavar="DIR", help="where its files go (default: the CA's folder)")
    worker.add_argument("--days", type=_days, default=WORKER_DAYS, help="days of validity (default %(default)g)")
    worker.add_argument("--replace", action="store_true", help="replace files that exist")
    worker.set_defaults(run=_run_worker)
    names = commands.add_parser("names", help="print the DNS names in a worker's certificate")
    names.add_argument("name", metavar="NAME", help="the name of the worker")
    names.set_defaults(run=_run_names)
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
