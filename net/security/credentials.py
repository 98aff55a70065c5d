"""Credentials of a job: a token that all processes share, or certificates of the job's CA."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ...errors import CredentialsError
from .identity import Identity

__all__ = ["Credentials"]

MIN_TOKEN_BITS = 128
"""The random bits that a token has at least, as far as its length and its characters tell."""

MIN_TOKEN_CHARACTERS = 8
"""How many different characters a token has at least. A random one of 128 bits has fewer once in 10**9."""

_ALPHABETS = (("decimal", "0123456789"), ("hexadecimal", "0123456789abcdefABCDEF"))

_PARTS = {"ca": "GRADWIRE_CA", "certificate": "GRADWIRE_CERTIFICATE", "key": "GRADWIRE_KEY"}


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Credentials:
    """What the processes of a job recognize each other by: either a token, or a CA with a certificate and its key.

    The certificates may be given as the path of a PEM file (str or Path), or as bytes in PEM. Files are read again
    when they have changed, for the connections that are made from then on.

    token: a secret of at least 128 random bits, the same in all processes; `gradwire certs token` makes
        one. Each process derives the key of the job's CA from it, and makes itself a certificate.
    ca: the certificates of the job's CA; more than one, while a CA is replaced by another.
    certificate: that of this process, followed by those of intermediate CAs if there are any.
    key: its private key, not encrypted.
    """

    token: str | None = None
    ca: str | Path | bytes | None = None
    certificate: str | Path | bytes | None = None
    key: str | Path | bytes | None = None

    def __post_init__(self) -> None:
        given = [name for name in _PARTS if getattr(self, name) is not None]
        if self.token is not None:
            if given:
                raise CredentialsError(f"credentials have a token and {given[0]}: give a token, or certificates")
            _check_token(self.token)
        elif missing := [name for name in _PARTS if name not in given]:
            raise CredentialsError(
                f"credentials have no {' and no '.join(missing)}: give a token, or ca, certificate and key"
            )
        for name in given:
            if not isinstance(value := getattr(self, name), str | Path | bytes) or not value:
                raise CredentialsError(f"{name} is of type {type(value).__name__}: give a path, or bytes in PEM")

    def __repr__(self) -> str:
        if self.token is not None:
            return "Credentials(token=...)"
        shown = ", ".join(f"{name}={_shown(getattr(self, name))}" for name in _PARTS)
        return f"Credentials({shown})"

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> "Credentials | None":
        """Returns the credentials that environment variables name; None if there are none.

        They are GRADWIRE_TOKEN, or GRADWIRE_TOKEN_FILE with the path of a file; or else GRADWIRE_CA,
        GRADWIRE_CERTIFICATE and GRADWIRE_KEY with the paths of PEM files. A variable that is empty is not set.

        Raises:
            CredentialsError: some variables are missing, or contradict each other, or the token is not valid.
        """
        values = {name: environment.get(name, "") for name in ("GRADWIRE_TOKEN", "GRADWIRE_TOKEN_FILE")}
        files = {name: environment.get(variable, "") for name, variable in _PARTS.items()}
        found = [variable for variable, value in values.items() if value]
        found += [variable for name, variable in _PARTS.items() if files[name]]
        if not found:
            return None
        if any(values.values()):
            if len(found) > 1:
                raise CredentialsError(
                    f"{' and '.join(found)} are set: set one of them, or only the certificates'"
                )
            return Credentials(token=values["GRADWIRE_TOKEN"] or _read_token(Path(values["GRADWIRE_TOKEN_FILE"])))
        if missing := [variable for name, variable in _PARTS.items() if not files[name]]:
            raise CredentialsError(f"{' and '.join(found)} without {' and '.join(missing)}: set all three")
        return Credentials(**files)

    def identity(self, worker: str | None = None) -> Identity:
        """Returns what this process shows and demands on connections.

        Args:
            worker: the name of this worker, for which its certificate must be; None for a process that has none,
                such as a rank of a process group or the host of a store.

        Raises:
            CredentialsError: a file cannot be read, the certificate is not valid, or not for this worker.
        """
        # Here, because what they import takes 50 ms that others need not spend.
        from .issuing import TokenSource
        from .material import PemSource

        if self.token is not None:
            return Identity(TokenSource(self.token, worker))
        assert self.ca is not None
        assert self.certificate is not None
        assert self.key is not None
        return Identity(PemSource(self.ca, self.certificate, self.key, worker))

    def derive_key(self, purpose: str, nbytes: int) -> bytes:
        """Returns a key that only those who know the token can compute; another one for each purpose.

        Raises:
            CredentialsError: there are certificates instead of a token.
        """
        from .issuing import derive_key

        if self.token is None:
            raise CredentialsError(f"a key for {purpose} needs a token: certificates share no secret")
        return derive_key(self.token, purpose, nbytes)


def _check_token(token: object) -> None:
    if not isinstance(token, str) or not token:
        raise CredentialsError(f"the token is of type {type(token).__name__}: give a str that is not empty")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise CredentialsError("the token has characters that are no printable ASCII, or spaces")
    alphabet, size = next(
        ((f" {name}", len(set(letters.lower()))) for name, letters in _ALPHABETS if set(token) <= set(letters)),
        ("", 64),
    )
    needed = math.ceil(MIN_TOKEN_BITS / math.log2(size))
    if len(token) < needed or len(set(token)) < MIN_TOKEN_CHARACTERS:
        raise CredentialsError(
            f"the token can be guessed: it has {len(token)}{alphabet} characters ({len(set(token))} different), "
            f"and needs {needed} ({MIN_TOKEN_CHARACTERS} different). Give one of {MIN_TOKEN_BITS} random bits or "
            "more, such as `gradwire certs token` prints"
        )


def _read_token(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise CredentialsError(f"the token file {str(path)!r} cannot be read: {reason}") from None


def _shown(value: str | Path | bytes) -> str:
    return "<bytes>" if isinstance(value, bytes) else repr(str(value))
