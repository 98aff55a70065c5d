"""Profiles of remote calls."""

import gc
import json
import threading
from unittest import mock

import pytest
import torch
from gradwire import rpc
from gradwire.errors import SerializationError
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.contracts.messages import Incoming
from gradwire.rpc.profiling.extension import Profiling, RPCExecMode, build_rpc_profiling_key
from gradwire.rpc.profiling.sessions import REMOTE_PREFIX, TorchHooks
from gradwire.rpc.requests.codec import Extensions
from torch.autograd import profiler, profiler_legacy
from torch.profiler import ProfilerActivity

from tests import remote_functions

OPERATIONS = {"aten::ones", "aten::add", "aten::mul", "aten::relu", "aten::clamp_min"}
PROFILES = {
    "legacy": profiler_legacy.profile,
    "kineto": profiler.profile,
    "torch.profiler": lambda: torch.profiler.profile(activities=[ProfilerActivity.CPU]),
}


def key(mode: RPCExecMode, function: str, caller: int = 0, callee: int = 1) -> str:
    return build_rpc_profiling_key(mode, function, f"worker{caller}", f"worker{callee}")


def events_of(profile):
    return profile.events() if isinstance(profile, torch.profiler.profile) else profile.function_events


def send(mode: RPCExecMode, to: str, function, args=()):
    if mode is RPCExecMode.SYNC:
        return rpc.rpc_sync(to, function, args)
    if mode is RPCExecMode.ASYNC:
        return rpc.rpc_async(to, function, args).wait()
    rref = rpc.remote(to, function, args)
    rref._handle.creation.wait()
    return rref.to_here()


def profiled(mode, function, args=(), to="worker1", profile="legacy"):
    """Returns the events of one call, as (name, worker id, is remote, is within the call's interval)."""
    with PROFILES[profile]() as prof:
        send(mode, to, function, args)
    events = events_of(prof)
    call = next(event for event in events if event.name.startswith(f"rpc_{mode.value}#"))
    inside = lambda e: call.time_range.start <= e.time_range.start and e.time_range.end <= call.time_range.end  # noqa: E731
    return call.name, [(e.name, e.node_id, e.is_remote, inside(e)) for e in events if e is not call]


MODES = [RPCExecMode.SYNC, RPCExecMode.ASYNC, RPCExecMode.REMOTE]


@pytest.mark.parametrize("mode", MODES)
def test_the_name_of_an_event_has_mode_function_caller_and_callee(mode):
    assert build_rpc_profiling_key(mode, "f", "a", "b") == f"rpc_{mode.value}#f(a -> b)"


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_has_the_call_and_the_callees_events(workers, profile):
    a, _ = workers.rpc(2)
    for mode in MODES:
        name, events = a.run(profiled, mode, remote_functions.torch_operations, profile=profile)
        assert name == key(mode, "torch_operations")
        remote = {(n, node, inside) for n, node, is_remote, inside in events if is_remote}
        assert remote >= {(f"{name}{REMOTE_PREFIX}{operation}", 1, True) for operation in OPERATIONS}
        assert all(each.startswith(name) for each, _, _ in remote)


def profiled_by_a_thread_that_had_to_wait() -> tuple[str, list]:
    acquire = TorchHooks.acquire

    def acquire_late(hooks: TorchHooks) -> None:
        threading.Event().wait(0.05)  # longer than the call takes
        acquire(hooks)

    with mock.patch.object(TorchHooks, "acquire", acquire_late):
        return profiled(RPCExecMode.ASYNC, remote_functions.torch_operations)


def test_remote_events_come_behind_their_call_on_a_busy_machine(workers):
    a, _ = workers.rpc(2)
    name, events = a.run(profiled_by_a_thread_that_had_to_wait)
    assert name == key(RPCExecMode.ASYNC, "torch_operations")
    assert {node for _, node, is_remote, _ in events if is_remote} == {1}


