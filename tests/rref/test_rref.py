"""References as programs use them."""

import pickle
import re
import threading

import pytest
import torch
from gradwire import rpc
from gradwire.errors import RpcTimeoutError, RRefError
from gradwire.rref.rref import call_with_values

from tests.remote_functions import add, set_event, wait_for, wait_until


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int, times: int = 1) -> int:
        self.value += amount * times
        return self.value

    def fail(self) -> None:
        raise LookupError("no such thing")

    def myself(self) -> "Counter":
        return self


def fetch(rref: rpc.RRef) -> object:
    return rref.to_here()


def local(rref: rpc.RRef) -> object:
    assert rref.is_owner()
    return rref.local_value()


def pass_on(rref: rpc.RRef, names: list[str]) -> object:
    """Passes a reference from worker to worker; the last one fetches the value."""
    if not names:
        return rref.to_here()
    return rpc.rpc_sync(names[0], pass_on, (rref, names[1:]))


def own(value: object) -> rpc.RRef:
    return rpc.RRef(value)


def make_on(owner: str, value: int) -> rpc.RRef:
    return rpc.remote(owner, add, (value, 0))


def fail() -> None:
    raise KeyError("lost")


kept: list[rpc.RRef] = []


def keep(rref: rpc.RRef) -> None:
    kept.append(rref)


def use_kept() -> object:
    value = kept[0].to_here()
    kept.clear()
    return value


def test_a_reference_to_a_remote_result(three_workers):
    def check() -> None:
        rref = rpc.remote("worker1", add, (1, 2))
        assert isinstance(rref, rpc.RRef)
        assert rref.to_here() == rref.to_here(timeout=60) == 3
        assert not rref.is_owner()
        assert rref.owner() == rpc.get_worker_info("worker1")
        assert rref.owner_name() == "worker1"
        wait_until(rref.confirmed_by_owner)
        with pytest.raises(RRefError, match="Call it on owner .*worker1.*to_here"):
            rref.local_value()

    three_workers[0].run(check)


def failing() -> None:
    raise ValueError("no value")


def test_the_repr_of_a_reference(three_workers):
    def check() -> None:
        rref = rpc.remote("worker1", torch.nn.Linear, (2, 3))
        identifier = "owner='worker1', id={}.{}".format(*rref._handle.fork.reference)
        assert repr(rref) in (
            f"RRef({identifier}, type=Linear, pending)",
            f"RRef({identifier}, type=Linear, confirmed)",
        )
        wait_until(rref.confirmed_by_owner)
        assert repr(rref) == f"RRef({identifier}, type=Linear, confirmed)"

        made = rpc.remote("worker1", add, (1, 2))
        made.to_here()
        wait_until(made.confirmed_by_owner)
        assert re.fullmatch(r"RRef\(owner='worker1', id=0\.\d+, confirmed\)", repr(made))
        made._get_type()
        assert "type=int, confirmed)" in repr(made)

        failed = rpc.remote("worker1", failing)
        with pytest.raises(ValueError, match="no value"):
            failed.to_here()
        wait_until(lambda: repr(failed).endswith("confirmed)"))  # its error is what it refers to

        assert re.fullmatch(
            r"RRef\(owner='worker0', id=0\.\d+, type=Tensor, here\)", repr(rpc.RRef(torch.ones(1)))
        )
        mine = rpc.remote("worker0", failing)
        with pytest.raises(ValueError, match="no value"):
            mine.to_here()
        assert repr(mine).endswith("failed: ValueError)")
        waiting = rpc.remote("worker0", wait_for, ("shown",))
        assert repr(waiting).endswith("pending)")
        set_event("shown")

    three_workers[0].run(check)


