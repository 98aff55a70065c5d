"""Who may see the page: whoever has its key. It is in a link that only the user of the worker can read."""

import hmac
import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, final
from urllib.parse import parse_qs, urlsplit

from ..net.user_sockets import SocketDirectory, link_file_name

if TYPE_CHECKING:  # it needs torch, which takes seconds
    from ..net.security.credentials import Credentials

__all__ = ["KEY_PARAMETER", "KEY_VARIABLE", "LinkFile", "PageKey"]

KEY_PARAMETER = "key"
KEY_VARIABLE = "GRADWIRE_VIEW_KEY"
"""The environment variable in which clients find the key. Of a process, only its own user can read that."""

MAX_LINK_BYTES = 4096
KEY_BYTES = 16
PURPOSE = "view key"


@final
class PageKey:
    """The key of a page. All pages of a job with a token have the same key; others have random ones."""

    def __init__(self, credentials: "Credentials | None") -> None:
        """Args: credentials: of the job; None if it has none."""
        if credentials is not None and credentials.token is not None:
            self.text = credentials.derive_key(PURPOSE, KEY_BYTES).hex()
        else:
            self.text = secrets.token_hex(KEY_BYTES)

    def admits(self, query: bytes, authorization: bytes) -> bool:
        """Returns whether a request has the key, in the query of its URL or as "Bearer " and the key."""
        given = parse_qs(query.decode("latin-1"), max_num_fields=8).get(KEY_PARAMETER, [""])[0]
        if not given and authorization.startswith(b"Bearer "):
            given = authorization[len(b"Bearer ") :].decode("latin-1")
        return hmac.compare_digest(given.encode(), self.text.encode())


@final
class LinkFile:
    """The link to a page with its key, in a file that only this user can read. Clients find it by the port."""

    def __init__(self, port: int) -> None:
        """Opens the directory of this user.

        Raises:
            UnsafePathError: there is no directory that only this user can use.
        """
        self._directory = SocketDirectory.of_this_user()
        self._name = link_file_name(port)
        self.path = f"{self._directory.path}/{self._name}"
        """Where the file is, for people."""

    def write(self, link: str) -> None:
        """Writes the link of a page that has just begun to listen; that of an earlier one is replaced.

        Raises:
            OSError: it cannot be written.
        """
        new = f"{self._directory.by_descriptor}/{self._name}.{os.getpid()}"
        with suppress(FileNotFoundError):
            os.unlink(new)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{link}\n")
        os.replace(new, f"{self._directory.by_descriptor}/{self._name}")

    def remove(self, link: str) -> None:
        """Removes the file if it still has this link."""
        if self._text() == link:
            with suppress(FileNotFoundError):
                os.unlink(f"{self._directory.by_descriptor}/{self._name}")

    def key(self) -> str:
        """Returns the key in the link; an empty text if there is none."""
        return parse_qs(urlsplit(self._text()).query).get(KEY_PARAMETER, [""])[0]

    def _text(self) -> str:
        with suppress(FileNotFoundError), open(f"{self._directory.by_descriptor}/{self._name}") as file:
            return file.read(MAX_LINK_BYTES).strip()
        return ""
