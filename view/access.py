"""Access to the page: whoever has its key may see it. It is in a link that only the user of the worker can read.

This module needs no torch, so that clients start at once.
"""

import hmac
import http.client
import ipaddress
import json
import os
import secrets
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final
from urllib.parse import parse_qs, urlsplit

import psutil  # net.addresses needs torch, which takes seconds

from ..net.peer_text import printable
from ..net.user_sockets import SocketDirectory, link_file_name

if TYPE_CHECKING:  # it needs torch, which takes seconds
    from ..net.security.credentials import Credentials

__all__ = ["KEY_PARAMETER", "LinkFile", "PageClient", "PageKey"]


KEY_PARAMETER = "key"
KEY_VARIABLE = "GRADWIRE_VIEW_KEY"
"""The environment variable in which clients find the key. Of a process, only its own user can read that."""

MAX_LINK_BYTES = 4096
KEY_BYTES = 16
PURPOSE = "view key"

MAX_ANSWER_BYTES = 64 << 20


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


class _Connection(http.client.HTTPSConnection):
    """A connection that demands the certificate of any process of the job."""

    def connect(self) -> None:
        from ..net.security.identity import SHARED_HOST_NAME

        http.client.HTTPConnection.connect(self)
        context: ssl.SSLContext = self._context  # type: ignore[attr-defined]
        self.sock = context.wrap_socket(self.sock, server_hostname=SHARED_HOST_NAME)


@final
class PageClient:
    """Asks the page at one URL."""

    def __init__(self, url: str, credentials: "Credentials | None", timeout: float = 10.0) -> None:
        """Connects to nothing yet.

        Args:
            url: that a worker has logged, without the key. The key is that of GRADWIRE_VIEW_KEY, or is derived
                from the token of the credentials, or is in the file that a worker of this user has written, if
                the URL names this host.
            credentials: of the job; needed if the URL begins with https.
            timeout: seconds that an answer may take.

        Raises:
            ValueError: this is no URL of a page, or it has a key.
            ConnectionError: the job's credentials are missing.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
            raise ValueError(f"{url!r} is no URL of a view: give the one that the worker has logged")
        if parts.query:
            bare = f"{parts.scheme}://{parts.netloc}/"
            raise ValueError(
                "every user of this host can read the arguments of a command, so the URL must not have the key: "
                f"give {bare} alone; for a job of another user or host, set {KEY_VARIABLE} to the key"
            )
        self._host, self._port, self._timeout = parts.hostname, parts.port, timeout
        self._context: ssl.SSLContext | None = None
        key = os.environ.get(KEY_VARIABLE, "")
        if parts.scheme == "https":
            if credentials is None:
                raise ConnectionError("the view is encrypted: set the credentials of the job (GRADWIRE_TOKEN)")
            self._context = credentials.identity().client_context()
            if not key and credentials.token is not None:
                key = PageKey(credentials).text
        if not key:
            with suppress(OSError):
                if _is_this_host(parts.hostname):  # the file is found by the port, which other hosts have too
                    key = LinkFile(parts.port).key()
        self._headers = {"Authorization": f"Bearer {key}"}

    def overview(self) -> dict[str, Any]:
        """Returns the state of the job.

        Raises:
            ConnectionError: the page cannot be reached, or refuses the key.
        """
        connection: http.client.HTTPConnection
        if self._context is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        else:
            connection = _Connection(self._host, self._port, timeout=self._timeout, context=self._context)
        try:
            connection.request("GET", "/api/job", headers=self._headers)
            answer = connection.getresponse()
            text = answer.read(MAX_ANSWER_BYTES)
            found = json.loads(text) if answer.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ConnectionError(
                f"the view at {self._host}:{self._port} does not answer: {printable(error, 500)}"
            ) from error
        finally:
            connection.close()
        if not isinstance(found, dict):
            needs_key = f"it needs its key: set {KEY_VARIABLE} to the one in the link that its worker has written"
            reason = needs_key if answer.status == 403 else f"status {answer.status}"
            raise ConnectionError(f"the view at {self._host}:{self._port} refuses: {reason}")
        return found


def _is_this_host(host: str) -> bool:
    """Returns whether all addresses of a host are of this one. Raises OSError if the name cannot be resolved."""
    own = {each.address for interface in psutil.net_if_addrs().values() for each in interface}
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except UnicodeError as error:
        raise OSError(f"{host!r} is no host name") from error
    parsed = {address: ipaddress.ip_address(address.partition("%")[0]) for address in found}
    return all(name in own or each.is_loopback or each.is_unspecified for name, each in parsed.items())
