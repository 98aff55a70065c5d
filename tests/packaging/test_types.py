"""mypy finds the errors, and only those, in a program that uses gradwire."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import gradwire
import pytest

ROOT = Path(gradwire.__file__).parent
PROGRAM = Path(__file__).with_name("typed_program.py")

CONFIGURATION = """
[mypy]
strict = True
follow_imports = silent

[mypy-{unread}]
follow_imports = skip
"""
UNREAD_OF_TORCH = (
    "_decomp|_dynamo|_export|_functorch|_higher_order_ops|_inductor|_prims|_refs|_subclasses|ao|backends"
)
UNREAD_OF_TORCH += "|cuda|distributed|export|fx|masked|nested|onnx|profiler|sparse|testing|utils._sympy|utils.data"
UNREAD = ["grpc.*", "numpy.*", "sympy.*", *(f"torch.{name}.*" for name in UNREAD_OF_TORCH.split("|"))]
"""Modules that the page does not need, and that mypy would take 7 s to read."""


@pytest.fixture
def installed(tmp_path) -> Path:
    """A folder with the program, from which mypy imports gradwire as users' programs do."""
    (tmp_path / "gradwire").symlink_to(ROOT)
    # A copy: mypy takes the folders above a file for packages, and a checkout may have any name.
    shutil.copy(PROGRAM, tmp_path)
    return tmp_path


def test_a_users_program_is_checked(installed, pytestconfig):
    """mypy finds every error that the page announces, at its line, and no other; `assert_type` fails with one."""
    cache = pytestconfig.cache.mkdir("mypy")  # torch's own types take 10 s to read for the first time
    configuration = installed / "mypy.ini"
    configuration.write_text(CONFIGURATION.format(unread=",".join(UNREAD)))
    command = [sys.executable, "-m", "mypy", f"--config-file={configuration}", f"--cache-dir={cache}"]
    done = subprocess.run(
        [*command, str(installed / PROGRAM.name)],
        env={"MYPYPATH": str(installed), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    found: dict[int, set[str]] = {}
    for line, code in re.findall(r"^.*?:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.M):
        found.setdefault(int(line), set()).add(code)
    announced = {
        number: set(codes.split(", "))
        for number, text in enumerate(PROGRAM.read_text().splitlines(), 1)
        for codes in re.findall(r"# error: (.*)$", text)
    }
    assert len(announced) > 20
    assert found == announced, done.stdout + done.stderr


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "py.typed").exists()
    assert re.search(r'^gradwire = \["py.typed"\]$', (ROOT / "pyproject.toml").read_text(), re.M)