def test_the_repr_of_a_reference_that_has_outlived_its_agent(workers):
    a, b = workers.rpc(2)

    def check() -> str:
        mine, theirs = rpc.RRef(1), rpc.remote("worker1", add, (1, 2))
        assert theirs.to_here() == 3
        rpc.shutdown()
        return repr(mine) + repr(theirs)

    leaving = b.start(rpc.shutdown)
    shown = a.run(check)
    leaving.result()
    assert "owner='worker0'" in shown
    assert "owner='worker1'" in shown


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
def test_a_reference_that_has_outlived_its_agent_does_not_name_a_value_of_the_next_one(workers, tmp_path, how):
    (a,) = workers.rpc(1)

    def check() -> None:
        former = rpc.RRef(Counter(1))
        assert former.remote().add(1).to_here() == 2  # from now on it knows the class
        rpc.shutdown()
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/again")
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
        present = rpc.RRef(Counter(10))
        assert present._handle.id == former._handle.id
        with pytest.raises(RRefError, match="of an agent that has shut down"):
            getattr(former, how)().add(1)
        assert present.local_value().value == 10

    a.run(check)


def test_a_value_that_could_not_be_made_has_no_type(three_workers):
    def check() -> None:
        mine = rpc.remote("worker0", failing)
        for _ in range(2):
            with pytest.raises(ValueError, match="no value"):
                mine._get_type()

    three_workers[0].run(check)


def test_a_reference_to_a_value_here(three_workers):
    def check() -> None:
        value = torch.ones(3)
        rref = rpc.RRef(value)
        assert rref.local_value() is value
        assert rref.to_here() is value
        assert rref.is_owner()
        assert rref.confirmed_by_owner()
        assert rref.owner() == rpc.get_worker_info()
        assert rpc.rpc_sync("worker1", fetch, (rref,)).equal(value)
        mine = rpc.remote("worker0", add, (1, 2))
        assert mine.is_owner()
        assert mine.to_here() == mine.local_value() == 3

    three_workers[0].run(check)


def test_references_travel(three_workers):
    def check() -> None:
        rref = rpc.remote("worker1", add, (20, 1))
        for to in ("worker0", "worker2"):
            assert rpc.rpc_sync(to, fetch, (rref,)) == 21
        assert rpc.rpc_sync("worker1", local, (rref,)) == 21
        assert rpc.rpc_sync("worker2", pass_on, (rref, ["worker0", "worker1", "worker2", "worker0"])) == 21
        assert rpc.rpc_sync("worker2", own, (5,)).to_here() == 5
        assert rpc.rpc_sync("worker2", make_on, ("worker1", 7)).to_here() == 7
        back = rpc.rpc_sync("worker2", make_on, ("worker0", 8))
        assert back.is_owner()
        assert back.local_value() == 8
        nested = rpc.remote("worker2", own, (6,)).to_here()
        assert nested.to_here() == 6

    three_workers[0].run(check)


def test_a_value_outlives_the_reference_that_made_it(three_workers):
    def check() -> None:
        rref = rpc.remote("worker1", add, (3, 4))
        rpc.rpc_sync("worker2", keep, (rref,))
        del rref
        assert rpc.rpc_sync("worker2", use_kept) == 7

    three_workers[0].run(check)


def test_a_reference_passed_on_before_its_value_is_there(three_workers):
    def check() -> None:
        rref = rpc.remote("worker1", wait_for, ("slow",))
        users = [rpc.rpc_async(to, fetch, (rref,)) for to in ("worker0", "worker1", "worker2")]
        with pytest.raises(RpcTimeoutError):
            rref.to_here(timeout=0.05)
        rpc.rpc_sync("worker1", set_event, ("slow",))
        assert [user.wait() for user in users] == ["slow"] * 3
        mine = rpc.remote("worker0", wait_for, ("mine",))
        with pytest.raises(RpcTimeoutError, match="waiting for a value"):
            mine.to_here(timeout=0.05)
        rpc.rpc_sync("worker0", set_event, ("mine",))
        assert mine.to_here() == "mine"

    three_workers[0].run(check)


