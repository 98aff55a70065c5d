"""Asking all owners of parameters at once."""

from collections.abc import Mapping
from typing import Any

import torch

from ..rpc.contracts.worker import WorkerInfo

__all__ = ["wait_for_owners"]


def wait_for_owners(requests: Mapping[WorkerInfo, torch.futures.Future[Any]], doing: str) -> dict[WorkerInfo, Any]:
    """Waits for all requests.

    Args:
        requests: what was asked of each owner.
        doing: what the owners do, for the note that an error gets.

    Returns:
        The result of each.

    Raises:
        Exception: the first error, in the order of the requests, with a note that names the workers that
            failed. The others are through by then.
    """
    results = {}
    failed: dict[WorkerInfo, Exception] = {}
    for owner, request in requests.items():
        try:
            results[owner] = request.wait()
        except Exception as error:
            failed[owner] = error
    if failed:
        first = next(iter(failed.values()))
        names = ", ".join(repr(owner.name) for owner in failed)
        first.add_note(f"{doing} failed on worker{'s' if len(failed) > 1 else ''} {names}")
        raise first
    return results
