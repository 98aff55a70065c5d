"""Key-value stores: the contract is in base.py, and what an operation does in state.py."""

from .base import Store
from .file import FileStore
from .limits import StoreLimits
from .state import HashStore
from .tcp import TCPStore
from .views import PrefixStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "StoreLimits", "TCPStore"]
