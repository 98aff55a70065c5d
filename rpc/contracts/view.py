"""What a worker shows of itself: the option `view`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

__all__ = ["INSTALL_VIEW", "VIEW_VARIABLE", "View"]

VIEW_VARIABLE = "GRADWIRE_VIEW"

INSTALL_VIEW = "pip install prometheus-client rich starlette uvicorn"
"""The command that installs what the page of a job and `gradwire top` need."""

DEFAULT_HOST = "127.0.0.1"

MAX_NAMES = 1 << 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a worker records and serves so that people can see what it does: see docs/view.md.

    statistics: whether calls are counted and timed, by function and worker. It takes about half a microsecond
        of a call on each side. A thread reads the counts once a second, for the last minute.
    max_names: functions and workers that are counted by themselves; further ones are counted together, as "other".
    address: "[host:]port" at which this worker serves the page of the job, by default for this host only; port 0
        is any free one, which is logged. None for no page. It needs the extra `view`: see docs/view.md.
    may_be_taken: whether this worker goes without its page if another process has the port.
    """

    statistics: bool = True
    max_names: int = 256
    address: str | None = None
    may_be_taken: bool = False

    def __post_init__(self) -> None:
        for name in ("statistics", "may_be_taken"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} is {value!r}: give True or False")
        count = self.max_names
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_NAMES:
            raise ValueError(f"max_names is {count!r}: give a whole number from 1 to {MAX_NAMES}")
        if self.address is not None:
            self.host_and_port()

    def host_and_port(self) -> tuple[str, int]:
        """Returns where the page is served. Raises ValueError if `address` is no such place."""
        host, _, port = (self.address or "").rpartition(":")
        host = host.removeprefix("[").removesuffix("]") or DEFAULT_HOST
        if not port.isascii() or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"the address of the view is {self.address!r}: give a port, or host:port")
        return host, int(port)

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> "View | None":
        """Returns the view that GRADWIRE_VIEW asks for, an address as in the option; None if it is not set.

        All workers of a host may have the same one: the first that takes the port serves the page.

        Raises:
            ValueError: it is no address.
        """
        address = environment.get(VIEW_VARIABLE, "")
        return View(address=address, may_be_taken=True) if address else None
