"""Stores that workers meet through, and rendezvous: how a worker finds its group."""

from .rendezvous import Rendezvous, rendezvous
from .stores import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = [
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Rendezvous",
    "Store",
    "TCPStore",
    "rendezvous",
]
