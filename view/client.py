"""Asks the page of a job for its state."""

import http.client
import json
import ssl
from typing import Any, final
from urllib.parse import urlsplit

from ..c10d.security.credentials import Credentials
from ..c10d.security.names import SHARED_HOST_NAME
from ..errors import RpcError
from .keys import KEY_PARAMETER, PageKey

__all__ = ["PageClient"]

MAX_ANSWER_BYTES = 64 << 20


class _Connection(http.client.HTTPSConnection):
    """A connection that demands the certificate of any process of the job."""

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        context: ssl.SSLContext = self._context  # type: ignore[attr-defined]
        self.sock = context.wrap_socket(self.sock, server_hostname=SHARED_HOST_NAME)


@final
class PageClient:
    """Asks the page at one URL."""

    def __init__(self, url: str, credentials: Credentials | None, timeout: float = 10.0) -> None:
        """Connects to nothing yet.

        Args:
            url: that a worker has logged; the key may be missing if the credentials have a token.
            credentials: of the job; needed if the URL begins with https.
            timeout: seconds that an answer may take.

        Raises:
            ValueError: this is no URL of a page.
            RpcError: the job's credentials are missing.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
            raise ValueError(f"{url!r} is no URL of a view: give the one that the worker has logged")
        self._host, self._port, self._timeout = parts.hostname, parts.port, timeout
        self._context: ssl.SSLContext | None = None
        key = dict(pair.partition("=")[::2] for pair in parts.query.split("&")).get(KEY_PARAMETER, "")
        if parts.scheme == "https":
            if credentials is None:
                raise RpcError("the view is encrypted: set the credentials of the job, as by GRADWIRE_TOKEN")
            self._context = credentials.identity().client_context()
            if not key and credentials.token is not None:
                key = PageKey(credentials).text
        self._headers = {"Authorization": f"Bearer {key}"}

    def overview(self) -> dict[str, Any]:
        """Returns the state of the job.

        Raises:
            RpcError: the page cannot be reached, or refuses the key.
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
            raise RpcError(f"the view at {self._host}:{self._port} does not answer: {error}") from error
        finally:
            connection.close()
        if not isinstance(found, dict):
            reason = "it needs the key of its URL" if answer.status == 403 else f"status {answer.status}"
            raise RpcError(f"the view at {self._host}:{self._port} refuses: {reason}")
        return found
