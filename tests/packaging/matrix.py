"""Runs `make test` on several releases of torch and of Python, and prints a table of results.

python -m tests.packaging.matrix --python python3.12 --python python3.13 2.11.0 2.15.0

All releases of torch run on the interpreter that runs this. The release in requirements-torch.txt runs on each
other interpreter, too: of the PATH, or of pyenv. An interpreter that is not found is told, and left out.

Environments are `.venv/torch-VERSION` and `.venv/python3.N`; that of the release in requirements-torch.txt, on the
interpreter that runs this, is `.venv` itself. The output of a run is also kept there, in `test.log`.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Result", "main", "table"]

ROOT = Path(__file__).parent.parent.parent
COUNTS = ("passed", "failed", "errors", "skipped")
THIS_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one run: releases of torch and Python, exit status of make, and the last line of pytest."""

    torch: str
    python: str
    status: int
    last: str

    def cells(self) -> list[str]:
        """Returns the row of the table."""
        counts = {
            "errors" if kind.startswith("error") else kind: number
            for number, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", self.last)
        }
        seconds = re.search(r" in ([\d.]+)s", self.last)
        time = f"{float(seconds[1]):.0f} s" if seconds else "no tests ran"
        return [self.torch, self.python, *(counts.get(kind, "0") for kind in COUNTS), time]


def table(results: Sequence[Result]) -> str:
    """Returns the results as text, one run a line."""
    rows = [["torch", "python", *COUNTS, "time"], *(result.cells() for result in results)]
    return "\n".join("".join(f"{cell:>14}" for cell in row) for row in rows)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status, 0 if all tests passed in all runs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.packaging.matrix", description="make test, on releases of torch and of Python"
    )
    parser.add_argument("--make", default="make", help="the make that runs the tests")
    parser.add_argument("--python", action="append", default=[], help="an interpreter, such as python3.13")
    parser.add_argument("torch", nargs="+", help="releases of torch, such as 2.15.0")
    options = parser.parse_args(arguments)
    make = shlex.split(options.make)
    results = [_run(torch, None, make) for torch in options.torch]
    others = [name for name in options.python if Path(name).name != THIS_PYTHON]
    found = {name: path for name in others if (path := _find(name)) is not None}
    results += [_run(_pinned(), path, make) for path in found.values()]
    print(f"\n{table(results)}")
    if missing := [name for name in others if name not in found]:
        print(f"not found, so not tested: {', '.join(missing)}")
    return int(any(result.status for result in results))


def _find(name: str) -> str | None:
    """Returns the path of an interpreter; None if there is none that runs."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = [path] if (path := shutil.which(name)) is not None else []
    for found in [*on_path, *map(str, sorted(pyenv.glob(f"versions/*/bin/{Path(name).name}")))]:
        # A shim of pyenv is there for each version that it has, and fails for those that are not chosen.
        if subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    return None


def _pinned() -> str:
    pin = re.search(r"^torch==(\S+)$", (ROOT / "requirements-torch.txt").read_text(), re.M)
    assert pin is not None
    return pin[1]


def _run(torch: str, python: str | None, make: Sequence[str]) -> Result:
    """Runs the tests on a release of torch and an interpreter: its path, or None for the one that runs this."""
    name = THIS_PYTHON if python is None else Path(python).name
    folder, settings = ROOT / ".venv", []
    if python is not None:
        folder /= name
        settings = [f"VENV=.venv/{name}", f"PYTHON={python}"]
    elif torch != _pinned():
        folder /= f"torch-{torch}"
        settings = [f"VENV=.venv/{folder.name}", f'TORCH_PINS="torch=={torch}" "setuptools>=77"']
    print(f"torch {torch} on {name}, in {folder.relative_to(ROOT)}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    last = ""
    with (
        (folder / "test.log").open("w") as log,
        subprocess.Popen(
            [*make, "--no-print-directory", "test", *settings],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as run,
    ):
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            log.write(line)
            if re.search(r"\d+ (passed|failed|errors?|skipped).* in [\d.]+s", line):
                last = line
    return Result(torch, name, run.returncode, last)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
