"""Workers that die or arrive late in all_gathers."""

import os
import random
import signal
import threading
import time

import pytest
from gradwire import rpc
from gradwire.errors import RpcTimeoutError
from gradwire.rpc.contracts.agent import current_agent


def rounds(count: int, timeout: float = 30) -> list[dict[str, int]]:
    return [rpc.all_gather(number, timeout=timeout) for number in range(count)]


@pytest.mark.parametrize("seed", range(int(os.environ.get("GRADWIRE_ALL_GATHERS", "3"))))
def test_members_die_and_arrive_late_at_random(workers, seed):
    """In any case, the living members get the same values in the same rounds."""
    chance = random.Random(seed)
    started = workers.rpc(5)
    victims = chance.sample(range(5), chance.choice([1, 2, 3]))
    deaths = {victim: chance.uniform(0.1, 0.7) for victim in victims}
    late = {rank: [chance.random() for _ in range(6)] for rank in range(5)}

    def live(seconds: float | None, late: list[float], seed: int) -> list[dict[str, object]]:
        chance = random.Random(seed)
        if seconds is not None:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        begun = time.monotonic()
        seen = []
        number = 0
        me = current_agent().info.name
        while True:
            goes_on = time.monotonic() - begun < 1.5 or seconds is not None
            if chance.random() < 0.01:
                time.sleep(late[number % 6] / 100)
            gathered = rpc.all_gather((number, goes_on, bytes(chance.choice([0, 10, 9000]))), timeout=30)
            assert gathered[me][0] == number
            seen.append({name: (n, on, len(rest)) for name, (n, on, rest) in gathered.items()})
            number += 1
            if not any(on for _, on, _ in gathered.values()):
                return seen

    pending = [worker.start(live, deaths.get(rank), late[rank], rank) for rank, worker in enumerate(started)]
    results = [pending[rank].result() for rank in range(5) if rank not in victims]
    for result in results[1:]:
        assert result == results[0]
    before = set(results[0][0])
    for number, gathered in enumerate(results[0]):
        assert {n for n, _, _ in gathered.values()} == {number}
        assert gathered.keys() <= before  # no member comes back
        before = set(gathered)
    assert before == {f"worker{rank}" for rank in range(5) if rank not in victims}


def test_a_timeout_names_the_missing_member(workers):
    a, b, c = workers.rpc(3)

    def time_out() -> None:
        with pytest.raises(RpcTimeoutError, match="all_gather waits for 'worker2'") as caught:
            rpc.all_gather("in time", timeout=0.5)
        assert caught.value.seconds == 0.5
        assert caught.value.worker == "worker2"

    workers.each([a, b], time_out)
    assert c.run(rpc.all_gather, "late") == {"worker0": "in time", "worker1": "in time", "worker2": "late"}
    expected = [{"worker0": number, "worker1": number, "worker2": number} for number in range(3)]
    assert workers.each([a, b, c], rounds, 3) == [expected] * 3
