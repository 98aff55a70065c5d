"""What gradwire logs: levels by part, and how many lines there are when workers die, or Ctrl-C ends them."""

import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from gradwire import logs, rpc
from gradwire.c10d import Credentials
from gradwire.cli.group import gradwire
from gradwire.errors import WorkerLostError
from hypothesis import given
from hypothesis import strategies as st

from tests.remote_functions import wait_for, wait_until
from tests.rpc.transports.test_ports import join


@pytest.fixture
def loggers() -> Iterator[logging.Logger]:
    """The logger `gradwire`; afterwards no logger below it has a level, and it has no handlers."""
    root = logging.getLogger("gradwire")
    before = [*root.handlers]
    yield root
    root.handlers[:] = before
    for name in [*logging.Logger.manager.loggerDict]:
        if name.partition(".")[0] == "gradwire":
            logging.getLogger(name).setLevel(logging.NOTSET)


def test_a_level_counts_for_what_is_inside(loggers):
    logs.set_level("rpc", "DEBUG")
    logs.set_level("rpc.peers", "error")
    logs.set_level("all", logging.INFO)
    levels = {
        name: logging.getLogger(f"gradwire.{name}").getEffectiveLevel()
        for name in ("rpc.transports.sockets", "rpc.peers.links", "c10d.waiting")
    }
    assert levels == {"rpc.transports.sockets": 10, "rpc.peers.links": 40, "c10d.waiting": 20}


