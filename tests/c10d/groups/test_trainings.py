"""What torch builds on process groups trains on gradwire's groups with the same results as on torch's Gloo."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.c10d.groups import trainings
from tests.workers import Worker, Workers

ENGINES = ["shm", "mpi"]
GROUPS = [("shm", 4), ("mpi", 2)]
"""Engines and numbers of ranks."""


def join(folder: Path, backend: str, rank: int, size: int) -> None:
    from gradwire import c10d

    torch.set_num_threads(1)
    if backend == "torch_gloo":
        dist.init_process_group("gloo", f"file://{folder}/met", rank=rank, world_size=size)
        return
    c10d.init_process_group(backend, f"file://{folder}/met", rank=rank, world_size=size)


@pytest.fixture(scope="module")
def groups(tmp_path_factory) -> Iterator[dict[tuple[str, int], list[Worker]]]:
    """Workers by engine and number of ranks; those of Gloo use torch's own groups."""
    made: dict[tuple[str, int], list[Worker]] = {}
    everybody: list[Workers] = []

    def start(backend: str, size: int) -> list[Worker]:
        if (backend, size) not in made:
            folder = tmp_path_factory.mktemp("group")
            everybody.append(Workers(folder))
            members = everybody[-1](size)
            for each in [m.start(join, folder, backend, rank, size) for rank, m in enumerate(members)]:
                each.result()
            made[backend, size] = members
        return made[backend, size]

    yield start
    for group in everybody:
        group.stop()


@pytest.fixture(scope="module")
def reference(groups):
    """Results with torch's Gloo, computed once for each training and number of ranks."""
    known = {}

    def results(name: str, size: int):
        if (name, size) not in known:
            known[name, size] = everywhere(groups("torch_gloo", size), name)
        return known[name, size]

    return results


def everywhere(members: list[Worker], name: str):
    return [pending.result() for pending in [member.start(trainings.run, name) for member in members]]


CLOSE = {"ddp_fp16": {"rtol": 1e-3, "atol": 1e-4}}
"""Tolerances of trainings in float16, which engines add in different orders."""


@pytest.mark.parametrize("name", trainings.TRAININGS)
@pytest.mark.parametrize(("engine", "size"), GROUPS)
def test_trainings_have_the_same_results_as_on_gloo(groups, reference, name, engine, size):
    for ours, torchs in zip(everywhere(groups(engine, size), name), reference(name, size), strict=True):
        for tensor, wanted in zip(ours, torchs, strict=True):
            torch.testing.assert_close(tensor, wanted, **CLOSE.get(name, {}))


@pytest.mark.parametrize("engine", ENGINES)
def test_compiled_programs_train(groups, engine):
    members = groups(engine, 2)
    for pending in [member.start(trainings.ddp_compiled) for member in members]:
        for tensor, wanted in zip(pending.result(), everywhere(members, "ddp")[0], strict=True):
            torch.testing.assert_close(tensor, wanted)