def test_proxies(three_workers):
    def check() -> None:
        for owner in ("worker0", "worker1"):
            counter = rpc.remote(owner, Counter, (10,))
            assert counter.rpc_sync().add(1) == 11
            assert counter.rpc_async().add(2, times=2).wait() == 15
            assert counter.remote().add(1).to_here() == 16
            assert counter.to_here().value == 16
            with pytest.raises(LookupError, match="no such thing"):
                counter.rpc_sync().fail()
            with pytest.raises(AttributeError, match="nothing"):
                counter.rpc_sync(timeout=30).nothing()
        assert rpc.remote("worker1", Counter).rpc_async().add(5).wait() == 5
        assert rpc.remote("worker1", Counter).remote().add(5).to_here() == 5

    three_workers[0].run(check)


def test_a_fetch_that_overtakes_its_creation(three_workers):
    """The large argument of the call is sent on a connection of its own, the fetch in the envelope."""

    def check() -> None:
        for _ in range(3):
            assert rpc.remote("worker1", torch.sum, (torch.ones(8 << 20),)).to_here(timeout=30) == 8 << 20

    three_workers[0].run(check)


class WaitsToBeMade:
    def __init__(self) -> None:
        wait_for("made")

    def method(self) -> None:
        pass


def test_remote_waits_for_the_object_whose_method_it_calls(workers):
    """So a creation that takes longer than the timeout is an error of the call itself."""
    a, _ = workers.rpc(2)

    def check() -> None:
        made = rpc.remote("worker1", WaitsToBeMade)
        with pytest.raises(RpcTimeoutError):
            made.remote(timeout=0.1).method()
        rpc.rpc_sync("worker1", set_event, ("made",))
        assert made.remote().method().to_here() is None

    a.run(check)


class Underscored:
    def _call(self, value: int) -> int:
        return value

    def _rref(self) -> str:
        return "mine"


def test_methods_may_have_any_name(three_workers):
    def check() -> None:
        value = rpc.remote("worker1", Underscored)
        assert value.rpc_sync()._call(3) == 3
        assert value.rpc_async()._rref().wait() == "mine"

    three_workers[0].run(check)


def total(counters: list[Counter], amount: int) -> tuple[int, int]:
    """Adds to counters of this worker; returns their sum, and how many forks it counts."""
    return sum(counter.add(amount) for counter in counters), rpc.debug_info()["num_forks"]


@pytest.mark.parametrize("owner", ["worker0", "worker1"])
def test_a_call_with_values_makes_no_forks(three_workers, owner):
    def check() -> None:
        rrefs = [rpc.remote(owner, Counter, (start,)) for start in (1, 2, 3)]
        for rref in rrefs:
            rref.rpc_sync().add(0)
        wait_until(lambda: owner == "worker1" or not rpc.debug_info()["num_forks"])  # of creations that end
        assert call_with_values(rrefs, total, 10).wait() == (36, 3 if owner == "worker1" else 0)
        pending = call_with_values([rpc.remote(owner, Counter, (5,))], total, 1)  # the last reference is dropped
        assert pending.wait()[0] == 6
        with pytest.raises(KeyError, match="lost"):
            call_with_values([*rrefs, rpc.remote(owner, fail)], total, 1).wait()

    three_workers[0].run(check)


def test_a_creation_that_fails(three_workers):
    def check() -> None:
        for owner in ("worker0", "worker1"):
            rref = rpc.remote(owner, fail)
            for _ in range(2):
                with pytest.raises(KeyError, match="lost"):
                    rref.to_here()
            with pytest.raises(KeyError, match="lost"):
                rpc.rpc_sync("worker2", fetch, (rref,))
            with pytest.raises(KeyError, match="lost"):
                rref.rpc_sync().anything()

    three_workers[0].run(check)


def test_references_pickle_only_in_calls(three_workers):
    def check() -> None:
        with pytest.raises(RRefError, match="Can not pickle rref in python pickler"):
            pickle.dumps(rpc.RRef(1))

    three_workers[0].run(check)


def test_many_threads_share_and_drop_references(three_workers):
    def check() -> None:
        rref = rpc.remote("worker1", Counter)
        errors = []

        def work() -> None:
            try:
                for _ in range(20):
                    assert rpc.rpc_sync("worker2", fetch, (rref,)).value == 0
                    rpc.remote("worker2", fetch, (rref,)).to_here()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors

    three_workers[0].run(check)
