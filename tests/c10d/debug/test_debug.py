"""Debugging aids name the ranks that disagree, what they called, and where."""

import _thread
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gradwire import c10d
from gradwire.c10d.debug.flight_recorder import read_files, report
from gradwire.errors import CollectiveMismatchError, CollectiveTimeoutError, ProcessGroupError
from gradwire.view.snapshot import process_groups

SIZE = 3


def join(folder: Path, rank: int, options: c10d.GroupOptions, seconds: float) -> None:
    import tests.c10d.store_engine

    assert tests.c10d.store_engine
    url = f"file://{folder}/met"
    c10d.init_process_group("slow_store", url, rank=rank, world_size=SIZE, pg_options=options)
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))


@pytest.fixture
def group(workers, tmp_path):
    """Starts workers in a group: `group(check_calls=True)` returns workers in a group with these options."""

    def start(seconds: float = 30, **options):
        members = workers(SIZE)
        given = c10d.GroupOptions(**options)
        for each in [m.start(join, tmp_path, rank, given, seconds) for rank, m in enumerate(members)]:
            each.result()
        return members

    return start


def agree() -> list[float]:
    tensor = torch.ones(2)
    for _ in range(3):
        dist.all_reduce(tensor)
    outputs = [torch.zeros(rank) for rank in range(SIZE)]
    dist.all_gather(outputs, torch.ones(dist.get_rank()))  # shapes may differ here
    dist.barrier()
    return tensor.tolist()


def test_equal_calls_pass_the_check(workers, group):
    assert workers.each(group(check_calls=True), agree) == [[27.0, 27.0]] * SIZE


def call_otherwise(odd_call: Callable[[], None]) -> str:
    """Rank 1 makes another call than the others."""
    with pytest.raises(CollectiveMismatchError) as caught:
        if dist.get_rank() == 1:
            odd_call()
        else:
            dist.all_reduce(torch.ones(3))
    assert caught.value.ranks == [1]
    return str(caught.value)


def another_operation() -> None:
    dist.broadcast(torch.ones(3), 0)


def another_reduction() -> None:
    dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX)


def another_shape() -> None:
    dist.all_reduce(torch.ones(4))


def another_dtype() -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("odd_call", "odd"),
    [
        (another_operation, r"broadcast\(dtype=float32, shapes=\[\[3\]\], root=0\)"),
        (another_reduction, r"all_reduce\(dtype=float32, shapes=\[\[3\]\], reduction=max\)"),
        (another_shape, r"all_reduce\(dtype=float32, shapes=\[\[4\]\], reduction=sum\)"),
        (another_dtype, r"all_reduce\(dtype=float64, shapes=\[\[3\]\], reduction=sum\)"),
    ],
    ids=["operation", "reduction", "shape", "dtype"],
)
def test_the_odd_rank_is_named_with_its_call_and_line(workers, group, odd_call, odd):
    texts = workers.each(group(check_calls=True), call_otherwise, odd_call)
    assert len(set(texts)) == 1
    assert re.search(rf"rank 1: {odd} at .*test_debug.py:\d+$", texts[0]), texts[0]
    assert re.search(r"ranks 0, 2: all_reduce\(.*\) at .*test_debug.py:\d+", texts[0])


def stay_away() -> str | None:
    dist.barrier()
    if dist.get_rank() == 2:
        return None
    dist.group.WORLD.set_timeout(timedelta(seconds=2))
    with pytest.raises(CollectiveTimeoutError) as caught:
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


def test_who_does_not_call_is_named(workers, group):
    texts = workers.each(group(check_calls=True), stay_away)
    assert re.search(r"all_reduce \(collective 2 of the group\) timed out after 2 s, .*rank 2", texts[0])


def pass_a_barrier() -> None:
    c10d.monitored_barrier(timeout=timedelta(seconds=20))


