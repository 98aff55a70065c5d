"""The identity of a worker."""

from dataclasses import dataclass

from ...errors import WorkerNameError
from ...net.worker_names import problem_of_name
from .exposure import message_value

__all__ = ["WorkerInfo", "check_worker_name"]


@message_value
@dataclass(frozen=True, slots=True, order=True, repr=False)
class WorkerInfo:
    """A worker of the group: its name, and its id, which is the rank in a static group.

    wire_id: tells the incarnations of a worker apart. A worker that is started again in a static group has the id
    that it had, and a new wire_id; tables are kept by wire_id. By default it is the id.

    Raises:
        WorkerNameError: the name is not allowed; see `check_worker_name`.
    """

    name: str
    id: int
    wire_id: int = -1

    def __post_init__(self) -> None:
        check_worker_name(self.name)
        if self.wire_id == -1:
            object.__setattr__(self, "wire_id", self.id)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


def check_worker_name(name: object) -> str:
    """Returns the name, if it is allowed.

    Raises:
        WorkerNameError: it is not a string of 1 to 127 letters, digits, `-`, `_`, `:` or `.`.
    """
    if problem := problem_of_name(name):
        raise WorkerNameError(name, problem)
    return str(name)
