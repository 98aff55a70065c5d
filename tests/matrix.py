"""Runs `make test` on several releases of torch, each in an environment of its own, and prints a table of results.

python -m tests.matrix 2.11.0 2.15.0

Environments are `.venv/torch-VERSION`; that of the release in requirements-torch.txt is `.venv` itself. The output
of a run is also kept there, in `test.log`.
"""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Result", "main", "table"]

ROOT = Path(__file__).parent.parent
COUNTS = ("passed", "failed", "errors", "skipped")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one run: the release of torch, the exit status of make, and the last line of pytest."""

    torch: str
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
        return [self.torch, *(counts.get(kind, "0") for kind in COUNTS), time]


def table(results: Sequence[Result]) -> str:
    """Returns the results as text, one release a line."""
    rows = [["torch", *COUNTS, "time"], *(result.cells() for result in results)]
    return "\n".join("".join(f"{cell:>14}" for cell in row) for row in rows)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status, 0 if all tests passed on all releases."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description="make test, on releases of torch")
    parser.add_argument("--make", default="make", help="the make that runs the tests")
    parser.add_argument("torch", nargs="+", help="releases of torch, such as 2.15.0")
    options = parser.parse_args(arguments)
    results = [_run(torch, shlex.split(options.make)) for torch in options.torch]
    print(f"\n{table(results)}")
    return int(any(result.status for result in results))


def _run(torch: str, make: Sequence[str]) -> Result:
    folder, settings = ROOT / ".venv", []
    if f"torch=={torch}\n" not in (ROOT / "requirements-torch.txt").read_text():
        folder /= f"torch-{torch}"
        settings = [f"VENV=.venv/{folder.name}", f'TORCH_PINS="torch=={torch}" "setuptools>=77"']
    print(f"torch {torch}, in {folder.relative_to(ROOT)}", flush=True)
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
    return Result(torch, run.returncode, last)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
