"""What gradwire logs, by part, on top of Python's `logging`.

    from gradwire import logs

    logs.set_level("rpc", "DEBUG")

or, for a program as it is, `GRADWIRE_LOG=rpc=debug,c10d=info`. A part is a package or module of gradwire: its
logger is `gradwire.` and its name. Without either, gradwire configures nothing: Python prints warnings and errors,
unless the program has handlers.

It is not called `logging`: the root of the repository, where tests and benchmarks run, is the package, so they
would import it in place of Python's.
"""

import logging
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import final

__all__ = ["VARIABLE", "Tail", "parse_levels", "set_level", "set_levels_from_environment"]

VARIABLE = "GRADWIRE_LOG"
"""The environment variable with levels by part."""

ROOT_LOGGER = __name__.partition(".")[0]

ALL = "all"
"""The part that stands for all others."""

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

LOGGERS = ("audit",)
"""Parts that have a logger, and are neither packages nor modules."""

FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"

_FOLDER = Path(__file__).parent


def set_level(part: str, level: str | int) -> None:
    """Has a part of gradwire log from a level on, in this process.

    If the program has not configured `logging`, the lines go to stderr.

    Args:
        part: such as "rpc", "rpc.agent", "c10d", "audit"; "all" for everything.
        level: "DEBUG", "INFO", "WARNING", "ERROR" or "CRITICAL", in any case, or a number as in `logging`. What
            is inside the part has the same level, unless it has one of its own.

    Raises:
        ValueError: there is no such part or level.
    """
    name, number = _logger_name(part), _level(level)
    root = logging.getLogger(ROOT_LOGGER)
    if not any(isinstance(handler, _FallbackHandler) for handler in root.handlers):
        root.addHandler(_FallbackHandler())
    logging.getLogger(name).setLevel(number)


def parse_levels(text: str) -> Mapping[str, str]:
    """Returns the levels by part that a value of GRADWIRE_LOG says.

    Args:
        text: such as "rpc=debug,c10d=info", or "debug" for all parts.

    Raises:
        ValueError: it has other words, or a part twice.
    """
    levels: dict[str, str] = {}
    for item in text.split(","):
        part, is_given, level = (each.strip() for each in item.partition("="))
        part, level = (part, level) if is_given else (ALL, part)
        _logger_name(part)
        _level(level)
        if part in levels:
            raise ValueError(f"{part!r} is there twice: give one level")
        levels[part] = level.upper()
    return levels


def set_levels_from_environment() -> None:
    """Sets the levels that GRADWIRE_LOG says. Raises ValueError if it is malformed."""
    if not (text := os.environ.get(VARIABLE)):
        return
    try:
        for part, level in parse_levels(text).items():
            set_level(part, level)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} is {text!r}: {error}") from None


@final
class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints to stderr what no handler of the program gets."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        if all(each is self for each in _handlers_of(record)):
            self.stream = sys.stderr  # as it is now: programs replace it
            super().emit(record)


@final
class Tail(logging.Handler):
    """Keeps the last warnings and errors that gradwire has logged, from its making until `close`."""

    def __init__(self, count: int, without: str = "") -> None:
        """Begins to keep them.

        Args:
            count: how many lines are kept.
            without: a part of gradwire whose lines are not.
        """
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        self._without = _logger_name(without) if without else ""
        self._lines: deque[tuple[float, str]] = deque(maxlen=count)
        logging.getLogger(ROOT_LOGGER).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line; has Python print it where it would do so if this handler were not there."""
        if record.name != self._without:
            try:
                self._lines.append((record.created, self.format(record)))
            except Exception:  # of what is logged
                self.handleError(record)
        tails = (each for each in logging.getLogger(ROOT_LOGGER).handlers if isinstance(each, Tail))
        if next(tails, None) is self and logging.lastResort is not None and not any(_handlers_of(record)):
            logging.lastResort.handle(record)

    def lines(self) -> list[tuple[float, str]]:
        """Returns the time of each line, in seconds since 1970, and the line; the oldest comes first."""
        return list(self._lines)

    def close(self) -> None:
        """Keeps no more lines."""
        logging.getLogger(ROOT_LOGGER).removeHandler(self)
        super().close()


def _handlers_of(record: logging.LogRecord) -> Iterator[logging.Handler]:
    """Yields the handlers that get a record, but for those that keep the last ones."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        yield from (each for each in logger.handlers if not isinstance(each, Tail))
        logger = logger.parent if logger.propagate else None


def _logger_name(part: str) -> str:
    """Returns the name of a part's logger. Raises ValueError if there is no such part."""
    if part == ALL:
        return ROOT_LOGGER
    names = part.split(".")
    path = _FOLDER.joinpath(*names)
    is_module = all(name.isidentifier() for name in names) and (
        (path / "__init__.py").is_file() or path.with_suffix(".py").is_file()
    )
    if not is_module and part not in LOGGERS:
        parts = sorted([ALL, *LOGGERS, *(each.parent.name for each in _FOLDER.glob("*/__init__.py"))])
        near = get_close_matches(part, parts, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"give one of {', '.join(parts)}, or a module"
        raise ValueError(f"{part!r} is no part of gradwire: {advice}")
    return f"{ROOT_LOGGER}.{part}"


def _level(level: str | int) -> int:
    if isinstance(level, int) and not isinstance(level, bool) and level >= 0:
        return level
    if isinstance(level, str) and level.upper() in LEVELS:
        return logging.getLevelNamesMapping()[level.upper()]
    raise ValueError(f"{level!r} is no level: give one of {', '.join(LEVELS)}")
