"""Stores that workers meet through, rendezvous, and process groups that torch.distributed runs on."""

from .backends import register_backends
from .registry import register_engine
from .rendezvous import Rendezvous, rendezvous
from .stores import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = [
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Rendezvous",
    "Store",
    "TCPStore",
    "register_engine",
    "rendezvous",
]

register_backends()