def wait_at_a_barrier() -> str:
    with pytest.raises(CollectiveTimeoutError) as caught:
        c10d.monitored_barrier(timeout=1.5)
    return str(caught.value)


@pytest.mark.parametrize(("late", "named"), [((1,), "rank 1"), ((1, 2), "ranks 1, 2")])
def test_monitored_barrier_names_every_missing_rank(workers, group, late, named):
    members = group()
    workers.each(members, pass_a_barrier)
    # Rank 0 comes last: by then the others have shown that they are there, however slow they are.
    texts = {rank: members[rank].run(wait_at_a_barrier) for rank in (2, 1, 0) if rank not in late}
    assert f"waiting for {named}. " in texts[0]
    # In torch's words, which say of the first missing rank only, unless they are asked for all.
    assert "Rank 0 timed out in monitoredBarrier after 1500 ms: Rank 1 failed to pass monitoredBarrier" in texts[0]
    if len(late) == 1:
        assert "Rank 2 successfully reached monitoredBarrier, but received errors while waiting" in texts[2]


def wait_for_all_ranks() -> str | None:
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    if dist.get_rank():
        return None
    with pytest.raises(CollectiveTimeoutError) as caught:
        dist.group.WORLD.monitored_barrier(timedelta(0), wait_all_ranks=True)
    return str(caught.value)


def test_groups_have_torchs_monitored_barrier(workers, group):
    started = group()
    text = workers.each(started, wait_for_all_ranks)[0]
    assert "Ranks 1, 2 failed to pass monitoredBarrier" in text


def hang(folder: Path) -> Path | None:
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        pending = dist.irecv(tensor, 0)
    else:
        pending = dist.all_reduce(tensor, async_op=True)
    path = c10d.dump_flight_recorder(folder)
    assert not pending.is_completed()
    return path


def test_the_report_says_which_rank_is_stuck_where(python, workers, group, tmp_path):
    members = group()
    paths = workers.each(members, hang, tmp_path / "dumps")
    assert len(set(paths)) == SIZE
    text = report(read_files([tmp_path / "dumps"]))
    assert re.search(r"rank 0: stuck in collective 2, all_reduce of 20 bytes at .*test_debug.py:\d+, since", text)
    assert re.search(r"rank 1: went on after collective 1, all_reduce", text)
    assert re.search(r"and in recv rank 0 of 0 bytes at .*test_debug.py:\d+, since", text)
    assert re.search(r"rank 1 has not called collective 2; others have called all_reduce at .*test_debug", text)
    done = python.run("-m", "gradwire", "flight", paths[0], paths[1])
    assert done.returncode == 0, done.stderr
    assert "no file of rank 2: it may have died" in done.stdout


def fail_one() -> None:
    if dist.get_rank() == 0:
        with pytest.raises(ProcessGroupError):
            dist.all_reduce(torch.ones(1))


def test_a_group_that_fails_writes_its_recorder(workers, group, tmp_path):
    folder = tmp_path / "failed"
    workers.each(group(seconds=0.3, dump_folder=folder, check_calls=True, flight_recorder_size=2), fail_one)
    (file,) = folder.iterdir()
    (entry,) = json.loads(file.read_text())["groups"][0]["operations"]
    assert entry["state"] == "failed"
    assert "CollectiveTimeoutError" in entry["error"]


def dump_by_signal(folder: Path) -> list[str]:
    c10d.dump_flight_recorder_on_signal(folder)
    for _ in range(3):
        dist.barrier()
    os.kill(os.getpid(), signal.SIGUSR1)
    (group,) = json.loads(next(folder.glob(f"*-{os.getpid()}.json")).read_text())["groups"]
    return [f"{entry['number']} {entry['operation']} {entry['state']}" for entry in group["operations"]]


def test_a_signal_writes_the_last_operations(workers, group, tmp_path):
    seen = workers.each(group(flight_recorder_size=2), dump_by_signal, tmp_path / "dumps")
    assert seen == [["2 barrier done", "3 barrier done"]] * SIZE


