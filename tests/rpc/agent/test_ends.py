"""Surviving workers learn how a worker ended."""

import contextlib
import os
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest
import torch.multiprocessing
from gradwire import compat, rpc
from gradwire.errors import LossCause, WorkerLostError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.worker import MAX_REASON, WorkerEnd

from tests.remote_functions import add, set_event, wait_for, wait_until
from tests.workers import _context, _init_rpc


def join(name: str, rank: int, size: int, url: str) -> None:
    _init_rpc(name, rank, size, url, {})


def join_and_end(url: str, how: str, output: str) -> None:
    """Runs a worker that has been called and has called, and ends in one of several ways."""
    sys.stderr = open(output, "w")  # noqa: SIM115 - as long as the process
    join("worker1", 1, 3, url)
    assert rpc.rpc_sync("worker0", add, (1, 1)) == 2
    wait_for("end")
    end_in_some_way(how)


def end_in_some_way(how: str) -> None:
    match how:
        case "raise":
            raise ValueError("no\nbread")
        case "raise after a failure":
            try:
                raise ValueError("no\nbread")
            except ValueError:
                sys.exit(1)
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave":
            rpc.shutdown(graceful=False)
            raise ValueError("of no interest")


ENDS = {
    "raise": "it ended by ValueError: no bread",
    "raise after a failure": "it ended by ValueError: no bread",
    "exit": "it exited with status 3 without calling shutdown",
    "return": "it exited without calling shutdown",
    "interrupt": "it ended by KeyboardInterrupt",
    "kill": "its process has ended without a goodbye",
    "leave": "it has shut down",
}


def call_and_lose(why: str) -> str:
    """Checks that a pending call and a later one fail with the reason, and returns it."""
    pending = rpc.rpc_async("worker1", wait_for, ("never",), timeout=0)
    with contextlib.suppress(WorkerLostError):  # it may end before it can answer
        rpc.rpc_sync("worker1", set_event, ("end",))
    reasons = []
    for call in (pending.wait, lambda: rpc.rpc_sync("worker1", add, (1, 1))):
        with pytest.raises(WorkerLostError) as caught:
            call()
        reasons.append(caught.value.reason)
    assert rpc.debug_info()["lost_workers"]["worker1"] == reasons[0] == reasons[1]
    assert re.fullmatch(why, reasons[0])
    return reasons[0]


def printed(log: Path) -> list[str]:
    """Returns the lines that a worker has printed: warnings, as logging is not configured. gRPC prints nothing."""
    return log.read_text().splitlines()


def shut_down_as_in_torch() -> None:
    compat.install()
    import torch.distributed.rpc

    torch.distributed.rpc.shutdown()


@pytest.mark.parametrize(
    ("how", "shut_down"), [*((how, rpc.shutdown) for how in ENDS), ("raise", shut_down_as_in_torch)]
)
def test_survivors_learn_how_a_worker_ended(workers, tmp_path, how, shut_down):
    """A connected worker learns it at once, another one at the latest when it shuts down."""
    survivors = workers(2)
    url = f"file://{tmp_path}/rendezvous"
    victim = _context.Process(target=join_and_end, args=(url, how, str(tmp_path / "victim")), daemon=True)
    victim.start()
    joining = [survivors[number].start(join, f"worker{2 * number}", 2 * number, 3, url) for number in range(2)]
    for each in joining:
        each.result()
    why = survivors[0].run(call_and_lose, ENDS[how])
    if how not in ("kill", "leave"):
        wait_until(lambda: printed(survivors[1].log))  # the goodbye may arrive after the one to worker 0
    workers.each(survivors, shut_down)
    victim.join(30)
    for number, survivor in ((0, survivors[0]), (2, survivors[1])):
        lines = printed(survivor.log)
        if how == "leave":
            # Worker 2, to which it had no connection to say goodbye by, may have dialled it before it was told.
            unreachable = r"worker worker1 is lost: it cannot be reached at .*"
            assert lines == [] or (number == 2 and len(lines) == 1 and re.fullmatch(unreachable, lines[0]))
        elif how == "kill" and number == 2:  # worker 0 tells it, or it has just tried to connect
            (line,) = lines
            told = re.fullmatch(r"worker worker(?:2 shuts down without worker1 \(|1 is lost: )(.*?)\)?", line)
            assert told
            assert told[1] == why or told[1].startswith("it cannot be reached at ")
        else:
            assert lines == [f"worker worker1 is lost: {why}"]


