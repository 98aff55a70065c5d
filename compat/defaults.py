"""What options that torch does not have begin as, in programs that were written without them."""

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, Final, final

__all__ = ["INHERITED", "Defaults", "defaults", "inherited", "pass_on"]

INHERITED: Final = "GRADWIRE_COMPAT"
"""The variable by which `python -m gradwire.compat` tells its options to the processes that the program starts."""


@final
@dataclass(slots=True)
class Defaults:
    """insecure, host: see `gradwire.rpc.RpcBackendOptions`."""

    insecure: bool = False
    host: str | None = None


defaults: Final = Defaults()
"""Of this process, set by `install`."""


def pass_on(environment: MutableMapping[str, str], given: Defaults) -> None:
    """Has processes that are started with this environment begin with these defaults."""
    environment[INHERITED] = json.dumps(asdict(given))


def inherited(environment: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `install` in a process that was started with this environment."""
    return dict(json.loads(environment.get(INHERITED, "{}")))
