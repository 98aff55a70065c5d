"""What all pytest processes of a run do. The fixtures for all tests are in tests/fixtures.py."""

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parent.parent
# A loaded machine may keep workers from sending anything for seconds. Tests of liveness set their own options.
os.environ.setdefault("GRADWIRE_SUSPECT_AFTER", "60")
# Threads of OpenMP wait for more work by spinning otherwise: on small tensors, nine tenths of the processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A script's background commands ignore Ctrl-C, and what they start would, too. Many tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Appended, so that worker processes can import test modules by name without shadowing anything.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from tests import servers  # noqa: E402


class RootIsNoPackage:
    """Makes pytest collect the repository root as a plain folder, although it holds gradwire's `__init__.py`.

    pytest would import the package a second time under the name of the folder, which need not be an identifier.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    """Registers `RootIsNoPackage`, since the hooks of a conftest.py do not apply to the folder above its own."""
    config.pluginmanager.register(RootIsNoPackage())
    gc.disable()  # until all test modules are loaded: a fifth of that time went into useless collections
    if hasattr(config, "workerinput"):
        servers.use(Path(config.workerinput["servers"]))
    elif config.getoption("tx", None):  # this process has others run the tests, and need not load torch
        servers.of_this_run()  # which load it meanwhile
        if not sys.dont_write_bytecode:
            rewrite_asserts(config)
        return
    config.pluginmanager.import_plugin("tests.fixtures")


def rewrite_asserts(config: pytest.Config) -> None:
    """Writes the bytecode of test modules, with the asserts that pytest has rewritten, as far as it is not there.

    All processes of a parallel run would do this for all modules, at the same time: four seconds for each of them.
    """
    state = config.stash[rewrite.assertstate_key]
    for path in (ROOT / "tests").rglob("test_*.py"):
        target = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, target) is None and rewrite.try_makedirs(target.parent):
            try:
                digest, code = rewrite._rewrite_test(path, config)
            except (OSError, SyntaxError, UnicodeDecodeError):
                continue  # pytest reports it if it collects it
            rewrite._write_pyc(state, code, digest, target)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Starts the processes from which all others are forked, for all processes of a parallel run."""
    node.workerinput["servers"] = str(servers.of_this_run().folder)


LONG_MODULES = frozenset(
    {
        "test_benchmarks.py",
        "test_conformance.py",
        "test_docs.py",
        "test_elastic_example.py",
        "test_example_programs.py",
        "test_examples.py",
        "test_launch.py",
        "test_listening_sockets.py",
        "test_main.py",
        "test_packaging.py",
        "test_programs.py",
        "test_quiet.py",
        "test_quiet_runs.py",
        "test_restarts.py",
        "test_several_hosts.py",
        "test_tutorials.py",
        "test_types.py",
    }
)
"""Modules whose tests start programs, or wait for what ends after seconds: they take 5 to 30 s each."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long tests first, so that at the end of a parallel run no process waits for one that began late."""
    items.sort(key=lambda item: item.path.name not in LONG_MODULES)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Has garbage collections skip what is loaded by now: tests ask for many, which take 100 ms each otherwise."""
    gc.freeze()
    gc.enable()