def fail_in_turn(rank: int, url: str) -> None:
    join(f"worker{rank}", rank, 2, url)
    if rank == 1:
        rpc.rpc_sync("worker0", set_event, ("met",))
        end_in_some_way("raise")
    wait_for("met")
    with pytest.raises(WorkerLostError, match="'worker1' is lost: it ended by ValueError: no bread"):
        wait_until(lambda: rpc.rpc_sync("worker1", add, (1, 1)) is None)
    rpc.shutdown()


def test_processes_of_torchs_launcher(tmp_path):
    context = torch.multiprocessing.start_processes(
        fail_in_turn, (f"file://{tmp_path}/rendezvous",), 2, join=False, start_method="forkserver"
    )
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="ValueError: no\nbread") as caught:
        while not context.join(grace_period=30):
            pass
    assert caught.value.error_index == 1
    assert context.processes[0].exitcode == 0


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ("{}['bread']", "it ended by KeyError: 'bread'"),
        ("raise KeyboardInterrupt", "it ended by KeyboardInterrupt"),
        ("sys.exit('no bread')", "it exited without calling shutdown"),
    ],
)
def test_scripts(workers, python, tmp_path, last, why):
    """Scripts end when the interpreter exits."""
    (survivor,) = workers(1)
    script = f"""
        import sys
        from gradwire import rpc
        options = rpc.RpcBackendOptions(init_method="file://{tmp_path}/rendezvous")
        rpc.init_rpc("worker1", rank=1, world_size=2, rpc_backend_options=options)
        {last}
    """
    joining = survivor.start(join, "worker0", 0, 2, f"file://{tmp_path}/rendezvous")
    done = python.run("-c", textwrap.dedent(script))
    assert done.returncode != 0
    joining.result()
    survivor.run(wait_until, lambda: rpc.debug_info()["lost_workers"] == {"worker1": why})


def shut_down_interruptibly() -> None:
    signal.signal(signal.SIGUSR2, signal.default_int_handler)
    rpc.shutdown()


def is_shutting_down() -> bool:
    return any(each["operation"] == "shutdown" for each in rpc.debug_info()["collectives"])


def wait_until_the_other_shuts_down() -> None:
    wait_until(lambda: rpc.rpc_sync("worker1", is_shutting_down))


def test_an_interrupted_shutdown(workers):
    a, b = workers.rpc(2)
    pending = b.start(shut_down_interruptibly)
    a.run(wait_until_the_other_shuts_down)
    os.kill(b.pid, signal.SIGUSR2)
    with pytest.raises(KeyboardInterrupt):
        pending.result()
    a.run(wait_until, lambda: rpc.debug_info()["lost_workers"] == {"worker1": "it ended by KeyboardInterrupt"})


def test_the_reason_of_a_peer_is_bounded_and_printable():
    said = agent_pb2.Departure(kind=agent_pb2.Departure.EXCEPTION, reason="\x1b[31m" + "a\r\nb" * 10_000_000)
    end = WorkerEnd.from_proto(said)
    assert len(end.reason) == MAX_REASON
    assert end.reason.startswith("\\x1b[31ma ba b")
    assert end.reason.isprintable()
    assert (
        WorkerEnd.from_proto(agent_pb2.Departure(kind=77, reason="")).reason == "it ended without calling shutdown"
    )
    assert WorkerEnd.from_proto(agent_pb2.Departure(reason="no such thing")).reason == "it has shut down"


def test_an_error_whose_str_raises():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert WorkerEnd.by_error(Mute()).cause is LossCause.EXCEPTION


def test_an_error_in_a_prompt_ends_nothing(monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError("typed an hour ago"), raising=False)
    monkeypatch.setattr(sys, "last_exc", ValueError("typed an hour ago"), raising=False)
    assert WorkerEnd.of_this_process(None).cause is LossCause.EXCEPTION
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert WorkerEnd.of_this_process(None).cause is LossCause.EXIT
