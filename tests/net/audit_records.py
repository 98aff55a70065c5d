"""What tests ask the audit log."""

import logging
from typing import Any

import pytest
from gradwire.net.security.audit import LOGGER

from tests.remote_functions import wait_until

__all__ = ["FIELDS", "events", "record_all", "the_event"]

FIELDS = ("event", "listener", "owner", "peer", "worker", "reason", "limit", "count", "omitted")


def record_all(caplog: pytest.LogCaptureFixture) -> None:
    """Has events of all levels logged."""
    caplog.set_level(logging.DEBUG, LOGGER)


def events(caplog: pytest.LogCaptureFixture, **fields: object) -> list[dict[str, Any]]:
    """Returns the fields of the lines that have these ones."""
    found = [
        {name: getattr(record, name) for name in FIELDS} | {"level": record.levelno, "line": record.getMessage()}
        for record in list(caplog.records)
        if record.name == LOGGER
    ]
    return [each for each in found if all(each[name] == value for name, value in fields.items())]


def the_event(caplog: pytest.LogCaptureFixture, **fields: object) -> dict[str, Any]:
    """Returns the fields of the only line that has these ones, once it is there: events are counted before."""
    wait_until(lambda: bool(events(caplog, **fields)))
    (found,) = events(caplog, **fields)
    return found