def test_operators_and_scripts_have_torchs_names(workers):
    a, _ = workers.rpc(2)
    for to in ("worker1", "worker0"):
        callee = int(to[-1])
        name, events = a.run(profiled, RPCExecMode.SYNC, torch.mul, (torch.ones(2), 2), to)
        assert name == key(RPCExecMode.SYNC, "aten::mul", callee=callee)
        assert (f"{name}{REMOTE_PREFIX}aten::mul", callee, True, True) in events


def test_local_events_have_the_workers_id(workers):
    def node_ids():
        with profiler_legacy.profile() as prof:
            rpc.rpc_sync("worker0", remote_functions.process_id)
            torch.ones(1)
        return {(event.name, event.node_id) for event in prof.function_events if not event.is_remote}

    a, b = workers.rpc(2)
    assert ("aten::ones", 1) in b.run(node_ids)
    assert (key(RPCExecMode.SYNC, "process_id", 1, 0), 1) in b.run(node_ids)
    a.run(rpc.shutdown, graceful=False)


def test_an_event_lasts_until_the_answer_has_arrived(workers):
    def profile_a_long_call():
        with profiler_legacy.profile() as prof:
            future = rpc.rpc_async("worker1", remote_functions.wait_for, ("go",))
            with torch.autograd.profiler.record_function("meanwhile"):
                rpc.rpc_sync("worker1", remote_functions.set_event, ("go",))
            future.wait()
        events = {event.name: event.time_range for event in prof.function_events}
        return events[key(RPCExecMode.ASYNC, "wait_for")], events["meanwhile"]

    a, _ = workers.rpc(2)
    call, meanwhile = a.run(profile_a_long_call)
    assert call.start < meanwhile.start
    # The function ended after "meanwhile" had at least called set_event.
    assert call.end > meanwhile.start


def test_calls_and_scopes_nest(workers):
    def inside_a_scope():
        with profiler_legacy.profile() as prof, torch.autograd.profiler.record_function("outer"):
            rpc.rpc_sync("worker1", remote_functions.torch_operations)
        names = [event.name for event in prof.function_events]
        ranges = {event.name: event.time_range for event in prof.function_events}
        return names, ranges

    a, _ = workers.rpc(2)
    names, ranges = a.run(inside_a_scope)
    call = key(RPCExecMode.SYNC, "torch_operations")
    assert names.index("outer") < names.index(call)
    assert ranges["outer"].start <= ranges[call].start
    assert ranges[call].end <= ranges["outer"].end


@pytest.mark.parametrize("profile", PROFILES)
def test_scopes_in_remote_functions_are_parents_there(workers, profile):
    def family():
        with PROFILES[profile]() as prof:
            rpc.rpc_sync("worker1", remote_functions.torch_operations, kwargs={"scope": True})
        (scope,) = [event for event in events_of(prof) if event.name.endswith("a scope")]
        return scope.name, scope.node_id, [child.name.rpartition(REMOTE_PREFIX)[2] for child in scope.cpu_children]

    a, _ = workers.rpc(2)
    name, node, children = a.run(family)
    assert name == f"{key(RPCExecMode.SYNC, 'torch_operations')}{REMOTE_PREFIX}a scope"
    assert node == 1
    assert children == ["aten::ones", "aten::add", "aten::mul", "aten::relu"]


def call_on(to: str) -> torch.Tensor:
    return rpc.rpc_sync(to, remote_functions.torch_operations)


def start_on(to: str) -> None:
    """Makes a call without waiting for it."""
    remote_functions.keep(rpc.rpc_async(to, remote_functions.wait_for, ("go",)))


@rpc.functions.async_execution
def answer_later(to: str) -> torch.futures.Future:
    return rpc.rpc_async(to, remote_functions.torch_operations)


@rpc.functions.async_execution
def answer_when_set(to: str) -> torch.futures.Future:
    return rpc.rpc_async(to, remote_functions.wait_for, ("go",))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", [call_on, answer_later])
