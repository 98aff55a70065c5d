"""Waits for requests that were sent to all owners of parameters."""

from collections.abc import Mapping
from typing import Any

from ..rpc.contracts.worker import WorkerInfo
from ..rpc.execution.futures import Future

__all__ = ["wait_for_owners"]


def wait_for_owners(futures: Mapping[WorkerInfo, Future[Any]], activity: str) -> dict[WorkerInfo, Any]:
    """Waits until every owner's request has succeeded or failed, and returns the results by owner.

    Args:
        futures: the results of the requests, by owner; nobody else has them.
        activity: what the owners were asked to do, for the note on an error: "the step" becomes "the step failed
            on worker 'ps1'".

    Raises:
        Exception: the first failed request's error, in the order of `futures`, with a note that names all workers
            that failed.
    """
    results = {}
    errors: dict[WorkerInfo, Exception] = {}
    for owner, future in futures.items():
        try:
            results[owner] = future.wait_for_answer()
        except Exception as error:
            errors[owner] = error
    if errors:
        first = next(iter(errors.values()))
        names = ", ".join(repr(owner.name) for owner in errors)
        first.add_note(f"{activity} failed on worker{'s' if len(errors) > 1 else ''} {names}")
        raise first
    return results
