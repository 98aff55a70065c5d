"""What other workers answer about themselves is not trusted: a malformed state harms only its own entry."""

import copy
import json
import logging
import time

import pytest
from gradwire import rpc
from gradwire.rpc.contracts.agent import current_agent
from gradwire.view import overview
from gradwire.view.metrics import metrics
from gradwire.view.overview import Viewing, overview_of
from gradwire.view.snapshot import problem_of
from gradwire.view.timeline import COUNTERS, SECONDS, merged_timeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.remote_functions import add, wait_until

BAD = [None, True, -1, 10**400, 1e300, "text", [], {}, [[]], {"a": []}]


def own_state():
    """Returns a state in which there is something of everything that is checked."""
    rpc.rpc_sync("worker1", add, (1, 2))
    state = json.loads(json.dumps(current_agent().extension(Viewing).snapshot()))
    collective = {"state": "in flight", "number": 1, "since": 0.0, "operation": "barrier", "call_site": "a.py:1"}
    names = {"name": "g", "backend": "gradwire_shm", "failure": None}
    state["process_groups"] = [{**names, "global_ranks": [0, 1], "rank": 0, "size": 2, "collective": collective}]
    rounds = {"operation": "barrier", "topic": "t", "members": ["worker0"], "number": 1, "since": 0.0}
    state["collectives"] = [{**rounds, "call_site": "a.py:2"}]
    state["events"] = [{"time": 0.0, "event": "lost", "worker": "worker1", "reason": "as asked"}]
    state["contexts"] = {"count": 1, "oldest": [{"id": 1, "creator": "worker0", "age_s": 1.0, "backward": False}]}
    return state


@pytest.fixture
def state(workers):
    a, _ = workers.rpc(2, view=rpc.View())
    return a.run(own_state)


def places(value, place=()):
    """Yields the way to each value in JSON, from the outermost one on."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*place, key))


def test_a_worker_in_no_line_and_a_late_context_are_not_refused(state):
    """As under `python -c`; ids of contexts have 64 bits."""
    state["worker"]["at"] = None
    state["contexts"]["oldest"][0]["id"] = (1 << 64) - 1
    assert problem_of(state) is None


def test_whatever_is_not_refused_can_be_shown(agents, state):
    """Each value of a state is replaced by others in turn: what is then not refused can be shown."""
    agent, *_ = agents(1)
    viewing = agent.extension(Viewing)
    assert problem_of(state) is None
    refused = 0
    for place in places(state):
        for bad in BAD:
            changed = changed_at(state, place, bad)
            if problem_of(changed) is not None:
                refused += 1
                continue
            workers = [{"name": "worker0", "id": 0, "error": None, "state": changed}]
            waits = viewing.waits.of(workers, time.time())
            metrics({"workers": workers, "waits": waits})
            merged_timeline(workers, time.time())
    assert refused > 500


def changed_at(state, place, value):
    if not place:
        return value
    changed = copy.deepcopy(state)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


def test_a_rank_beyond_all_groups_is_not_believed(state):
    """Else a list as long as the size that another worker tells would be made."""
    group = state["process_groups"][0]
    group["size"] = 10**12
    assert problem_of(state) == "process_groups[0].rank is none of the group"
    group["size"], group["rank"] = 2, 2
    assert problem_of(state) == "process_groups[0].rank is none of the group"


def test_a_timeline_whose_columns_differ_in_length_is_refused(state):
    state["timeline"]["calls_sent"].append(1)
    assert problem_of(state) == "timeline has columns of different lengths"
    del state["timeline"]["calls_sent"]
    assert problem_of(state) == "timeline.calls_sent is missing"


def test_a_timeline_of_any_numbers_can_be_merged(state):
    for column in ["ended", "seconds", *COUNTERS]:
        for value in [-1e18, 0, 1e-9, 1e18]:
            changed = copy.deepcopy(state)
            changed["timeline"][column] = [value] * len(state["timeline"][column])
            assert problem_of(changed) is None
            found = merged_timeline([{"name": "worker0", "state": changed}], time.time())
            assert len(found["calls"]) == SECONDS
            json.dumps(found, allow_nan=False)


def test_half_a_character_in_a_state_harms_no_other(workers):
    a, b = workers.rpc(2, view=rpc.View())

    def answer_wrongly():
        snapshot = overview.snapshot
        overview.snapshot = lambda *args: {**snapshot(*args), "audit": {"\ud800": {}}}

    b.run(answer_wrongly)
    found = a.run(lambda: overview_of(current_agent(), 20.0))
    assert [each["state"] is None for each in found["workers"]] == [False, True]
    assert "surrogates not allowed" in found["workers"][1]["error"]
    json.dumps(found, ensure_ascii=False).encode()


def test_a_malformed_state_is_left_out_alone(workers):
    a, b, c = workers.rpc(3, view=rpc.View())
    waiting = c.start(rpc.barrier, ["worker2", "worker0"])

    def answer_wrongly():
        snapshot = overview.snapshot
        overview.snapshot = lambda *args: {**snapshot(*args), "collectives": 3}

    b.run(answer_wrongly)

    def look():
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("gradwire.view.overview").addHandler(handler)
        wait_until(lambda: overview_of(current_agent(), 20.0)["waits"])
        found = overview_of(current_agent(), 20.0)
        return found, metrics(found).decode(), lines

    found, text, lines = a.run(look)
    (wait,) = found["waits"]
    assert (wait["entered"], wait["missing"]) == (["worker2"], ["worker0"])
    assert [each["state"] is None for each in found["workers"]] == [False, True, False]
    assert found["workers"][1]["error"] == "its state is malformed: collectives is no list"
    assert 'gradwire_worker_up{worker="worker1"} 0.0' in text
    assert 'gradwire_worker_up{worker="worker2"} 1.0' in text
    assert lines == ["the state of worker worker1 is malformed, and left out: collectives is no list"]
    a.run(rpc.barrier, ["worker2", "worker0"])
    waiting.result()


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_anything_is_checked(value):
    assert isinstance(problem_of(value), str)