def test_calls_of_a_callee_are_profiled_too(workers, mode, function):
    a, _, _ = workers.rpc(3)
    outer, events = a.run(profiled, mode, function, ("worker2",))
    how = RPCExecMode.SYNC if function is call_on else RPCExecMode.ASYNC
    inner = f"{outer}{REMOTE_PREFIX}{key(how, 'torch_operations', 1, 2)}"
    assert [node for name, node, _, _ in events if name == inner] == [1]
    assert [node for name, node, _, _ in events if name == f"{inner}{REMOTE_PREFIX}aten::add"] == [2]
    assert all(inside for _, _, is_remote, inside in events if is_remote)


def test_an_async_execution_function_is_profiled_until_its_answer(workers):
    def profile_it():
        with profiler_legacy.profile() as prof:
            future = rpc.rpc_async("worker1", answer_when_set, ("worker2",))
            with torch.autograd.profiler.record_function("meanwhile"):
                rpc.rpc_sync("worker2", remote_functions.set_event, ("go",))
            future.wait()
        return {event.name: (event.time_range.start, event.time_range.end) for event in prof.function_events}

    a, _, _ = workers.rpc(3)
    events = a.run(profile_it)
    inner = key(RPCExecMode.ASYNC, "answer_when_set") + REMOTE_PREFIX + key(RPCExecMode.ASYNC, "wait_for", 1, 2)
    assert events[inner][1] > events["meanwhile"][0]


def test_a_call_in_flight_in_the_callee_ends_with_the_function(workers):
    a, _, c = workers.rpc(3)
    name, events = a.run(profiled, RPCExecMode.SYNC, start_on, ("worker2",))
    assert name == key(RPCExecMode.SYNC, "start_on")
    assert [e for e in events if "wait_for" in e[0]] == []
    c.run(remote_functions.set_event, "go")
    # The worker still serves calls.
    assert len(a.run(profiled, RPCExecMode.SYNC, remote_functions.torch_operations)[1]) >= len(OPERATIONS)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_call_in_flight_is_shown_up_to_the_end_of_the_profile(workers, profile):
    def cut_off():
        with PROFILES[profile]() as prof:
            future = rpc.rpc_async("worker1", remote_functions.wait_for, ("go",))
        rpc.rpc_sync("worker1", remote_functions.set_event, ("go",))
        value = future.wait()
        with PROFILES[profile]() as other:
            torch.ones(1)
        return value, [e.name for e in events_of(prof)], [e.name for e in events_of(other)]

    a, _ = workers.rpc(2)
    value, first, second = a.run(cut_off)
    assert value == "go"
    assert key(RPCExecMode.ASYNC, "wait_for") in first
    assert not [name for name in second if "rpc" in name]


def fail() -> None:
    raise ValueError("no")


def test_failed_calls_are_events_too(workers):
    def failing():
        with profiler_legacy.profile() as prof:
            with pytest.raises(ValueError, match="no"):
                rpc.rpc_sync("worker1", fail)
            with pytest.raises(SerializationError):
                rpc.rpc_sync("worker1", remote_functions.identity, (threading.Lock(),))
            with pytest.raises(RuntimeError):
                rpc.rpc_sync("worker1", remote_functions.wait_for, ("go",), timeout=0.05)
            rpc.rpc_sync("worker1", remote_functions.set_event, ("go",))
        return [event.name for event in prof.function_events if event.name.startswith("rpc")]

    a, _ = workers.rpc(2)
    names = a.run(failing)
    assert [names.count(key(RPCExecMode.SYNC, each)) for each in ("fail", "identity", "wait_for")] == [1, 1, 1]


def test_a_lost_worker_ends_the_event(workers):
    def call_the_dying():
        with profiler_legacy.profile() as prof, pytest.raises(RuntimeError):
            rpc.rpc_sync("worker1", remote_functions.die)
        return [event.name for event in prof.function_events]

    a, _ = workers.rpc(2)
    assert key(RPCExecMode.SYNC, "die") in a.run(call_the_dying)


