"""A wheel and an sdist have what they should, and the command runs from the wheel alone."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import gradwire
import pytest

from tests.house.source import MODULES, ROOT

BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"

NOT_COPIED = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "out")

PROGRAM = """
import os, sys
import gradwire
from gradwire import rpc
name = os.environ["GRADWIRE_WORKER_NAME"]
rpc.init_rpc(name)
print(name, "is called by", rpc.rpc_sync(name, os.getenv, ("GRADWIRE_WORKER_NAME",)))
print(gradwire.__file__)
rpc.shutdown()
"""


def build(source: Path, kind: str, target: Path) -> Path:
    """Builds the `wheel` or the `sdist` of a source tree, without network; returns the file."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("packaging")
    shutil.copytree(ROOT, folder / "source", ignore=NOT_COPIED)
    sdist = build(folder / "source", "sdist", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    return sdist, build(folder / "unpacked" / sdist.name.removesuffix(".tar.gz"), "wheel", folder)


def test_the_wheel_has_the_package_and_nothing_else(built):
    names = set(zipfile.ZipFile(built[1]).namelist())
    modules = {f"gradwire/{path.relative_to(ROOT)}" for path in [*MODULES, *ROOT.glob("*.py")]}
    assert modules <= names
    assert {
        "gradwire/py.typed",
        "gradwire/compat/site/sitecustomize.py",
        "gradwire/proto/gradwire/v1/store.proto",
        "gradwire/proto/v1/store_pb2.py",
        "gradwire/proto/v1/store_pb2.pyi",
    } <= names
    top = {name.split("/")[1] for name in names if name.startswith("gradwire/")}
    assert not top & {"tests", "docs", "examples", "benchmarks", "build"}
    assert {name.split("/")[0] for name in names} == {"gradwire", f"gradwire-{gradwire.__version__}.dist-info"}


def test_the_sdist_has_the_tests_and_the_docs(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"docs/cli.md", "tests/conftest.py", "tests/house/retired_words.toml", "examples/pipeline.py"} <= names
    assert {"Makefile", "CHANGELOG.md", "LICENSE", "benchmarks/__main__.py", "requirements-dev.txt"} <= names
    assert not [name for name in names if ".venv" in name or "__pycache__" in name]


def test_the_command_runs_from_the_wheel(built, tmp_path):
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    subprocess.run(
        [*pip, "--no-deps", "--no-compile", "--target", str(site), str(built[1])], check=True, timeout=110
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(site / "bin" / "gradwire"), *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "doctor" in run("--help")
    where = site / "gradwire" / "__init__.py"
    assert run("spawn", "--names", "a", "1", "program.py").splitlines() == ["[a] a is called by a", f"[a] {where}"]
