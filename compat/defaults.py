"""Defaults of the options that torch lacks, for programs written without them."""

import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from ..rpc.contracts.options import TRANSPORTS

__all__ = ["VARIABLE", "Defaults", "defaults", "export_defaults", "inherited_defaults"]

VARIABLE: Final = "GRADWIRE_COMPAT"
"""The environment variable that passes the defaults on to the processes that a program starts."""


@final
@dataclass(slots=True)
class Defaults:
    """Defaults of options of `gradwire.rpc.RpcBackendOptions`, by the options' names."""

    insecure: bool = False
    host: str | None = None
    transports: Sequence[str] = TRANSPORTS


defaults: Final = Defaults()
"""The defaults of this process; `install` sets them."""


def export_defaults(environment: MutableMapping[str, str], values: Defaults) -> None:
    """Sets VARIABLE in an environment, for the processes that are started with it."""
    environment[VARIABLE] = json.dumps(asdict(values))


def inherited_defaults(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the defaults in VARIABLE, as keyword arguments of `install`; empty if it is not set."""
    return dict(json.loads(environment.get(VARIABLE, "{}")))
