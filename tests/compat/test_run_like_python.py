"""What a program sees under `gradwire run` is what it sees under `python`."""

import ast
import contextlib
import os
import shutil
import subprocess
import sys
import zipapp
from pathlib import Path

import gradwire
import pytest
from gradwire.compat import launch

PROGRAMS = Path(__file__).parent / "programs"

CASES: dict[str, tuple[str, ...]] = {
    "a script, whose spawned process sends it something": ("probe.py", "child"),
    "a script, which a thread outlives": ("probe.py", "thread"),
    "a script that ends with a text": ("probe.py", "text", "-m", "--more"),
    "a script that ends by an error": ("folder/../probe.py", "error"),
    "a script that ends by Ctrl-C": ("probe.py", "interrupt"),
    "a module": ("-m", "package.probe", "child"),
    "a folder": ("folder", "status"),
    "an archive": ("archive.pyz", "error"),
    "standard input": ("-", "text"),
}
"""Arguments of `python`, the last of which the program gets."""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """The current folder has the program in all forms that Python runs."""
    for folder in ("folder", "package"):
        (tmp_path / folder).mkdir()
        shutil.copy(PROGRAMS / "probe.py", tmp_path / folder / "__main__.py")
    shutil.copy(PROGRAMS / "probe.py", tmp_path / "package" / "probe.py")
    shutil.copy(PROGRAMS / "probe.py", tmp_path / "probe.py")
    (tmp_path / "package" / "__init__.py").touch()
    zipapp.create_archive(tmp_path / "folder", tmp_path / "archive.pyz")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)


def start(*arguments: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    with open("probe.py") as program:
        return subprocess.Popen(
            [sys.executable, *options, *arguments],
            stdin=program,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def test_a_program_sees_and_does_what_it_does_under_python(programs):
    options = ("-Wonce", "-u", "-X", "faulthandler")
    with contextlib.ExitStack() as stack:
        started = {
            (case, run): stack.enter_context(start(*run, *arguments, options=options))
            for case, arguments in CASES.items()
            for run in ((), ("-m", "gradwire", "run"))
        }
        ended = {key: (*each.communicate(timeout=60), each.returncode) for key, each in started.items()}
    for case in CASES:
        expected, found = ended[case, ()], ended[case, ("-m", "gradwire", "run")]
        assert '"argv"' in expected[0]
        assert found == expected, case


def test_the_hidden_sitecustomize_runs_under_any_python(tmp_path):
    """Python runs gradwire's in helpers, too, which may be older than gradwire needs."""
    mine = tmp_path / "sitecustomize.py"
    mine.write_text("import sys; print('mine', __name__, sys.modules[__name__].__file__)")
    environment = dict(os.environ)
    environment["PYTHONPATH"] = str(tmp_path)
    launch.install_in_children(environment)
    program = "import sys; sys.version_info = {}; import site; site.main(); print(*sys.meta_path)"
    for version in ((3, 6, 9), (2, 7, 18), sys.version_info[:5]):
        done = subprocess.run(
            [sys.executable, "-S", "-c", program.format(version)], capture_output=True, text=True, env=environment
        )
        first, finders = done.stdout.splitlines()
        assert first == f"mine sitecustomize {mine}"
        assert ("_HookingFinder" in finders) == (version[:2] >= (3, 11))
        assert done.stderr == ""
    source = (Path(gradwire.__file__).parent / "compat" / "site" / "sitecustomize.py").read_text()
    ast.parse(source, feature_version=(3, 4))
    assert not any(isinstance(node, ast.JoinedStr | ast.AnnAssign) for node in ast.walk(ast.parse(source)))


@pytest.mark.parametrize("option", ["-E", "-I"])
def test_options_that_keep_gradwire_out_are_refused(programs, option):
    with start("-m", "gradwire", "run", "probe.py", "text", options=(option,)) as process:
        assert "Python has been started with -E, -I or -S" in process.communicate(timeout=60)[1]
    assert process.returncode == 1