def test_the_callee_records_what_the_caller_records(workers):
    def shapes_and_memory(**asked):
        with profiler_legacy.profile(**asked) as prof:
            rpc.rpc_sync("worker1", torch.add, (torch.ones(3, 4), torch.ones(4)))
        (event,) = [e for e in prof.function_events if e.name.endswith("#remote_op: aten::add")]
        return event.input_shapes, event.cpu_memory_usage

    a, _ = workers.rpc(2)
    shapes, memory = a.run(shapes_and_memory, record_shapes=True, profile_memory=True)
    assert shapes[:2] == [[3, 4], [4]]
    assert memory >= 48
    assert a.run(shapes_and_memory) == ([], 0)


def test_traces_and_tables_show_remote_events(workers, tmp_path):
    def export(path):
        with profiler_legacy.profile() as prof:
            rpc.rpc_sync("worker1", remote_functions.torch_operations)
        prof.export_chrome_trace(path)
        return prof.key_averages().table(max_name_column_width=200), prof.self_cpu_time_total

    a, _ = workers.rpc(2)
    table, total = a.run(export, str(tmp_path / "trace.json"))
    names = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())]
    assert total > 0
    for expected in (key(RPCExecMode.SYNC, "torch_operations"), f"{REMOTE_PREFIX}aten::relu"):
        assert any(expected in name for name in names)
        assert expected in table


def test_a_kineto_trace_has_the_call(workers, tmp_path):
    def export(path):
        with PROFILES["torch.profiler"]() as prof:
            rpc.rpc_sync("worker1", remote_functions.torch_operations)
        prof.export_chrome_trace(path)

    a, _ = workers.rpc(2)
    a.run(export, str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert key(RPCExecMode.SYNC, "torch_operations") in [event.get("name") for event in events]


def test_threads_have_profiles_of_their_own(workers):
    def several():
        found = {}

        def one(number):
            with profiler_legacy.profile() as prof:
                rpc.rpc_sync("worker1", remote_functions.torch_operations, kwargs={"scope": number % 2 == 1})
            found[number] = [event.name for event in prof.function_events]

        threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    a, _ = workers.rpc(2)
    for number, names in a.run(several).items():
        assert names.count(key(RPCExecMode.SYNC, "torch_operations")) == 1
        assert any(name.endswith("a scope") for name in names) == (number % 2 == 1)


def test_many_events_travel(workers):
    a, _ = workers.rpc(2)
    _, events = a.run(profiled, RPCExecMode.SYNC, remote_functions.many_operations, (20_000,))
    assert sum(name.endswith("aten::add") for name, *_ in events) == 20_000


def test_with_an_autograd_context(workers):
    def both(profile_first):
        from gradwire import autograd

        tensors = (torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True))
        first, second = profiler_legacy.profile(), autograd.context()
        with first if profile_first else second, second if profile_first else first:
            rpc.rpc_sync("worker1", torch.mul, tensors)
        return [(e.name, e.node_id) for e in first.function_events if e.is_remote]

    a, _ = workers.rpc(2)
    for profile_first in (True, False):
        call = key(RPCExecMode.SYNC, "aten::mul")
        assert (f"{call}{REMOTE_PREFIX}aten::mul", 1) in a.run(both, profile_first)


def test_torch_is_restored(workers):
    def everything():
        kinds = (profiler_legacy.profile, profiler.profile)
        return [getattr(kind, name) for kind in kinds for name in ("_start_trace", "__exit__")]

    def wrapped():
        return [function.__module__.startswith("gradwire") for function in everything()]

    def leave_within_a_profile():
        with profiler_legacy.profile() as prof:
            rpc.rpc_sync("worker1", remote_functions.torch_operations)
            rpc.shutdown(graceful=False)
            assert all(wrapped())
        assert not any(wrapped())
        return [event.node_id for event in prof.function_events if event.is_remote]

    a, _ = workers.rpc(2)
    assert all(a.run(wrapped))
    assert 1 in a.run(leave_within_a_profile)


