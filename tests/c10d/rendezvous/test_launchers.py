"""Rank and world size come from the variables of the launcher, and contradictions are errors that name them."""

import pytest
from gradwire import launch
from gradwire.c10d.rendezvous.url import LaunchedProcess, find_launched_process, parse_url
from gradwire.errors import RendezvousError
from hypothesis import given
from hypothesis import strategies as st

SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "2"}
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
VARIABLES = sorted({"RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX", *SRUN, *MPICH, *OPEN_MPI})


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        (SRUN, (3, 8)),
        (MPICH, (1, 2)),
        (OPEN_MPI, (2, 4)),
        ({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3"}, (2, 3)),
        ({"JOB_COMPLETION_INDEX": "2"}, None),
        ({**SRUN, "RANK": "5", "WORLD_SIZE": "6"}, (5, 6)),
        ({**SRUN, **MPICH}, (1, 2)),  # mpiexec in a Slurm job: srun has started its proxy
        ({**BATCH_SCRIPT, "SLURM_NTASKS": "1"}, None),
        ({"SLURM_PROCID": "0"}, None),  # a batch script of one task
        ({"SLURM_NTASKS": "8"}, None),  # the shell of salloc
        ({**BATCH_SCRIPT, **MPICH}, (1, 2)),
    ],
)
def test_what_counts(environment, found):
    assert find_launched_process(environment) == (found and LaunchedProcess(*found))


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"RANK": "1"}, "has RANK and no WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "has WORLD_SIZE and no RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2: ranks are 0 to 1"),
        ({"JOB_COMPLETION_INDEX": "x", "WORLD_SIZE": "2"}, "RANK=x: set it to a number"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "has SLURM_PROCID and no SLURM_NTASKS: tell the launcher"),
        ({"PMI_RANK": "0", "PMI_SIZE": "two"}, "PMI_SIZE=two"),
        (BATCH_SCRIPT, "batch script or the shell of a Slurm job of 8 tasks, once for all .* by srun"),
        ({**SRUN, "SLURM_STEP_ID": str(0xFFFF_FFFA)}, "batch script or the shell"),  # salloc's interactive step
    ],
)
def test_what_is_ambiguous_is_an_error(environment, problem):
    with pytest.raises(RendezvousError, match=problem):
        find_launched_process(environment)


def test_this_process_reads_its_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert launch.this_process() is None
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "3")
    assert launch.this_process() == LaunchedProcess(0, 3)


@pytest.mark.parametrize("launcher", [SRUN, MPICH, OPEN_MPI, {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3"}])
def test_the_rendezvous_finds_the_same(launcher):
    address = parse_url("env://").from_environment({**MASTER, **launcher}, dynamic=True)
    found = find_launched_process(launcher)
    assert found is not None
    assert (address.rank, address.world_size) == (found.rank, found.world_size)


def test_what_the_caller_says_comes_first():
    address = parse_url("env://").with_identity(1, 2).from_environment({**MASTER, **SRUN})
    assert (address.rank, address.world_size) == (1, 2)
    address = parse_url("env://").with_identity(7, None).from_environment({**MASTER, **SRUN}, dynamic=True)
    assert (address.rank, address.world_size) == (7, -1)


@given(st.dictionaries(st.sampled_from(VARIABLES), st.text(st.sampled_from("0123-x ٣"), max_size=3)))
def test_any_environment_gives_a_rank_that_fits_or_an_error(environment):
    try:
        found = find_launched_process(environment)
    except RendezvousError:
        return
    assert found is None or 0 <= found.rank < found.world_size
