"""Key-value stores: the contract is in base.py, and each kind of store in a file of its own."""

from .base import Store
from .file import FileStore
from .limits import StoreLimits
from .state import HashStore
from .tcp import TCPStore
from .views import PrefixStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "StoreLimits", "TCPStore"]