def test_without_a_profile_nothing_is_sent(two_workers):
    def profiles_in_answers() -> list[bool]:
        seen = []
        on_receive = Extensions.on_receive

        def record(self: Extensions, message: Incoming) -> None:
            seen.append(message.envelope.HasField("profile"))
            on_receive(self, message)

        with mock.patch.object(Extensions, "on_receive", record):
            rpc.rpc_sync("worker1", remote_functions.torch_operations)
            with profiler_legacy.profile():
                rpc.rpc_sync("worker1", remote_functions.torch_operations)
        return seen

    # The hooks are called for the answer that has headers.
    assert two_workers[0].run(profiles_in_answers) == [True]


def results(profile: rpc.RRef) -> list:
    return profile.local_value().process_global_function_events


def top_level(calls) -> list[str]:
    names = []
    for events in calls:
        end = 0
        for event in events:
            if event.time_range.start > end:
                names.append(event.name)
                end = event.time_range.end
    return sorted(names)


def test_a_worker_profiles_all_calls_it_runs(workers):
    def nested():
        x, y = torch.tensor(1), torch.tensor(2)
        outer = rpc.remote("worker1", rpc.server_process_global_profile)
        outer.rpc_sync().__enter__()
        rpc.rpc_sync("worker1", torch.add, (x, y))
        inner = rpc.remote("worker1", rpc.server_process_global_profile)
        inner.rpc_sync().__enter__()
        rpc.rpc_sync("worker1", torch.sub, (x, y))
        inner.rpc_sync().__exit__(None, None, None)
        outer.rpc_sync().__exit__(None, None, None)
        rpc.rpc_sync("worker1", torch.mul, (x, y))
        events = [rpc.rpc_sync("worker1", results, (each,)) for each in (inner, outer)]
        table = outer.rpc_sync().key_averages().table()
        total = outer.rpc_sync().total_average()
        return [top_level(each) for each in events], table, total.count, outer.rpc_sync().self_cpu_time_total()

    a, _ = workers.rpc(2)
    (inner, outer), table, count, cpu = a.run(nested)
    assert inner == ["aten::sub"]
    assert outer == ["aten::add", "aten::sub"]
    assert "aten::add" in table
    assert count == 2
    assert cpu > 0


def test_misuse_of_a_global_profile(workers):
    def misuse():
        profile = rpc.server_process_global_profile()
        with pytest.raises(RuntimeError, match="__enter__"):
            profile.__exit__(None, None, None)
        with profile, pytest.raises(RuntimeError, match="not reentrant"):
            profile.__enter__()
        with rpc.server_process_global_profile(enabled=False):
            pass
        return len(profile.function_events)

    (a,) = workers.rpc(1)
    assert a.run(misuse) == 0


def test_a_global_profile_that_two_threads_end_keeps_its_results(workers):
    def end() -> int:
        profile = rpc.server_process_global_profile().__enter__()
        rpc.rpc_sync("worker0", torch.add, (torch.ones(1), 1))
        other = threading.Thread(target=profile.__exit__, args=(None, None, None))
        stop = Profiling.stop_collecting

        def stop_meanwhile(profiling: Profiling, collector: rpc.server_process_global_profile) -> None:
            stop(profiling, collector)
            if not other.ident:
                other.start()
                other.join()

        with mock.patch.object(Profiling, "stop_collecting", stop_meanwhile):
            profile.__exit__(None, None, None)
        return len(profile.process_global_function_events)

    (a,) = workers.rpc(1)
    assert a.run(end) == 1


def test_a_global_profile_ends_with_the_worker_that_keeps_it(workers):
    def begin() -> None:
        profile = rpc.remote("worker1", rpc.server_process_global_profile)
        profile.rpc_sync().__enter__()
        remote_functions.keep(profile)

    a, _, c = workers.rpc(3)
    a.run(begin)
    assert c.run(rpc.rpc_sync, "worker1", looks_at_requests)
    a.kill()

    def has_ended() -> bool:
        return not rpc.rpc_sync("worker1", looks_at_requests)

    c.run(remote_functions.wait_until, has_ended)


def looks_at_requests() -> bool:
    gc.collect()
    return current_agent().extension(Profiling).observes_requests
