"""`gradwire run`, or `python -m gradwire.compat`, runs programs for torch, and their processes, on gradwire."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.rpc
from gradwire import compat
from gradwire.cli.run import TRANSPORTS
from gradwire.compat import launch
from gradwire.compat.__main__ import main
from gradwire.rpc.contracts import options

from tests.hostile.listeners import find_listeners
from tests.ports import free_port

PROGRAMS = Path(__file__).parent / "programs"
ON_GRADWIRE = "gradwire.rpc.calls.sending gradwire.rref.rref gradwire.optim.distributed_optimizer True"


@pytest.fixture
def run_quickly(python):
    """Runs `gradwire run` in a process that has imported what it needs."""

    def quickly(*arguments: str) -> str:
        done = python.run("-m", "gradwire", "run", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return quickly


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_a_program_and_its_workers_run_on_gradwire_unmodified(run_quickly, start_method, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    # New interpreters take seconds to load what a step of torch.optim needs.
    what = "train" if start_method == "fork" else "call"
    stepped = "; stepped to 0.0" if what == "train" else ""
    printed = sorted(run_quickly(str(PROGRAMS / "spawned.py"), start_method, what).splitlines())
    assert printed == [
        f"done ['{start_method}', '{what}']",
        f"worker0: {ON_GRADWIRE}{stepped}",
        f"worker1: {ON_GRADWIRE}{stepped}",
    ]


def test_workers_of_torchrun(run_quickly):
    """They are new interpreters."""
    options = ["--nproc-per-node", "2"]
    printed = run_quickly("-m", "torch.distributed.run", *options, str(PROGRAMS / "launched.py"))
    assert sorted(printed.splitlines()) == [f"worker{rank}: True gradwire.rpc.calls.sending" for rank in range(2)]


def test_a_module_runs_as_with_python(run_quickly, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import sys, torch.distributed.rpc\n"
        "print(__name__, sys.argv[1:], __spec__.name, torch.distributed.rpc.remote.__module__)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert run_quickly("-m", "mine", "-x", "y") == "__main__ ['-x', 'y'] mine gradwire.rref.rref\n"


def test_a_process_that_never_imports_torch_does_not_import_gradwire(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine too', __name__)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    launch.install_in_children(environment)
    launch.install_in_children(environment)  # of a child that starts children
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(launch.SITE_DIRECTORY), str(tmp_path)]
    program = "import sys; print([name for name in ('torch', 'gradwire', 'grpc') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.splitlines() == ["mine too sitecustomize", "[]"]


@pytest.mark.parametrize("first", ["import torch.distributed.optim", "from gradwire.rpc import rpc_sync"])
def test_children_may_import_in_any_order(first):
    environment = dict(os.environ)
    launch.install_in_children(environment)
    program = f"{first}; import torch.distributed.rpc as r; print(r.rpc_sync.__module__, r.PyRRef.__module__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "gradwire.rpc.calls.sending gradwire.rref.rref\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "Missing argument 'PROGRAM'"),
        (["-m"], "Missing argument 'PROGRAM'"),
        (["--insecur", "x.py"], "Did you mean '--insecure'?"),
        (["--transports", "pigeon,grpc", "x.py"], "'pigeon' is none of unix, tcp, grpc"),
        (["--transports", "unix", "x.py"], "without grpc"),
        (["no_such.py"], "there is no file 'no_such.py'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, problem, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert problem in capsys.readouterr().err


def test_transports_are_passed_on_to_the_processes(run_quickly, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch.distributed.rpc as rpc\n"
        "print(list(rpc.TensorPipeRpcBackendOptions(init_method='file:///nowhere').transports))\n"
    )
    assert run_quickly("--transports", "tcp,grpc", str(tmp_path / "mine.py")) == "['tcp', 'grpc']\n"


def test_the_transports_are_those_of_the_options():
    assert TRANSPORTS == options.TRANSPORTS


@pytest.mark.parametrize("insecure", [False, True])
def test_groups_one_after_another_leave_no_store_and_no_port(workers, insecure):
    def listening_after_each() -> list[int]:
        compat.install(insecure=insecure)
        counts = []
        for _ in range(3):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
            torch.distributed.rpc.init_rpc("worker", rank=0, world_size=1)
            torch.distributed.rpc.shutdown()
            gc.collect()
            counts.append(len(find_listeners(os.getpid())))
        return counts

    counts = workers(1)[0].run(listening_after_each)
    assert counts == [1, 1, 1]  # other workers may still use the last store
