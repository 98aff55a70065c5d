"""What torch's agent does with every message, and gradwire's does not by itself."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

from ..rpc.messages import Extension, Incoming
from ..rref.forks import References

__all__ = ["TorchHabits"]


@final
class TorchHabits(Extension):
    """Prints what remote functions raise."""

    def scope(self, message: Incoming) -> AbstractContextManager[None]:
        """Around the run of a remote function."""
        return self._printing_errors(message)

    @contextmanager
    def _printing_errors(self, message: Incoming) -> Iterator[None]:
        yield
        error = message.error or _failed_creation(message.state.get(References))
        if error is not None:
            text = "".join(traceback.format_exception(error))
            print(f"On {self.agent.info}:\n{error!r}\n{text}", file=sys.stderr)


def _failed_creation(entry: Any) -> BaseException | None:
    """What the call raised whose value a reference is to."""
    return entry.future.exception() if entry is not None and entry.future.done() else None