@pytest.mark.parametrize(
    ("part", "level", "problem"),
    [
        ("rcp", "INFO", "'rcp' is no part of gradwire: did you mean 'rpc'"),
        ("rpc.agents", "INFO", "no part of gradwire"),
        ("..", "INFO", "no part of gradwire"),
        ("", "INFO", "no part of gradwire"),
        ("rpc", "LOUD", "'LOUD' is no level: give one of DEBUG"),
        ("rpc", -1, "-1 is no level"),
        ("rpc", True, "True is no level"),
    ],
)
def test_what_there_is_not_is_refused(part, level, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        logs.set_level(part, level)


def test_the_variable(loggers, monkeypatch):
    assert logs.parse_levels("rpc=debug, c10d.stores = Info") == {"rpc": "DEBUG", "c10d.stores": "INFO"}
    assert logs.parse_levels("info") == {"all": "INFO"}
    monkeypatch.setenv("GRADWIRE_LOG", "rpc=debug,audit=error")
    logs.set_levels_from_environment()
    assert [logging.getLogger(f"gradwire.{part}").level for part in ("rpc", "audit")] == [10, 40]
    for text in ("rpc=debug,rpc=info", "rpc=", "=debug", "rpc", "rpc=debug,"):
        monkeypatch.setenv("GRADWIRE_LOG", text)
        with pytest.raises(ValueError, match=f"^GRADWIRE_LOG is {text!r}: "):
            logs.set_levels_from_environment()


@given(st.text(alphabet="rpc10d=,debuginfo. \0", max_size=30))
def test_any_text_is_parsed_or_refused(text):
    try:
        levels = logs.parse_levels(text)
    except ValueError:
        return
    assert set(levels.values()) <= {"DEBUG", "ERROR", "INFO"}


def test_lines_are_printed_once(loggers, capsys):
    logs.set_level("rref", "INFO")
    logging.getLogger("gradwire.rref.forks").info("to stderr")
    handler = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(handler)
    for each in [each for each in logging.getLogger().handlers if each is not handler]:
        logging.getLogger().removeHandler(each)  # pytest's
    try:
        logging.getLogger("gradwire.rref.forks").info("to the program's handler")
    finally:
        logging.getLogger().removeHandler(handler)
    printed = capsys.readouterr()
    assert printed.out == "to the program's handler\n"
    assert "program" not in printed.err


PROGRAM = """
import logging
import gradwire
logging.getLogger("gradwire.rref.forks").debug("not this")
logging.getLogger("gradwire.rpc.calls").debug("this")
logging.getLogger("gradwire.net.waiting").warning("and this")
"""


def test_a_program_without_logging_prints_to_stderr(python, monkeypatch, tmp_path):
    (tmp_path / "program.py").write_text(
        PROGRAM.replace("import gradwire\n", "from gradwire import logs\nlogs.set_levels_from_environment()\n")
    )
    monkeypatch.setenv("GRADWIRE_LOG", "rpc=debug")
    done = python.run(tmp_path / "program.py")
    assert (done.returncode, done.stdout) == (0, "")
    lines = [re.sub(r"^[\d-]+ [\d:,]+ \d+ ", "", line) for line in done.stderr.splitlines()]
    assert lines == ["DEBUG gradwire.rpc.calls: this", "WARNING gradwire.net.waiting: and this"]


def test_the_command_says_what_is_wrong_with_the_variable(monkeypatch):
    monkeypatch.setenv("GRADWIRE_LOG", "rpc=loud")
    done = CliRunner().invoke(gradwire, ["flight", "nowhere"])
    assert (done.exit_code, "'loud' is no level" in done.output) == (1, True)


def lose(name: str) -> None:
    with pytest.raises(WorkerLostError):
        rpc.rpc_sync(name, wait_for, ("never",), timeout=0)


def test_a_killed_worker_is_one_line_on_each_other(workers):
    started = workers.rpc(4)
    calls = [worker.start(lose, "worker3") for worker in started[:3]]
    started[3].run(wait_until, lambda: rpc.debug_info()["agent.server_active_calls"] == 3)
    started[3].kill()
    for call in calls:
        call.result()
    workers.each(started[:3], rpc.shutdown)
    for worker in started[:3]:
        (line,) = worker.log.read_text().splitlines()
        assert re.fullmatch(r"worker worker3 is lost: .*", line)


@pytest.mark.parametrize(
    ("transports", "has_token", "way"),
    [
        (("unix", "grpc"), False, r"a unix socket \(pid=\d+,uid=\d+\)"),
        (("tcp", "grpc"), False, r"TCP without TLS \(127\.0\.0\.1:\d+\)"),
        (("grpc",), False, r"gRPC on a unix socket \(/.*\)"),
        (("unix", "grpc"), True, r"a unix socket \(pid=\d+,uid=\d+\)"),
        (("tcp", "grpc"), True, r"TCP with TLS \(127\.0\.0\.1:\d+\)"),
        (("grpc",), True, r"gRPC on a unix socket \(/.*\)"),
    ],
)
def test_one_line_says_how_a_worker_is_connected(workers, transports, has_token, way):
    a, b = started = workers(2)
    workers.each(started, logs.set_level, "rpc.transports.connection_log", "INFO")
    credentials = Credentials(token="5f0c9a1be27d4386a1f4c7d29b0e8653") if has_token else None
    workers.join_rpc(started, transports=transports, credentials=credentials)
    for _ in range(3):
        a.run(rpc.rpc_sync, "worker1", os.getpid)
        b.run(rpc.rpc_sync, "worker0", os.getpid)
    for me, peer, worker in (("worker0", "worker1", a), ("worker1", "worker0", b)):
        (line,) = worker.log.read_text().splitlines()
        text = (
            rf".* INFO gradwire\.rpc\.transports\.connection_log: worker {me} is connected with worker {peer} by "
        )
        assert re.fullmatch(text + way, line)


def test_one_line_says_how_workers_on_two_hosts_are_connected_by_grpc(hosts):
    net = hosts(1, 1)
    for worker in net.workers:
        worker.run(logs.set_level, "rpc.transports.connection_log", "INFO")
    joining = [
        w.start(join, rank, 2, net.address(0), {}, transports=("grpc",)) for rank, w in enumerate(net.workers)
    ]
    for each in joining:
        each.result()
    net.workers[0].run(rpc.rpc_sync, "worker1", os.getpid)
    lines = [line for w in net.workers for line in w.log.read_text().splitlines() if " is connected with " in line]
    assert len(lines) == 2
    for line in lines:
        assert re.search(
            r"worker worker\d is connected with worker worker\d by gRPC with TLS \(10\.91\.0\.\d:\d+\)$", line
        )


SPAWN = """
import contextlib
import os
import sys
import time
from pathlib import Path

from gradwire import launch, rpc
from gradwire.errors import WorkerLostError
from tests.remote_functions import wait_for


def work(rank, folder):
    rpc.init_rpc(f"worker{rank}")
    rpc.barrier()
    Path(folder, str(rank)).touch()
    with contextlib.suppress(WorkerLostError):  # of one that has got its interrupt before this one
        rpc.rpc_sync(f"worker{(rank + 1) % 3}", wait_for, ("never",), timeout=0)
    while True:
        time.sleep(0.1)


if __name__ == "__main__":
    if sys.argv[2:]:
        work(int(os.environ["RANK"]), sys.argv[1])
    else:
        launch.spawn(work, 3, (sys.argv[1],))
"""


def interrupted(python, arguments, folder: Path, watched: int) -> str:
    """Sends SIGINT to a launcher and its processes when they wait for each other; returns what they print."""
    errors = folder / "errors"
    with errors.open("w") as output, python.start(*arguments, stdout=output, stderr=output) as started:
        wait_until(lambda: all((folder / str(rank)).exists() for rank in range(watched)), seconds=60)
        os.killpg(started.pid, signal.SIGINT)
        started.wait(60)
    return errors.read_text()


def without_losses(text: str, reason: str) -> str:
    """Returns what processes print, without that workers are lost: who has no interrupt yet may hear of another's.

    Each of these lines is written at once, but may come amidst a line of a traceback, which is written in pieces.
    """
    return re.sub(rf"worker worker\d is lost: {reason}\n", "", text)


def unindented(text: str) -> list[str]:
    """Returns the lines of tracebacks that are not of their frames, and all lines that are not of tracebacks."""
    return [line for line in text.splitlines() if not line.startswith(" ")]


def test_ctrl_c_on_a_spawn_shows_the_launchers_own_interrupt(python, tmp_path):
    """As with torch.multiprocessing, whose processes end by SIGINT without a traceback."""
    program = tmp_path / "program.py"
    program.write_text(SPAWN)
    text = without_losses(interrupted(python, [program, tmp_path], tmp_path, 3), "it .*")
    assert unindented(text) == ["Traceback (most recent call last):", "KeyboardInterrupt"]


def test_ctrl_c_on_torchrun_shows_the_interrupts_of_the_program(python, tmp_path, monkeypatch, free_port):
    """Each rank has the traceback of its main thread, as without gradwire, and there are none of other threads."""
    program = tmp_path / "program.py"
    program.write_text(SPAWN)
    monkeypatch.setenv("PYTHON_EXEC", str(python.executable))  # torchrun starts it
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", free_port]
    # A file for each rank: torchrun starts them with -u, so that they write pieces of lines, which would be mixed.
    run += ["--redirects", "3", "--log-dir", tmp_path / "logs"]
    console = interrupted(python, [*run, program, tmp_path, "ranks"], tmp_path, 3)
    signaled = r"torch\.distributed\.elastic\.multiprocessing\.api\.SignalException: .*"
    assert re.fullmatch(signaled, unindented(console)[-1])
    assert console.count("Traceback (most recent call last):") == 1
    assert {path.read_text() for path in tmp_path.glob("logs/*/attempt_0/*/stdout.log")} == {""}
    printed = {path.parent.name: path.read_text() for path in tmp_path.glob("logs/*/attempt_0/*/stderr.log")}
    assert printed.keys() == {"0", "1", "2"}
    for text in printed.values():
        text = without_losses(text, "it ended by KeyboardInterrupt")
        assert unindented(text) == ["Traceback (most recent call last):", "KeyboardInterrupt"], text
        assert not re.search(r"(?<![\w/])gradwire-", text)  # the names of threads
        assert "threading.py" not in text


def test_the_parts_that_the_page_names_exist():
    page = (Path(logs.__file__).parent / "docs" / "logging.md").read_text()
    parts = re.findall(r"^\| `([\w.]+)` \|", page, re.M)
    assert len(parts) > 15
    assert logs.parse_levels(",".join(f"{part}=info" for part in dict.fromkeys(parts)))


def test_the_last_lines_are_kept_and_printed_as_without(python):
    program = """
import logging
from gradwire import logs

tail = logs.Tail(2)
log = logging.getLogger("gradwire.rpc.agent")
for each in "abc":
    log.warning(each)
log.info("no warning")
print([line for _, line in tail.lines()])
another = logs.Tail(2, without="view")
logging.getLogger("gradwire.view").warning("where the page is")
print(another.lines())
here = logging.StreamHandler()
logging.getLogger("gradwire.rpc").addHandler(here)
log.warning("by a handler of the program")
logging.getLogger("gradwire.rpc").removeHandler(here)
another.close()
tail.close()
log.warning("d")
print(len(tail.lines()))
"""
    done = python.run("-c", program)
    assert done.stdout == "['WARNING gradwire.rpc.agent: b', 'WARNING gradwire.rpc.agent: c']\n[]\n2\n"
    assert done.stderr == "a\nb\nc\nwhere the page is\nby a handler of the program\nd\n"


def test_a_line_that_cannot_be_written_harms_nobody(python):
    program = """
import logging
from gradwire import logs

tail = logs.Tail(2)
logging.getLogger("gradwire.rpc").warning("%d", "no number")
print(tail.lines())
"""
    done = python.run("-c", program)
    assert done.stdout == "[]\n"
    assert "Logging error" in done.stderr
