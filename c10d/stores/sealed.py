"""A store that encrypts the values of another store, whose server lets everybody read and write, as torch's does.

The key is derived from the job's token. Without a token, that of a store which only processes of one host reach is
derived from a secret that the user's processes on this host share (`SocketDirectory.secret`).

Who reaches such a server can still delete keys, put back earlier values of the same keys, and change numbers. That
can stop a job, but reveals nothing, and nobody reads what no process of the job has written.
"""

import os
import re
import struct
from contextlib import suppress
from typing import Any, final

from ...errors import StoreError
from ...net.addresses import is_loopback
from ...net.security import Credentials
from ...net.user_sockets import SocketDirectory
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from ..torch_types import TorchFileStore, TorchStore, TorchTCPStore
from .base import Store
from .state import HashStore
from .tcp import TCPStore
from .views import StoreView, describe_store, innermost_store, layers

__all__ = ["SealedStore", "seal"]

_MAGIC = b"\x00gw1"
_HEADER = struct.Struct("!4sI")
"""The beginning of a sealed piece: the magic bytes, and the number of bytes that follow."""

_NONCE_BYTES = 12

_DECIMAL = re.compile(rb"[ \t]*[+-]?[0-9]{1,20}[ \t]*")
"""Numbers are not sealed, because the server adds to them; nor are empty values, which count as 0 there."""

MAX_COMPARE_ROUNDS = 1000
"""Attempts at one compare_set, each of which fails because another process has changed the value meanwhile."""


def seal(store: TorchStore, credentials: Credentials | None, *, insecure: bool = False) -> TorchStore:
    """Returns a store with sealed values, if those of the store need that and the processes share a secret.

    Args:
        store: any store.
        credentials: those of the job; None without. Certificates have no secret that all processes share.
        insecure: whether everybody who reaches the store is trusted, if there is no token.
    """
    if _is_protected(store):
        return store
    if credentials is not None and credentials.token is not None:
        return SealedStore(store, credentials)
    if insecure or not _is_open_to_other_users(innermost_store(store)):
        return store
    try:
        secret = SocketDirectory.of_this_user().secret()
    except OSError as error:
        raise StoreError(
            f"{describe_store(store)} is open to other users of this host, and no secret can be shared to protect "
            f"what is in it: {error}"
        ) from error
    return SealedStore(store, Credentials(token=secret), is_of_user=True)


def _is_protected(store: Any) -> bool:
    """Returns whether the values of a store need no sealing, whatever the credentials."""
    return any(
        isinstance(each, SealedStore | HashStore) or (isinstance(each, TCPStore) and each.credentials is not None)
        for each in layers(store)
    )


def _is_open_to_other_users(store: Any) -> bool:
    """Returns whether a store is torch's, and processes of this host use it, of whatever user."""
    if isinstance(store, TorchTCPStore) and not isinstance(store, Store):
        with suppress(StoreError):
            return is_loopback(store.host)
    return isinstance(store, TorchFileStore)


@final
class SealedStore(StoreView):
    """A view of all keys of another store. Closing it leaves the underlying store open.

    Values are encrypted by AES-256-GCM with a key that is derived from the job's token; they are bound to their
    keys. Keys, and values that are decimal numbers, are not encrypted.
    """

    def __init__(self, store: TorchStore, credentials: Credentials, *, is_of_user: bool = False) -> None:
        """Makes a view of any torch.distributed.Store, with a token as credentials.

        With `is_of_user` that is not the job's, but the user's. Then it is used for nothing else.
        """
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self.credentials = None if is_of_user else credentials
        self._token = credentials
        self._cipher = AESGCM(credentials.derive_key("store values", 32))
        super().__init__(store)

    def _over(self, store: TorchStore) -> "SealedStore":
        return SealedStore(store, self._token, is_of_user=self.credentials is None)

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        if operation.kind == store_pb2.COMPARE_SET:
            return Outcome(values=[self._compare_set(operation.keys[0], *operation.values)])
        if operation.kind == store_pb2.SET:
            pairs = zip(operation.keys, operation.values, strict=True)
            operation.values[:] = [self._to_stored(key, value) for key, value in pairs]
        elif operation.kind in (store_pb2.APPEND, store_pb2.QUEUE_PUSH):
            operation.values[:] = [self._seal(operation.keys[0], operation.values[0])]
        outcome = self._execute_below(operation, seconds)
        if operation.kind in (store_pb2.GET, store_pb2.QUEUE_POP):
            pairs = zip(operation.keys, outcome.values, strict=False)  # no values if keys are missing
            outcome.values[:] = [self._from_stored(key, value) for key, value in pairs]
        elif operation.kind == store_pb2.ADD and outcome.error:
            self._check_number(operation.keys[0])
        return outcome

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Compares what is sealed. Each sealing of a value gives other bytes, so the server cannot."""
        stored = self._to_stored(key, desired)
        for _ in range(MAX_COMPARE_ROUNDS):
            found = self._execute_below(Operation(kind=store_pb2.GET, keys=[key]))
            before = b"" if found.missing else found.values[0]
            current = b"" if found.missing else self._from_stored(key, before)
            if current != expected:
                return expected if found.missing else current
            swap = Operation(kind=store_pb2.COMPARE_SET, keys=[key], values=[before, stored])
            if self._execute_below(swap).values[0] == stored:
                return desired
        raise StoreError(f"compare_set of {key!r} failed: the value changed {MAX_COMPARE_ROUNDS} times meanwhile")

    def _check_number(self, key: str) -> None:
        """Raises StoreError, with the value, if the value of a key is sealed, to which the server cannot add."""
        found = self._execute_below(Operation(kind=store_pb2.GET, keys=[key]))
        for stored in found.values:
            if not _DECIMAL.fullmatch(stored):
                value = self._from_stored(key, stored)
                raise StoreError(f"add to {key!r} needs a decimal number there, but its value is {value[:80]!r}")

    def _to_stored(self, key: str, value: bytes) -> bytes:
        return value if not value or _DECIMAL.fullmatch(value) else self._seal(key, value)

    def _seal(self, key: str, value: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, value, key.encode())
        return _HEADER.pack(_MAGIC, len(sealed)) + sealed

    def _from_stored(self, key: str, stored: bytes) -> bytes:
        """Returns a value: a number or a piece that was set, followed by the pieces that were appended."""
        number = _DECIMAL.match(stored)
        value = number[0] if number else b""
        rest = memoryview(stored)[len(value) :]
        while rest:
            piece, rest = self._open(key, rest)
            value += piece
        return value

    def _open(self, key: str, stored: memoryview) -> tuple[bytes, memoryview]:
        """Returns the value of the first sealed piece, and what comes after it."""
        from cryptography.exceptions import InvalidTag

        try:
            magic, nbytes = _HEADER.unpack_from(stored)
            sealed, rest = stored[_HEADER.size :][:nbytes], stored[_HEADER.size + nbytes :]
            if magic == _MAGIC and len(sealed) == nbytes > _NONCE_BYTES:
                return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], key.encode()), rest
        except (struct.error, InvalidTag):
            pass
        if self.credentials is None:
            raise StoreError(
                f"the value of {key!r} is not sealed with the secret of user {os.geteuid()}: another user of this "
                "host has written it; or a process of the job has that runs in another container, or with another "
                "XDG_RUNTIME_DIR: set that alike, or give all of them credentials, as by GRADWIRE_TOKEN"
            )
        raise StoreError(
            f"the value of {key!r} is not sealed with this job's token: a process without the token, or with "
            "another one, has written it"
        )
