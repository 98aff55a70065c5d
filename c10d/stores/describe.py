"""Looks under the prefixes of a store, and describes it in messages."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ...net.addresses import format_address, is_loopback
from ...net.security import Credentials
from ..torch_types import TorchStore, TorchTCPStore
from .file import FileStore
from .tcp import TCPStore

__all__ = ["describe_store", "innermost_store", "is_insecure_store", "layers", "store_credentials", "store_host"]


def layers(store: Any) -> Iterator[Any]:
    """Yields a store and those of which it is a view, as PrefixStores are, gradwire's or torch's."""
    yield store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
        yield store


def innermost_store(store: Any) -> Any:
    """Returns the store under all views of it."""
    *_, innermost = layers(store)
    return innermost


def store_host(store: TorchStore | None) -> str:
    """Returns the host of a TCPStore, gradwire's or torch's, possibly under prefixes; empty for other stores."""
    return str(getattr(innermost_store(store), "host", ""))


def store_credentials(store: Any) -> Credentials | None:
    """Returns the credentials of a store, or of one under its prefixes; else those in the environment, if any."""
    found = (getattr(each, "credentials", None) for each in layers(store))
    return next((each for each in found if isinstance(each, Credentials)), None) or Credentials.from_environment()


def is_insecure_store(store: Any) -> bool:
    """Returns whether a store, or one under its prefixes, was opened with `insecure=True` (see Store.insecure)."""
    return any(getattr(each, "insecure", False) for each in layers(store))


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
