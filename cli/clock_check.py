"""What `gradwire doctor` says of the clock of this host, compared with that of a store's host."""

import os
from collections.abc import Iterator

from .findings import Finding, ok, problem, warning

__all__ = ["MAX_OFFSET_S", "STORE_VARIABLE", "check_clock"]

STORE_VARIABLE = "GRADWIRE_STORE"

MAX_OFFSET_S = 1.0
"""Seconds by which clocks may differ: log lines and certificates then say much the same everywhere."""


def check_clock(store: str | None = None) -> Iterator[Finding]:
    """Yields how far the clock of this host differs from that of the store's.

    Args:
        store: host and port of the store; None for GRADWIRE_STORE.
    """
    given = store or os.environ.get(STORE_VARIABLE, "")
    if not given:
        text = f"not compared: run `gradwire store`, and set {STORE_VARIABLE} or pass --store HOST:PORT"
        yield ok("clock", text)
        return
    host, _, port = given.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        yield problem("store", f"{given!r} is no address", f"give HOST:PORT, by --store or {STORE_VARIABLE}")
        return
    from ..c10d.stores.remote import clock_offset
    from ..errors import CredentialsError, StoreError

    try:
        found = clock_offset(host.strip("[]"), int(port))
    except (StoreError, CredentialsError) as error:
        yield warning("clock", f"cannot be compared: {error}", "start the store, or correct its address")
        return
    text = (
        f"that of {host} is {abs(found.seconds):.3f} s {'ahead' if found.seconds >= 0 else 'behind'}, "
        f"give or take {found.error:.3f} s"
    )
    if abs(found.seconds) - found.error > MAX_OFFSET_S:
        advice = "synchronize the clocks of all hosts (chrony, systemd-timesyncd): certificates count on them"
        yield warning("clock", text, advice)
    else:
        yield ok("clock", text)
