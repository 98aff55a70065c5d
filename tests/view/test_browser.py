"""The page in a real browser: what it shows of running programs. `make browser` runs all of this."""

import contextlib
import inspect
import os
import re
import signal

import pytest
from click.testing import CliRunner
from gradwire import rpc
from gradwire.cli.group import gradwire

from tests.remote_functions import add, set_event, wait_for, wait_until
from tests.stopped import has_stopped, stopped
from tests.view import programs
from tests.view.browser import LONGER, browser_or_skip, pictures

VIEW = rpc.View(address="0")
pytestmark = pytest.mark.timeout(600)  # a browser needs several processes, and the machine may be busy


@pytest.fixture(scope="module")
def browser():
    with browser_or_skip() as found:
        yield found


def top(url):
    environment = {"COLUMNS": "250", "GRADWIRE_TOKEN": ""}
    done = CliRunner().invoke(gradwire, ["top", "--once", url.partition("?")[0]], env=environment)
    assert done.exit_code == 0, done.output
    return done.output


def line_of(function, text):
    """Returns the file and the line of a function in which a text stands."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + i for i, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}:{number}"


def test_the_page_shows_a_job_to_those_who_have_the_key(workers, browser):
    a, _ = workers.rpc(2, view=VIEW)
    a.run(lambda: [rpc.rpc_sync("worker1", add, (1, 2)) for _ in range(7)] and None)
    url = a.run(programs.url)
    with browser.open(url) as view:
        view.wait_for("2 workers, asked by worker0")
        (call,) = view.rows("calls")
        assert (call["caller"], call["callee"], call["ended"]) == ("worker0", "worker1", "7")
        wait_until(lambda: [each["state"] for each in view.rows("workers")] == ["answers", "answers"], pause=0.1)
        view.page.get_by_role("button", name="stacks").nth(1).click()
        assert "MainThread" in view.wait_for("MainThread", "#stacks")
    with browser.open(url.partition("?")[0], expected="status of 403") as view:
        assert view.status == 403
        assert "worker0" not in view.page.content()


@LONGER
def test_the_figures_are_those_of_the_workers(workers, browser, tmp_path):
    server, *trainers = members = workers.rpc(3, view=VIEW)
    with browser.open(server.run(programs.url), viewport={"width": 1100, "height": 900}) as view:
        running = [each.start(programs.train, 40, 100_000) for each in trainers]
        view.wait_for("runs|ParameterServer")
        for each in running:
            each.result()
        view.refreshed()
        counts = {f"worker{i}": each.run(programs.counts) for i, each in enumerate(members)}
        view.refreshed()
        shown = {(row["caller"], row["callee"], row["function"]): int(row["ended"]) for row in view.rows("calls")}
        told = {(name, *key): n for name, found in counts.items() for key, n in found["calls"].items()}
        assert shown == told
        assert [n for (_, _, function), n in shown.items() if function == "RRef.step"] == [40] * 2
        assert {row["name"]: int(row["values"]) for row in view.rows("workers")} == {
            name: found["values"] for name, found in counts.items()
        }
        references = {(row["owner"], row["user"]): row for row in view.rows("references")}
        assert references.keys() == {("worker0", f"worker{i}") for i in (1, 2)}
        for (owner, user), row in references.items():
            assert int(row["counted by the owner"]) == int(row["held by the user"]) == counts[user]["held"][owner]
        contexts = {row["context"]: row for row in view.rows("contexts")}
        assert contexts.keys() == counts["worker0"]["contexts"]
        assert len(contexts) == 2
        assert {row["workers"] for row in contexts.values()} == {f"worker0, worker{i}" for i in (1, 2)}
        links = {(row["from"], row["to"]): row for row in view.rows("links")}
        assert "MiB" in links["worker0", "worker1"]["shared memory"]
        assert links["worker0", "worker1"]["link"] == "unix"
        minute = view.page.evaluate("fetch('/api/job', {headers}).then(answer => answer.json())")["timeline"]
        assert sum(minute["calls"]) == pytest.approx(sum(told.values()), rel=0.01)
        assert sum(minute["bytes"]) > 2 * 40 * 400_000
        view.picture(pictures(tmp_path) / "view.png", "#links")
        view.picture(tmp_path / "whole.png")
        assert view.overflow() == 0
    for each in trainers:
        each.run(programs.release)


@LONGER
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_narrow_windows_and_in_the_dark(workers, browser, tmp_path, scheme):
    server, *trainers = workers.rpc(3, view=VIEW)
    for each in [each.start(programs.train, 3, 1000) for each in trainers]:
        each.result()
    for width in (390, 900):
        with browser.open(
            server.run(programs.url), viewport={"width": width, "height": 800}, color_scheme=scheme
        ) as view:
            view.wait_for("3 workers")
            assert view.overflow() == 0
            for selector in "#status", "h2", "#workers th", "#workers td", ".good", ".dim", "button":
                assert view.contrast(selector) >= 4.5, selector
            if (scheme, width) == ("dark", 390):
                view.picture(pictures(tmp_path) / "view-narrow.png", "#workers")
            view.picture(tmp_path / f"{scheme}-{width}.png")
    for each in trainers:
        each.run(programs.release)


@LONGER
def test_a_worker_that_is_late_is_named_with_its_line(workers, browser, tmp_path):
    a, b, c = workers.rpc(3, view=VIEW)
    names = ["worker1", "worker2"]
    entered, late = b.start(programs.enter_barrier, names), c.start(programs.be_late, names)
    with browser.open(a.run(programs.url)) as view:
        wait = view.wait_for("barrier for .* waits for worker2", ".wait")
        where, there = (
            line_of(programs.enter_barrier, "rpc.barrier("),
            line_of(programs.load_batch, "return wait_for("),
        )
        assert f"called at {where}" in wait
        text = top(a.run(programs.url))
        assert re.search(r"barrier for [0-9.]+ s: waits for worker2\n", text)
        assert f"called at {where}" in text
        # The innermost line is that of the test's own function that waits; the page names a line of the program.
        assert re.search(r"worker2 is at \S+\.py:\d+ in wait_for", wait)
        assert re.search(r"worker2 is at \S+\.py:\d+ in wait_for", text)
        row = view.page.locator("#workers tbody tr").filter(has_text="worker2")
        row.get_by_role("button").click()
        assert there in view.wait_for("in load_batch", "#stacks")
        view.wait_for("barrier", ".wait.stuck")  # once it has lasted for ten seconds
        view.picture(pictures(tmp_path) / "view-late.png", "#workers")
        a.run(lambda: rpc.rpc_sync("worker2", set_event, ("go on",)))
        for each in entered, late:
            each.result()
        view.page.locator(".wait").wait_for(state="detached")


@LONGER
def test_a_page_whose_worker_has_ended_says_so(workers, browser):
    a, b = workers.rpc(2, view=VIEW)
    with browser.open(a.run(programs.url), expected="ERR_") as view:
        view.wait_for("2 workers, asked by worker0")
        assert view.page.locator("body.stale").count() == 0
        with stopped(a):
            view.wait_for("no answer since [0-9:]+", "#status")
            view.page.locator("body.stale").wait_for()
            assert view.page.title().startswith("no answer: ")
        view.wait_for("2 workers, asked by worker0")
        assert view.page.locator("body.stale").count() == 0
        a.kill()
        view.page.locator("body.stale").wait_for()
    with browser.open(b.run(programs.url)) as view:
        view.wait_for("1 lost", "#alarm")


@LONGER
def test_a_function_that_does_not_return_comes_first(workers, browser):
    a, b = workers.rpc(2, view=VIEW)
    a.run(lambda: [rpc.rpc_sync("worker1", add, (1, 2)) for _ in range(3)] and None)
    with browser.open(a.run(programs.url)) as view:
        view.wait_for("add", "#calls")
        waiting = a.start(rpc.rpc_sync, "worker1", wait_for, ("go on",))
        view.wait_for("wait_for", "#calls")
        first, second = view.rows("calls")
        assert first["function"].endswith(".add")
        assert (second["ended"], second["in flight"]) == ("0", "1")
        view.page.locator("#calls tbody tr:first-child").filter(has_text="wait_for").wait_for()
        seconds, unit = view.rows("calls")[0]["the oldest for"].split()
        assert unit == "s"
        assert float(seconds) >= 10
        b.run(set_event, "go on")
        waiting.result()
        view.page.locator("#calls tbody tr:first-child").filter(has_text="add").wait_for()


@LONGER
def test_a_stopped_worker_is_named_with_the_collective_that_waits_for_it(workers, browser, tmp_path):
    a, b, c = workers.rpc(3, view=VIEW)
    forming = [each.start(programs.form_group, str(tmp_path / "store"), i, 2) for i, each in enumerate((b, c))]
    for each in forming:
        each.result()
    with browser.open(a.run(programs.url)) as view:
        view.wait_for("3 workers")
        assert {(row["worker"], row["rank"]) for row in view.rows("groups")} == {
            ("worker1", "0 of 2"),
            ("worker2", "1 of 2"),
        }
        os.kill(c.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: has_stopped(c.pid))
            reducing = b.start(programs.reduce_gradients)
            wait = view.wait_for("all_reduce of group .* waits for worker2", ".wait")
            where = line_of(programs.reduce_gradients, "dist.all_reduce(")
            assert f"called at {where}" in wait
            assert "worker2 does not answer: RpcTimeoutError" in wait
            text = top(a.run(programs.url))
            assert re.search(r"all_reduce of group \S+ for [0-9.]+ s: waits for worker2\n", text)
            assert f"called at {where}" in text
            assert "worker2 does not answer" in text
            assert view.rows("workers")[0]["state"].startswith("no answer: RpcTimeoutError")
            view.picture(pictures(tmp_path) / "view-stopped.png", "#workers")
        finally:
            os.kill(c.pid, signal.SIGCONT)
        c.run(programs.reduce_gradients)
        reducing.result()
        view.page.locator(".wait.stuck").wait_for(state="detached")
        view.refreshed()
        assert [each["state"] for each in view.rows("workers")] == ["answers"] * 3


@LONGER
def test_lost_and_returned_workers_are_shown(workers, browser):
    liveness = rpc.Liveness(heartbeat=0.2, suspect_after=0.5)
    a, b, c = workers.rpc(3, view=VIEW, liveness=liveness)
    a.run(lambda: [rpc.rpc_sync(name, os.getpid) for name in ("worker1", "worker2")] and None)
    with browser.open(a.run(programs.url)) as view:
        view.wait_for("3 workers")
        os.kill(b.pid, signal.SIGSTOP)
        with contextlib.ExitStack() as stack:
            stack.callback(os.kill, b.pid, signal.SIGCONT)
            view.wait_for(r"worker1\s*suspect", "#events")
        view.wait_for(r"worker1\s*back", "#events")
        c.kill()
        view.wait_for("worker2.*lost, as ", "#workers tr")
        minute = view.page.evaluate("fetch('/api/job', {headers}).then(answer => answer.json())")["timeline"]
        assert sum(minute["lost"]) == 1
        # On a busy machine, workers that were not stopped may have been silent for so long, too.
        assert sum(minute["returned"]) >= 1
        seen = [each for each in view.rows("events") if each["seen by"] == "worker0"]
        assert "worker1" in {each["worker"] for each in seen if each["event"] == "back"}
        assert [row["name"] for row in view.rows("workers") if row["state"].startswith("lost")] == ["worker2"]


def fail_to_load(shard):
    raise FileNotFoundError(f"there is no shard {shard}")


def load_shards():
    for shard in range(3):
        with contextlib.suppress(FileNotFoundError):
            rpc.rpc_sync("worker1", fail_to_load, (shard,))


@LONGER
def test_nothing_is_red_while_all_is_well(workers, browser, tmp_path):
    """The server waits in `shutdown`, as servers do, while the trainers train."""
    server, *trainers = workers.rpc(3, view=VIEW)
    url = server.run(programs.url)
    ending = server.start(rpc.shutdown)
    for each in [each.start(programs.train, 20, 10_000) for each in trainers]:
        each.result()
    for scheme in ("light", "dark"):
        for width in (1400, 900, 390):
            with browser.open(url, viewport={"width": width, "height": 900}, color_scheme=scheme) as view:
                view.wait_for("shutdown for .*serves until the end of worker1, worker2")
                view.wait_for("RRef.step", "#calls")
                alarms = view.page.locator(".bad:visible, .warn:visible, .stuck:visible, rect.lost:visible")
                assert alarms.count() == 0
                assert re.fullmatch(r"gradwire [0-9.:]+", view.page.title())
                assert view.overflow() == 0
                view.picture(tmp_path / f"well-{scheme}-{width}.png")
    for each in trainers:
        each.run(programs.release)
    for each in [each.start(rpc.shutdown) for each in trainers]:
        each.result()
    ending.result()


@LONGER
def test_what_is_wrong_is_shown_with_its_reason(workers, browser, tmp_path):
    """A worker is stuck, a function fails, and a worker is lost."""
    a, b, c, d = workers.rpc(4, view=VIEW)
    a.run(load_shards)
    a.run(rpc.rpc_sync, "worker3", os.getpid)
    d.kill()
    a.run(lambda: wait_until(lambda: "worker3" in rpc.debug_info()["lost_workers"]))
    names = ["worker1", "worker2"]
    entered, late = b.start(programs.enter_barrier, names), c.start(programs.be_late, names)
    for scheme in ("light", "dark"):
        for width in (1400, 900, 390):
            with browser.open(
                a.run(programs.url), viewport={"width": width, "height": 900}, color_scheme=scheme
            ) as view:
                view.wait_for("barrier for .* waits for worker2", ".wait.stuck")
                (failure,) = view.rows("failures")
                assert (failure["callee"], failure["times"]) == ("worker1", "3")
                assert failure["function"].endswith("fail_to_load")
                assert failure["last error"] == "FileNotFoundError: there is no shard 2"
                (lost,) = [row for row in view.rows("workers") if row["name"] == "worker3"]
                assert lost["state"].startswith("lost, as ")
                others = [row for row in view.rows("workers") if row["name"] != "worker3"]
                assert [row["state"] for row in others] == ["answers"] * 3
                assert [row["failed"] for row in others] == ["", "3", ""]
                assert all(row["memory"].endswith("MiB") and row["CPU"].endswith(" %") for row in others)
                view.wait_for("worker3", "#log")
                assert re.fullmatch(r"stuck, 1 lost: gradwire [0-9.:]+", view.page.title())
                assert view.page.locator("#alarm").inner_text() == "1 lost"
                assert view.overflow() == 0
                view.picture(tmp_path / f"wrong-{scheme}-{width}.png")
    a.run(lambda: rpc.rpc_sync("worker2", set_event, ("go on",)))
    for each in entered, late:
        each.result()
