"""Defaults of the options that torch lacks, for programs written without them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from ..rpc.contracts.options import TRANSPORTS

__all__ = ["Defaults", "defaults"]


@final
@dataclass(slots=True)
class Defaults:
    """Defaults of options of `gradwire.rpc.RpcBackendOptions`, by the options' names."""

    insecure: bool = False
    host: str | None = None
    transports: Sequence[str] = TRANSPORTS


defaults: Final = Defaults()
"""The defaults of this process; `install` sets them."""
