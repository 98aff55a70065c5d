"""Statistics of calls: what they count, and how many names they keep."""

import pytest
from gradwire import rpc
from gradwire.rpc.contracts.agent import current_agent
from gradwire.view.statistics import BOUNDS_S, OTHER, CallStatistics, Histogram

from tests.remote_functions import add, identity

ADD = f"{add.__module__}.add"
FAIL, CALL_BACK = f"{__name__}.fail", f"{__name__}.call_back"


def statistics():
    return current_agent().extension(CallStatistics)


def sent():
    return {each["function"]: each for each in statistics().sent()}


def served():
    return {each["function"]: each for each in statistics().served()}


def call_back():
    """Returns what the callee and the caller have counted while the call runs."""
    return served(), rpc.rpc_sync("worker0", sent)


def fail():
    raise ValueError("as asked")


def test_calls_are_counted_on_both_sides(workers):
    caller, callee = workers.rpc(2, view=rpc.View())

    def call():
        for number in range(5):
            rpc.rpc_sync("worker1", add, (number, 1))
        with pytest.raises(ValueError, match="as asked"):
            rpc.rpc_sync("worker1", fail)
        assert rpc.remote("worker1", add, (1, 2)).to_here() == 3
        return sent()

    found = caller.run(call)
    assert found[ADD]["worker"] == "worker1"
    assert (found[ADD]["count"], found[ADD]["in_flight"]) == (5, 0)
    assert found[ADD]["failures"] == {"not_sent": 0, "unknown": 0, "ran": 0}
    assert found[FAIL]["failures"] == {"not_sent": 0, "unknown": 0, "ran": 1}
    assert found["to_here"]["count"] == 1
    assert 0 < found[ADD]["duration"]["p50_s"] <= found[ADD]["duration"]["p99_s"]
    there = callee.run(served)
    assert (there[ADD]["caller"], there[ADD]["running"], there[ADD]["failed"]) == ("worker0", 0, 0)
    assert (there[FAIL]["count"], there[FAIL]["failed"]) == (1, 1)
    for side in (found, there):
        assert side[FAIL]["last_error"]["text"] == "ValueError: as asked"
        assert side[ADD]["last_error"] is None
    assert there[ADD]["duration"]["total_s"] < found[ADD]["duration"]["total_s"] + 1


@rpc.expose
class Exposed:
    def step(self):
        return 1

    def stop(self):
        return 2


@pytest.mark.parametrize("options", [{}, {"policy": rpc.Policy(accepts="exposed")}], ids=["any", "exposed"])
def test_methods_are_counted_by_name(workers, options):
    a, b = workers.rpc(2, view=rpc.View(), **options)
    assert b.run(served) == {}  # and so it has imported this module

    def call():
        remote = rpc.remote("worker1", Exposed).rpc_sync()
        return remote.step() + remote.step() + remote.stop()

    assert a.run(call) == 4
    for counts in b.run(served), a.run(sent):
        assert (counts["RRef.step"]["count"], counts["RRef.stop"]["count"]) == (2, 1)


def test_calls_are_in_flight_and_running_until_they_end(workers):
    caller, _ = workers.rpc(2, view=rpc.View())
    here, there = caller.run(lambda: rpc.rpc_sync("worker1", call_back))
    assert (here[CALL_BACK]["running"], here[CALL_BACK]["count"]) == (1, 0)
    assert (there[CALL_BACK]["in_flight"], there[CALL_BACK]["count"]) == (1, 0)
    assert there[CALL_BACK]["oldest_s"] > 0
    found = caller.run(sent)[CALL_BACK]
    assert (found["in_flight"], found["oldest_s"]) == (0, None)


def test_names_are_bounded(workers):
    (worker,) = workers.rpc(1, view=rpc.View(max_names=2))

    def call():
        for each in (add, identity, pow, max, min, abs):
            rpc.rpc_sync("worker0", each, (1,) if each in (identity, abs) else (1, 2))
        return statistics().sent()

    found = worker.run(call)
    assert sum(each["count"] for each in found) == 6
    assert len(found) == 3
    assert OTHER in {each["function"] for each in found}


def test_nothing_is_counted_by_default(workers):
    (worker,) = workers.rpc(1)

    def call():
        rpc.rpc_sync("worker0", add, (1, 2))
        return statistics().is_on, statistics().sent(), statistics().served()

    assert worker.run(call) == (False, [], [])


def test_quantiles_of_a_histogram():
    histogram = Histogram()
    for microseconds in range(1, 1001):
        histogram.add(microseconds * 1000)
    assert histogram.count == 1000
    assert histogram.quantile(0.5) == pytest.approx(500e-6, rel=0.13)
    assert histogram.quantile(0.99) == pytest.approx(990e-6, rel=0.13)
    histogram.add(1 << 60)
    assert histogram.quantile(1.0) > 1000
    assert Histogram().quantile(0.5) is None


def test_durations_are_counted_within_bounds():
    histogram = Histogram()
    durations = [1, 2**14 - 1, 2**14, 2**20, 2**34 - 1, 2**34, 10**12]
    for each in durations:
        histogram.add(each)
    expected = [sum(each < bound * 1e9 for each in durations) for bound in BOUNDS_S]
    assert histogram.as_json()["within"] == expected
    assert expected[0] == 2
    assert expected[-1] == 5


def test_options_of_the_view_are_checked(monkeypatch):
    assert rpc.View(address="8080").host_and_port() == ("127.0.0.1", 8080)
    assert rpc.View(address="[::1]:0").host_and_port() == ("::1", 0)
    with pytest.raises(ValueError, match="host:port"):
        rpc.View(address="example")
    with pytest.raises(ValueError, match="max_names"):
        rpc.View(max_names=0)
    with pytest.raises(TypeError, match="view"):
        rpc.RpcBackendOptions(view="8080")
    assert rpc.View.from_environment({"GRADWIRE_VIEW": "0"}) == rpc.View(address="0", may_be_taken=True)
    assert rpc.View.from_environment({}) is None
