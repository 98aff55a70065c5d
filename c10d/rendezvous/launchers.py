"""Rank and world size of a process that a launcher has started, from the variables of that launcher."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from ...errors import RendezvousError

__all__ = ["LaunchedProcess", "find_launched_process", "integer_variable", "launcher_variables"]

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""The rank, in the containers of an Indexed Job of Kubernetes. They are not told how many there are."""

_MPI_VARIABLES = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
"""Rank and world size under the mpiexec of MPICH and of Open MPI."""

_SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS")

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Slurm's numbers of steps from here on are not of srun: batch scripts, and the shell that salloc starts."""


@final
@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """What the launcher of a process says of it.

    rank: from 0 to world_size - 1.
    world_size: number of processes.
    """

    rank: int
    world_size: int


def find_launched_process(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Returns what the launcher of a process says of it; None if no launcher has started it.

    RANK and WORLD_SIZE come first, which torchrun and `gradwire spawn` set; then those of `launcher_variables`.

    Raises:
        RendezvousError: one of a pair is missing, or they are no rank and size; or the process runs in the batch
            script of a Slurm job of several tasks, not by srun.
    """
    complete = {**environment, **launcher_variables(environment)}
    values = {name: integer_variable(name, complete) for name in ("RANK", "WORLD_SIZE")}
    rank, world_size = values.values()
    if rank < 0 and world_size < 0:
        return None
    for name, value in values.items():
        if value < 0:
            raise RendezvousError(
                f"the environment has {'WORLD_SIZE' if name == 'RANK' else 'RANK'} and no {name}: set both, or "
                "start the program by a launcher that does, such as torchrun"
            )
    if rank >= world_size:
        raise RendezvousError(f"the environment says rank {rank} of {world_size}: ranks are 0 to {world_size - 1}")
    return LaunchedProcess(rank, world_size)


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns RANK and WORLD_SIZE as far as a launcher says them by other variables, and they are not set.

    mpiexec comes before Slurm, since it starts its processes by srun in a Slurm job. Raises RendezvousError if a
    launcher says one of them only, or if this is the batch script of a Slurm job of several tasks.
    """
    if environment.get("RANK"):
        return {}
    if environment.get("WORLD_SIZE"):
        return {"RANK": environment[INDEX_VARIABLE]} if environment.get(INDEX_VARIABLE) else {}
    for variables in _MPI_VARIABLES:
        if environment.get(variables[0]):
            return _pair(variables, environment)
    if environment.get(_SLURM_VARIABLES[0]):
        if 0 <= integer_variable("SLURM_STEP_ID", environment) < _FIRST_SPECIAL_STEP:
            return _pair(_SLURM_VARIABLES, environment)
        if (tasks := integer_variable(_SLURM_VARIABLES[1], environment)) > 1:
            raise RendezvousError(
                f"this process runs in the batch script or the shell of a Slurm job of {tasks} tasks, once for "
                "all of them: start the program by srun there, or set RANK and WORLD_SIZE"
            )
    return {}


def _pair(variables: tuple[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    for name in variables:
        if integer_variable(name, environment) < 0:
            raise RendezvousError(
                f"the environment has {variables[0]} and no {name}: tell the launcher how many processes to "
                "start, as by srun --ntasks=4, or set RANK and WORLD_SIZE"
            )
    return {"RANK": environment[variables[0]], "WORLD_SIZE": environment[variables[1]]}


def integer_variable(name: str, environment: Mapping[str, str]) -> int:
    """Returns the number in an environment variable; -1 if it is not set. Raises RendezvousError for others."""
    text = environment.get(name)
    if not text:
        return -1
    if not (text.isascii() and text.strip().isdigit()):
        raise RendezvousError(f"the environment has {name}={text}: set it to a number of 0 or more")
    return int(text)
