"""Parts of the chaos suite (`make chaos`): its plans, what its load does without faults, and what it notices."""

import pytest
from gradwire.c10d import TCPStore

from tests.chaos import member
from tests.chaos.judgement import compare_gathers, find_leaks
from tests.chaos.load import Settings
from tests.chaos.plan import AT_ONCE, KINDS, make_plan, make_regular_plan
from tests.chaos.records import CALLER_DIED, LOST, NOT_SENT, SUCCEEDED, UNKNOWN, Record, judge, read_lines
from tests.chaos.report import describe_plan
from tests.chaos.samples import Samples
from tests.remote_functions import wait_until


def test_a_seed_decides_about_the_faults():
    plan = make_plan(3, 600, 3, 2)
    assert plan == make_plan(3, 600, 3, 2) != make_plan(4, 600, 3, 2)
    assert {fault.kind for fault in plan} == KINDS.keys()
    assert max(fault.end for fault in plan) <= 600
    assert len(describe_plan(plan).splitlines()) == len(plan)
    for fault in plan:
        assert sum(each.start <= fault.start < each.end for each in plan) <= AT_ONCE


def test_only_chosen_faults_are_planned():
    assert {fault.kind for fault in make_plan(1, 300, 3, 2, ["kill", "disk"])} == {"kill", "disk"}


def test_regular_faults_come_to_one_worker_after_another():
    plan = make_regular_plan(1, 60, 5, range(2, 8), ["kill"])
    assert [fault.start for fault in plan] == [5 * number for number in range(1, 12)]
    assert {fault.target for fault in plan[:6]} == {*range(2, 8)}


@pytest.mark.parametrize(("last", "growth"), [(60, []), (190, ["a: MiB grew from 100 to 190"])])
def test_growth_is_found(last, growth):
    samples = Samples([])
    samples._taken["a"] = [{"MiB": size, "threads": 9, "fds": 90} for size in (20, 30, 100, 100, last, last)]
    assert samples.growth() == growth


MADE = "made a.0.1 call b"
RIGHT = [MADE, "done a.0.1 succeeded "]


@pytest.mark.parametrize(
    ("called", "ran", "fault"),
    [
        (RIGHT, ["a.0.1"], ""),
        (RIGHT, ["a.0.1", "a.0.1"], "doubled"),
        (RIGHT, [], "never ran"),
        ([MADE, "done a.0.1 wrong 5 instead of 6"], ["a.0.1"], "wrong"),
        ([MADE, "done a.0.1 lost ", "done a.0.1 succeeded "], ["a.0.1"], "lost"),
        ([MADE, "stopped a.0 -"], ["a.0.1"], "lost"),
        ([MADE, "done a.0.1 not-sent SendFailedError"], ["a.0.1"], "ran though not sent"),
        ([MADE, "done a.0.1 not-sent SendFailedError"], [], ""),
        ([MADE, "done a.0.1 unknown WorkerLostError"], ["a.0.1"], ""),
        ([MADE, "done a.0.1 unknown WorkerLostError"], [], ""),
        ([MADE, "done a.0.1 has-run AnswerFailedError"], ["a.0.1"], ""),
        ([MADE, "done a.0.1 has-run AnswerFailedError"], [], "never ran"),
        (["made a.0.1 store store", "done a.0.1 succeeded "], [], ""),
    ],
)
def test_what_records_tell(called, ran, fault):
    findings = judge(called, ran)
    assert list(findings.examples) == [fault] * bool(fault)
    assert findings.is_right == (not fault)


def test_calls_of_those_that_died_have_no_outcome():
    findings = judge(["stopped a.0 -", MADE], ["a.0.1"])
    assert findings.calls == {("call", CALLER_DIED): 1}
    assert findings.is_right


def test_lines_that_were_not_written_whole_are_left_out(tmp_path):
    path = tmp_path / "record"
    Record(path).write("done", 1, "an error\nof two lines")
    path.write_text(path.read_text() + "done 2")
    assert list(read_lines([path])) == ["done 1 an error | of two lines\n"]


@pytest.mark.parametrize(
    ("lines", "contradictions"),
    [
        (["a a b c", "b a b c", "c a b c"], 0),
        (["a a c", "b b", "c a c"], 0),
        (["a a b c", "b a b"], 1),
        (["a a b c", "b b c"], 0),
    ],
)
def test_results_of_all_gathers_are_compared(lines, contradictions):
    assert len(compare_gathers(lines)) == contradictions


def test_leaks_are_found():
    before = {"thread chaos": 1, "fd file": 3}
    assert not find_leaks({"a": {"thread chaos": 1, "fd file": 5, "num_forks": 0}}, before)
    assert len(find_leaks({"a": {"thread chaos": 2, "fd file": 50, "num_forks": 1, "thread new": 1}}, before)) == 4
    assert find_leaks({"a": {"thread chaos": 2, "num_forks": 1}}, {}) == ["a: num_forks: 1, may be 0"]


def test_the_load_is_right_without_faults(workers, tmp_path):
    """Three workers do all that they do under chaos, and nothing is left of it."""
    members = workers(3)
    names = [each.name for each in members]
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        joining = [
            each.start(
                member.begin,
                Settings(
                    name=each.name,
                    incarnation=0,
                    names=names,
                    gather=names,
                    folder=tmp_path,
                    store=("127.0.0.1", store.port),
                    file=tmp_path / "file",
                    seed=1,
                    pause=0.01,
                ),
                rank,
                None,
                60,
            )
            for rank, each in enumerate(members)
        ]
        for each in joining:
            each.result()
        for each in members:
            others = {*names, "all_gather"} - {each.name}
            wait_until(lambda each=each, others=others: others <= each.run(member.progress).keys(), 60)
        workers.each(members, member.stop)
        wait_until(lambda: all(workers.each(members, member.is_stopped)), 60)
        wait_until(
            lambda: not find_leaks(dict(zip(names, workers.each(members, member.measure), strict=True)), {})
        )
        assert workers.each(members, member.leave) == [[], [], []]
    findings = judge(read_lines(tmp_path.glob("*.called")), read_lines(tmp_path.glob("*.ran")))
    assert findings.is_right, findings.examples
    assert {outcome for _, outcome in findings.calls} <= {SUCCEEDED, UNKNOWN, NOT_SENT}
    assert findings.count(SUCCEEDED) > findings.count(UNKNOWN)
    assert not findings.count(LOST)
    assert not compare_gathers(read_lines(tmp_path.glob("*.gathered")))
