"""A rank that fails, or dies, while the group is created: the others are told at once, not after the timeout."""

import os
import re
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist
from gradwire.c10d import FileStore, TCPStore, register_engine
from gradwire.c10d.engines import Engine
from gradwire.c10d.engines.gloo import GlooEngine
from gradwire.c10d.engines.mpi.engine import MpiEngine
from gradwire.c10d.engines.shm.engine import ShmEngine
from gradwire.c10d.groups.backends import best_engine
from gradwire.errors import RankLostError

from tests.c10d.members import JOIN_TIMEOUT


class Exchanging(Engine):
    """Waits for the others as an engine of a user does."""

    name = "exchanging"

    def __init__(self, setup):
        super().__init__(setup)
        setup.exchange("here", "")


ENGINES = {
    "exchanging": Exchanging,
    "gloo": GlooEngine,
    "mpi": MpiEngine,
    "shm": ShmEngine,
    "the best": best_engine,
}


def create_by_file(path, rank, name, ends):
    """Makes a group of three ranks with a store in a file."""
    with FileStore(str(path), 3) as store:
        return create(store, rank, name, 1, ends)


def create_by_server(port, rank):
    """Makes a group of three ranks with a store that rank 0 serves."""
    with TCPStore("127.0.0.1", port, 3, rank == 0) as store:
        return create(store, rank, "shm", 0, "raises")


def create(store, rank, name, failing, ends):
    """Makes a group of three ranks, the engine of one of which cannot be made. Returns the error."""

    def make(setup):
        if setup.rank == failing:
            if ends == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("there is no such device")
        return ENGINES[name](setup)

    register_engine("failing", make, devices=["cpu"])
    try:
        dist.init_process_group("failing", store=store, rank=rank, world_size=3, timeout=JOIN_TIMEOUT)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("ends", ["raises", "dies"])
@pytest.mark.parametrize("name", ENGINES)
def test_the_others_are_told(workers, tmp_path, name, ends):
    assert timedelta(seconds=100) < JOIN_TIMEOUT
    members = workers(3)
    creating = [
        each.start(create_by_file, tmp_path / "store", rank, name, ends) for rank, each in enumerate(members)
    ]
    for rank in (0, 2):
        error = creating[rank].result()
        assert isinstance(error, RankLostError)
        assert error.rank == 1
        wanted = "its process died" if ends == "dies" else "left the group: .*there is no such device"
        assert re.search(wanted, str(error)), error
    if ends == "raises":
        assert isinstance(creating[1].result(), OSError)


def test_they_are_told_of_the_rank_that_serves_the_store(workers, free_port):
    members = workers(3)
    creating = [each.start(create_by_server, free_port, rank) for rank, each in enumerate(members)]
    for rank in (1, 2):
        error = creating[rank].result()
        assert isinstance(error, RankLostError), error
        assert error.rank == 0
        assert "there is no such device" in str(error)
    assert isinstance(creating[0].result(), OSError)