def ask_while_an_event_ends() -> str:
    """Asks for operations in a signal handler, while their profiler events end, until one was seen in flight."""
    works: list[dist.Work] = []
    seen, handled = [], threading.Event()

    def handle(*_: object) -> None:
        seen.extend(work.is_completed() for work in works)
        handled.set()

    def pause_event(*_: object) -> None:
        if threading.current_thread().name == "gradwire-profile" and not handled.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            handled.wait()

    signal.signal(signal.SIGUSR1, handle)
    with torch.autograd.profiler.profile():
        threading.setprofile(pause_event)  # called in the thread that ends the event
        while (
            False not in seen
        ):  # an event may end before its operation is returned, or after it has been waited for
            works.clear()
            handled.clear()
            works.append(dist.all_reduce(torch.ones(1), async_op=True))
            works[0].wait()
            handled.wait()
        threading.setprofile(None)
    return "done" if works[0].is_completed() else "in flight"


def test_a_signal_handler_may_ask_for_an_operation_whose_event_ends(group_on):
    assert group_on("gradwire_shm", 1)[0].run(ask_while_an_event_ends) == "done"


def look_at_posted_receives() -> tuple[int, list[str], list[float]]:
    """Returns how many messages are shown in flight, the threads after that, and what then has arrived."""
    if dist.get_rank():
        dist.barrier()
        for tag in range(10):
            dist.send(torch.full((2, 2), float(tag)), 0, tag=tag)
        return 0, [], []
    tensors = [torch.zeros(2, 2) if tag % 2 else torch.zeros(2, 2).t() for tag in range(10)]
    works = [dist.irecv(tensor, 1, tag=tag) for tag, tensor in enumerate(tensors)]
    (shown,) = process_groups()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("gradwire-gloo")]
    dist.barrier()
    for work in works:
        work.wait()
    (shown_later,) = process_groups()
    assert not shown_later["messages"]
    return len(shown["messages"]), names, [tensor.sum().item() for tensor in tensors]


def test_a_look_at_messages_in_flight_starts_no_threads(workers, group_on):
    seen, _ = workers.each(group_on("gradwire_gloo", 2), look_at_posted_receives)
    assert seen == (10, [], [4.0 * tag for tag in range(10)])


def call_without_python_frames() -> tuple[list[float], list[str]]:
    """Calls an operation as C++ does on a thread of its own; returns its output and the errors of the thread."""
    errors: list[str] = []
    sys.unraisablehook = lambda raised: errors.append(str(raised.exc_value))
    output = torch.zeros(2)
    _thread.start_new_thread(dist.group.WORLD.alltoall_base, (output, torch.ones(2), [], []))
    while not output.all() and not errors:
        time.sleep(0.01)
    return output.tolist(), errors


def test_operations_run_on_threads_without_python_frames(group_on):
    assert group_on("gradwire_shm", 1)[0].run(call_without_python_frames) == ([1.0, 1.0], [])


def dump_over_a_link(folder: Path) -> tuple[str, int]:
    """Returns what a link at the path of the dump led to, and the mode of the dump."""
    folder.mkdir(parents=True)
    victim = folder / f"victim-{os.getpid()}"
    victim.write_text("precious")
    path = folder / f"flight-{socket.gethostname()}-{os.getpid()}.json"
    path.symlink_to(victim)
    assert c10d.dump_flight_recorder(folder) == path
    assert json.loads(path.read_text())["pid"] == os.getpid()
    return victim.read_text(), stat.S_IMODE(path.lstat().st_mode)


def test_a_dump_follows_no_link(workers, tmp_path):
    (worker,) = workers(1)
    assert worker.run(dump_over_a_link, tmp_path / "dumps") == ("precious", 0o600)


def dump_to_nowhere(folder: Path) -> str:
    c10d.dump_flight_recorder_on_signal(folder)
    os.kill(os.getpid(), signal.SIGUSR1)
    return "goes on"


