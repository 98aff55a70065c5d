"""Looks under the prefixes of a store, and describes it in messages."""

from contextlib import suppress
from typing import Any

from ...net.addresses import format_address, is_loopback
from ...net.security import Credentials
from ..torch_types import TorchStore, TorchTCPStore
from .file import FileStore
from .tcp import TCPStore

__all__ = ["describe_store", "innermost_store", "is_insecure_store", "store_credentials", "store_host"]


def innermost_store(store: Any) -> Any:
    """Returns the store under any number of PrefixStores, gradwire's or torch's."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def store_host(store: TorchStore | None) -> str:
    """Returns the host of a TCPStore, gradwire's or torch's, possibly under prefixes; empty for other stores."""
    return str(getattr(innermost_store(store), "host", ""))


def store_credentials(store: Any) -> Credentials | None:
    """Returns the credentials of a store, or of one under its prefixes; else those in the environment, if any."""
    while True:
        found = getattr(store, "credentials", None)
        if isinstance(found, Credentials):
            return found
        if not hasattr(store, "underlying_store"):
            return Credentials.from_environment()
        store = store.underlying_store


def is_insecure_store(store: Any) -> bool:
    """Returns whether a store, or one under its prefixes, was opened with `insecure=True` (see Store.insecure)."""
    while not getattr(store, "insecure", False):
        if not hasattr(store, "underlying_store"):
            return False
        store = store.underlying_store
    return True


def describe_store(store: TorchStore) -> str:
    """Returns what and where a store is, for messages. Says so if only this host can reach its address."""
    under = innermost_store(store)
    if isinstance(under, FileStore):
        return f"the file {under.path}"
    if isinstance(under, TCPStore | TorchTCPStore):
        text = f"the TCPStore at {format_address(under.host, under.port)}"
        with suppress(RuntimeError):
            if is_loopback(under.host):
                return f"{text}, a loopback address, which only processes of this host can reach"
        return text
    return f"a {type(under).__name__}"
