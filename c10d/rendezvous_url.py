"""Reading rendezvous URLs, and completing them from arguments and the environment."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final
from urllib.parse import parse_qsl, unquote, urlsplit

from ..errors import RendezvousError

__all__ = ["StoreAddress", "parse_url"]

_FORMS = {
    "env": "env://",
    "tcp": "tcp://host:port?rank=0&world_size=2",
    "file": "file:///absolute/path?rank=0&world_size=2",
}


_YES = {"true", "1"}
"""torchrun writes "True"; people write others."""


@final
@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a group meets, and what is known of who this worker is.

    url: for messages. scheme: env, tcp, file or store.
    rank, world_size: -1 while not known.
    host, port: of a TCP store. path: of a file.
    launcher_attempt: how often torchrun has restarted the group, if its store is to be used.
    """

    url: str
    scheme: str
    rank: int = -1
    world_size: int = -1
    host: str = ""
    port: int = 0
    path: str | None = None
    launcher_attempt: str | None = None

    def with_identity(self, rank: int | None, world_size: int | None) -> "StoreAddress":
        """This place with what the caller's arguments say; they may not contradict the URL."""
        return replace(
            self,
            rank=self._agree("rank", self.rank, rank),
            world_size=self._agree("world_size", self.world_size, world_size),
        )

    def from_environment(self, environment: Mapping[str, str], *, dynamic: bool = False) -> "StoreAddress":
        """An `env://` place with the rest of what it needs; others as they are.

        For a dynamic group, RANK and WORLD_SIZE need not be there.
        """
        if self.scheme != "env":
            return self
        needed = {
            "RANK": self.rank < 0,
            "WORLD_SIZE": self.world_size < 0,
            "MASTER_ADDR": True,
            "MASTER_PORT": True,
        }
        optional = ("RANK", "WORLD_SIZE") if dynamic else ()
        missing = [n for n, wanted in needed.items() if wanted and not environment.get(n) and n not in optional]
        if missing:
            raise RendezvousError(
                f"{self.url} needs the environment variables {', '.join(missing)}, which are not set: set "
                "them, start the workers with torchrun, or give another URL (or rank= and world_size=)"
            )
        launched = environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in _YES
        return replace(
            self,
            rank=_integer("RANK", environment) if self.rank < 0 else self.rank,
            world_size=_integer("WORLD_SIZE", environment) if self.world_size < 0 else self.world_size,
            host=environment["MASTER_ADDR"],
            port=_port(environment["MASTER_PORT"], f"MASTER_PORT={environment['MASTER_PORT']}"),
            launcher_attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0") if launched else None,
        )

    def checked(self, *, dynamic: bool = False) -> "StoreAddress":
        """This place, whose rank and world size are known and fit together; or the group is a dynamic one."""
        if dynamic and self.world_size == -1:
            return self
        unknown = [name for name in ("rank", "world_size") if getattr(self, name) < 0]
        if unknown:
            way = "" if self.scheme == "store" else f", or use {_FORMS[self.scheme]}"
            raise RendezvousError(
                f"{self.url} does not say {' and '.join(unknown)}: "
                f"pass {' and '.join(f'{name}=' for name in unknown)}{way}"
            )
        if not 0 <= self.rank < self.world_size:
            raise RendezvousError(
                f"rank {self.rank} does not fit into world_size {self.world_size}: ranks go from 0 to "
                "world_size - 1"
            )
        return self

    def _agree(self, name: str, said: int, given: object) -> int:
        if given is None or given == -1:
            return said
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise RendezvousError(f"{name} is {given!r}: give an int from 0 on")
        if said not in (-1, given):
            raise RendezvousError(
                f"{self.url} says {name}={said} and the argument says {name}={given}: drop one of them"
            )
        return given


def parse_url(url: str) -> StoreAddress:
    """Reads a rendezvous URL.

    Raises:
        RendezvousError: it is not one.
    """
    try:
        parts = urlsplit(url)
        scheme = parts.scheme
    except ValueError as error:
        raise _malformed(url, str(error)) from None
    if scheme not in _FORMS:
        raise _malformed(url, f"it has no scheme of {', '.join(_FORMS)}")
    if parts.fragment:
        raise _malformed(url, "it has a #fragment", scheme)
    numbers = _numbers(url, scheme, parts.query)
    place = StoreAddress(url, scheme, numbers.get("rank", -1), numbers.get("world_size", -1))
    if scheme == "env":
        if parts.netloc or parts.path:
            raise _malformed(url, "nothing but a query may follow env://", scheme)
        return place
    if scheme == "file":
        if parts.netloc:
            raise _malformed(url, "its path is not absolute: three slashes come before it", scheme)
        path = unquote(parts.path)
        if not path.startswith("/") or path.endswith("/") or "\0" in path:
            raise _malformed(url, "it names no file by an absolute path", scheme)
        return replace(place, path=path)
    if parts.path not in ("", "/") or parts.username is not None:
        raise _malformed(url, "it has more than a host and a port", scheme)
    if not parts.hostname:
        raise _malformed(url, "it has no host", scheme)
    port_text = parts.netloc.rpartition(":")[2] if not parts.netloc.endswith("]") else ""
    if port_text in ("", parts.netloc):
        raise _malformed(url, "it has no port", scheme)
    return replace(place, host=parts.hostname, port=_port(port_text, url))


def _numbers(url: str, scheme: str, query: str) -> dict[str, int]:
    """The query's rank and world_size."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=8)
    except ValueError as error:
        raise _malformed(url, str(error), scheme) from None
    numbers: dict[str, int] = {}
    for name, text in pairs:
        if name not in ("rank", "world_size"):
            raise _malformed(url, f"{name!r} is not known", scheme)
        if name in numbers:
            raise _malformed(url, f"{name} comes twice", scheme)
        if not (text.isascii() and text.isdigit()):
            raise _malformed(url, f"{name}={text} is not a number from 0 on", scheme)
        numbers[name] = int(text)
    return numbers


def _integer(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name)
    if not text:
        return -1
    if not (text.isascii() and text.strip().isdigit()):
        raise RendezvousError(f"the environment has {name}={text}: set it to a number from 0 on")
    return int(text)


def _port(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise RendezvousError(
            f"{where!r} has the port {text!r}: every worker must know the port, a number from 1 to 65535, as "
            f"in {_FORMS['tcp']}"
        )
    return int(text)


def _malformed(url: str, problem: str, scheme: str | None = None) -> RendezvousError:
    forms = [_FORMS[scheme]] if scheme else list(_FORMS.values())
    return RendezvousError(f"the rendezvous URL {url!r} is wrong: {problem}. Write it as {' or '.join(forms)}")