@pytest.mark.parametrize("folder", ["file", "\0"])
def test_a_signal_never_ends_the_program(workers, tmp_path, folder):
    (tmp_path / "file").touch()
    (worker,) = workers(1)
    assert worker.run(dump_to_nowhere, tmp_path / folder) == "goes on"
    assert "cannot write the flight recorder" in worker.log.read_text()


def dump_to_full_disk(folder: Path) -> list[str]:
    """Returns the files in a folder on a full disk after a dump to it has been requested by the signal."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)], check=True)
    (folder / "rest").write_bytes(bytes(4096))
    c10d.dump_flight_recorder_on_signal(folder)
    os.kill(os.getpid(), signal.SIGUSR1)
    return os.listdir(folder)


def test_a_full_disk_does_not_end_the_program(hosts, tmp_path):
    (worker,) = hosts(1).workers  # has mounts of its own
    assert worker.run(dump_to_full_disk, tmp_path / "dumps") == ["rest"]
    assert "No space left on device" in worker.log.read_text()


def events() -> list[tuple[str, bool, list[list[int]]]]:
    """Returns name, asynchrony and shapes of the operations that a profiler records."""
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 2))
        dist.all_reduce(torch.ones(4), async_op=True).wait()
        dist.all_gather([torch.ones(2) for _ in range(3)], torch.ones(2))
        if dist.get_rank() < 2:
            (dist.send if dist.get_rank() else dist.recv)(torch.ones(5), 1 - dist.get_rank())
        dist.barrier()
    found = [event for event in profile.function_events if event.name.partition(":")[0] == dist.get_backend()]
    return [(event.name, event.is_async, event.input_shapes) for event in found]


@pytest.mark.parametrize("backend", ["gradwire_shm", "gradwire_gloo"])
def test_profilers_show_operations_like_torchs_own(workers, group_on, backend):
    shown = workers.each(group_on(backend, 3), events)
    for rank, found in enumerate(shown):
        message = [("recv", [[5]]), ("send", [[5]])][rank : rank + 1]
        wanted = [
            ("all_reduce", [[3, 2]]),
            ("all_reduce", [[4]]),
            ("all_gather", [[2]]),
            *message,
            ("barrier", []),
        ]
        assert found == [(f"{backend}:{name}", True, shapes) for name, shapes in wanted]


def event_times() -> tuple[float, float]:
    """Returns the duration of the first of two sums, and the pause before the second, in microseconds."""
    with torch.autograd.profiler.profile() as profile:
        dist.all_reduce(torch.ones(1))
        threading.Event().wait(0.2)  # must not count as time of the first sum
        dist.all_reduce(torch.ones(1))
    first, second = (e.time_range for e in profile.function_events if e.name.endswith(":all_reduce"))
    return first.end - first.start, second.start - first.end


def test_an_event_ends_with_its_operation(workers, group_on):
    for took, after in workers.each(group_on("gradwire_shm", 2), event_times):
        assert took > 0
        assert after > 150_000


def spans() -> set[str]:
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(1))
    return {event.key for event in profile.key_averages()}


def test_profilers_name_third_party_engines_by_backend(workers, group):
    assert all("slow_store:all_reduce" in names for names in workers.each(group(), spans))


def test_bad_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="flight_recorder_size is 0"):
        c10d.GroupOptions(flight_recorder_size=0)
    with pytest.raises(TypeError, match="GroupOptions"):
        c10d.init_process_group("gradwire_shm", f"file://{tmp_path}/met", rank=0, world_size=1, pg_options="wrong")


def test_torchs_debug_level_enables_the_check(monkeypatch):
    assert not c10d.GroupOptions().should_check_calls()
    before = dist.get_debug_level()
    try:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        assert c10d.GroupOptions().should_check_calls()
        assert not c10d.GroupOptions(check_calls=False).should_check_calls()
    finally:
        dist.set_debug_level(before)
