"""Key-value stores: the contract is in base.py, and each kind of store in a file of its own."""

from .base import Store
from .file import FileStore
from .hash import HashStore
from .limits import StoreLimits
from .prefix import PrefixStore
from .tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "StoreLimits", "TCPStore"]
