"""The store of the processes that `gradwire.launch.spawn` starts: an environment variable tells them of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from ...errors import RendezvousError
from ...net.security import Credentials

__all__ = ["HOST", "SpawnStore"]

HOST = "127.0.0.1"
"""The address of the store, and MASTER_ADDR of the processes."""

_VARIABLE = "GRADWIRE_SPAWN_STORE"


@final
@dataclass(frozen=True, slots=True)
class SpawnStore:
    """A TCPStore that the process which called `spawn` hosts at `HOST`.

    port: the port of the store.
    master_port: MASTER_PORT of the processes, at which this store is not. A process with another one has been
        started by something else since, such as a torchrun that one of them runs.
    token: the token of the store; None if it has the certificates in the environment.
    """

    port: int
    master_port: int
    token: str | None = field(repr=False)

    @property
    def credentials(self) -> Credentials | None:
        """Those of the store; None for those in the environment."""
        return None if self.token is None else Credentials(token=self.token)

    def to_environment(self) -> dict[str, str]:
        """Returns the environment variables by which a process learns of the store."""
        return {
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self.master_port),
            _VARIABLE: f"{self.port} {self.master_port} {self.token or ''}",
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "SpawnStore | None":
        """Returns the store of which environment variables tell; None if there is none."""
        if not (text := environment.get(_VARIABLE)):
            return None
        try:
            port, master_port, token = text.split(" ")
            found = cls(int(port), int(master_port), token or None)
        except ValueError:  # without its text, which has a token
            raise RendezvousError(
                f"{_VARIABLE} in the environment is not what gradwire.launch.spawn has set"
            ) from None
        return found if environment.get("MASTER_PORT") == master_port else None
