"""A rank that fails, or dies, while the group is created: the others are told at once, not after the timeout."""

import os
import re
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist
from gradwire.c10d import FileStore, register_engine
from gradwire.c10d.engines import Engine
from gradwire.c10d.engines.gloo import GlooEngine
from gradwire.c10d.engines.shm.engine import ShmEngine
from gradwire.errors import RankLostError

from tests.c10d.members import JOIN_TIMEOUT


class Exchanging(Engine):
    """Waits for the others as an engine of a user does."""

    name = "exchanging"

    def __init__(self, setup):
        super().__init__(setup)
        setup.exchange("here", "")


ENGINES = {each.name: each for each in (Exchanging, GlooEngine, ShmEngine)}


def create(path, rank, name, ends):
    """Makes a group of three ranks; the engine of rank 1 cannot be made."""

    def make(setup):
        if setup.rank == 1:
            if ends == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("there is no such device")
        return ENGINES[name](setup)

    register_engine("failing", make, devices=["cpu"])
    store = FileStore(str(path), 3)
    try:
        dist.init_process_group("failing", store=store, rank=rank, world_size=3, timeout=JOIN_TIMEOUT)
    except Exception as error:
        return error
    finally:
        store.close()
    return None


@pytest.mark.parametrize("ends", ["raises", "dies"])
@pytest.mark.parametrize("name", ENGINES)
def test_the_others_are_told(workers, tmp_path, name, ends):
    assert timedelta(seconds=100) < JOIN_TIMEOUT
    members = workers(3)
    creating = [each.start(create, tmp_path / "store", rank, name, ends) for rank, each in enumerate(members)]
    for rank in (0, 2):
        error = creating[rank].result()
        assert isinstance(error, RankLostError)
        assert error.rank == 1
        wanted = "its process died" if ends == "dies" else "left the group: .*there is no such device"
        assert re.search(wanted, str(error)), error
    if ends == "raises":
        assert isinstance(creating[1].result(), OSError)
