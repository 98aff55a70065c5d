"""What `gradwire doctor` says of the credentials in the environment."""

import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from pathlib import Path

from ..logs import VARIABLE as LOG_VARIABLE
from ..logs import parse_levels
from .findings import Finding, ok, problem, warning

__all__ = ["check_credentials"]

SECRET_FILES = ("GRADWIRE_TOKEN_FILE", "GRADWIRE_KEY")
CERTIFICATES = ("GRADWIRE_CA", "GRADWIRE_CERTIFICATE")
VARIABLES = (
    *SECRET_FILES,
    *CERTIFICATES,
    "GRADWIRE_ADVERTISED_HOST",
    "GRADWIRE_COMPAT",
    "GRADWIRE_HOST",
    "GRADWIRE_INSECURE",
    "GRADWIRE_LOG",
    "GRADWIRE_OTEL",
    "GRADWIRE_PORTS",
    "GRADWIRE_SPAWN_STORE",
    "GRADWIRE_STORE",
    "GRADWIRE_SUSPECT_AFTER",
    "GRADWIRE_TOKEN",
    "GRADWIRE_VIEW",
    "GRADWIRE_VIEW_KEY",
    "GRADWIRE_WORKER_NAME",
)
"""What gradwire reads from the environment, or sets in it."""

SOON = timedelta(days=2)
RENEW = "make another with `gradwire certs`; workers that run use it for new connections"


def check_credentials() -> Iterator[Finding]:
    """Yields which credentials there are, and whether they can be used."""
    from ..errors import CredentialsError
    from ..net.addresses import INSECURE_VARIABLE, allows_insecure
    from ..net.security import Credentials

    yield from _unknown_variables()
    try:
        parse_levels(os.environ.get(LOG_VARIABLE) or "warning")
    except ValueError as error:
        yield problem(LOG_VARIABLE, str(error), "correct it, or unset it: gradwire cannot be imported with it")
    try:
        if allows_insecure(insecure=False):
            text, advice = "process groups trust the network", "unset it where there are credentials"
            yield warning(INSECURE_VARIABLE, text, advice)
    except ValueError as error:
        yield problem(INSECURE_VARIABLE, str(error), "set it to 1, or unset it")
    try:
        credentials = Credentials.from_environment()
        if credentials is not None:
            credentials.identity()
    except CredentialsError as error:
        yield problem("credentials", str(error), "make others with `gradwire certs`, or unset the variables")
        return
    if credentials is None:
        yield ok("credentials", "none: for workers of one host only. For several hosts: gradwire certs token")
        return
    yield ok("credentials", "a token" if credentials.token is not None else "certificates")
    for variable in SECRET_FILES:
        if path := os.environ.get(variable):
            yield _check_private(variable, Path(path))
    for variable in CERTIFICATES:
        if path := os.environ.get(variable):
            yield _check_validity(variable, Path(path))


def _unknown_variables() -> Iterator[Finding]:
    for name in sorted(os.environ):
        if name.startswith("GRADWIRE_") and name not in VARIABLES:
            near = get_close_matches(name, VARIABLES, 1)
            advice = f"did you mean {near[0]}?" if near else "unset it"
            yield warning(name, "gradwire does not know this variable", advice)


def _check_private(variable: str, path: Path) -> Finding:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return warning(variable, f"{path} has mode {mode:04o}: others can use it", f"chmod 600 {path}")
    return ok(variable, f"{path}, for its owner only")


def _check_validity(variable: str, path: Path) -> Finding:
    """Returns until when certificates are valid; those of the past are refused by `Credentials.identity`."""
    from cryptography import x509

    end = min(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(path.read_bytes()))
    text = f"{path}, valid until {end:%Y-%m-%d %H:%M} UTC"
    if end < datetime.now(UTC):
        return problem(variable, text, RENEW)
    return warning(variable, text, RENEW) if end < datetime.now(UTC) + SOON else ok(variable, text)
