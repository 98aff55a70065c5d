"""Every kind of store, for tests that apply to all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed
from gradwire.c10d import Credentials, FileStore, HashStore, PrefixStore, Store, TCPStore
from gradwire.c10d.stores.sealed import SealedStore

from tests.certificates import TOKEN


@dataclass
class Opened:
    """A store in this process, and a function by which another process opens it (None if none can)."""

    store: Store
    elsewhere: Callable[[], Store] | None
    roots: tuple[Any, ...]

    def close(self) -> None:
        for root in (self.store, *self.roots):
            if isinstance(root, Store):
                root.close()


def _hash(folder: Path) -> Opened:
    return Opened(HashStore(), None, ())


def _file(folder: Path) -> Opened:
    path = str(folder / "store")
    return Opened(FileStore(path), lambda: FileStore(path), ())


def _tcp_master(folder: Path) -> Opened:
    master = TCPStore("127.0.0.1", 0, is_master=True)
    port = master.port
    return Opened(master, lambda: TCPStore("127.0.0.1", port), ())


def _tcp_client(folder: Path) -> Opened:
    under = _tcp_master(folder)
    return Opened(under.elsewhere(), under.elsewhere, (under.store,))


def _prefixed(make: Callable[[Path], Opened]) -> Callable[[Path], Opened]:
    def open_it(folder: Path) -> Opened:
        under = make(folder)
        opener = under.elsewhere
        elsewhere = None if opener is None else (lambda: PrefixStore("a/b", opener()))
        return Opened(PrefixStore("a/b", under.store), elsewhere, (*under.roots, under.store))

    return open_it


def _torch_hash(folder: Path) -> Opened:
    return Opened(torch.distributed.HashStore(), None, ())


def _torch_tcp(folder: Path) -> Opened:
    master = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = master.port
    return Opened(
        master,
        lambda: torch.distributed.TCPStore("127.0.0.1", port, wait_for_workers=False),
        (),
    )


def _sealed(make: Callable[[Path], Opened]) -> Callable[[Path], Opened]:
    def open_it(folder: Path) -> Opened:
        under = make(folder)
        opener = under.elsewhere
        elsewhere = None if opener is None else (lambda: SealedStore(opener(), Credentials(token=TOKEN)))
        return Opened(SealedStore(under.store, Credentials(token=TOKEN)), elsewhere, (*under.roots, under.store))

    return open_it


KINDS = {
    "hash": _hash,
    "file": _file,
    "tcp-master": _tcp_master,
    "tcp-client": _tcp_client,
    "prefix-hash": _prefixed(_hash),
    "prefix-file": _prefixed(_file),
    "prefix-tcp": _prefixed(_tcp_client),
    "prefix-prefix-hash": _prefixed(_prefixed(_hash)),
    "prefix-torch-hash": _prefixed(_torch_hash),
    "prefix-torch-tcp": _prefixed(_torch_tcp),
    "sealed-hash": _sealed(_hash),
    "sealed-file": _sealed(_file),
    "sealed-torch-tcp": _sealed(_torch_tcp),
    "prefix-sealed-torch-tcp": _prefixed(_sealed(_torch_tcp)),
}

ALL_STORES = list(KINDS)
OWN_STORES = [kind for kind in ALL_STORES if "torch" not in kind]
SHARED_STORES = ["file", "tcp-client", "prefix-file", "prefix-tcp", "prefix-torch-tcp", "sealed-torch-tcp"]

mine: Store
"""The store that this worker process has opened by `open_here`."""


def open_here(opener: Callable[[], Store]) -> None:
    global mine
    mine = opener()


def call(method: str, *args: Any) -> Any:
    """Calls a method of the store that this worker process has opened."""
    return getattr(mine, method)(*args)
