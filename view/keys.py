"""Who may see the page: whoever has its key, which is in the URL that the worker logs."""

import hmac
import secrets
from typing import final
from urllib.parse import parse_qs

from ..c10d.security.credentials import Credentials

__all__ = ["KEY_PARAMETER", "PageKey"]

KEY_PARAMETER = "key"
KEY_BYTES = 16
PURPOSE = "view key"


@final
class PageKey:
    """The key of a page. All pages of a job with a token have the same key; others have random ones."""

    def __init__(self, credentials: Credentials | None) -> None:
        """Args: credentials: of the job; None if it has none."""
        if credentials is not None and credentials.token is not None:
            self.text = credentials.derive_key(PURPOSE, KEY_BYTES).hex()
        else:
            self.text = secrets.token_hex(KEY_BYTES)

    def admits(self, query: bytes, authorization: bytes) -> bool:
        """Returns whether a request has the key.

        Args:
            query: the part of its URL behind the question mark.
            authorization: its header of this name: "Bearer " and the key.
        """
        given = parse_qs(query.decode("latin-1"), max_num_fields=8).get(KEY_PARAMETER, [""])[0]
        if not given and authorization.startswith(b"Bearer "):
            given = authorization[len(b"Bearer ") :].decode("latin-1")
        return hmac.compare_digest(given.encode(), self.text.encode())
