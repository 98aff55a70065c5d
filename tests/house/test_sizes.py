"""Files stay short enough to read in one go, and constructors in rpc take at most six things."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import LOOSE, MODULES, ROOT, TESTS, path_id

MAX_LINES = 700
MAX_LOOSE_FILES = {"": 6, "c10d": 6, "rpc": 8}
MAX_PARAMETERS = 6
"""Of a constructor. Who needs more has several subjects, or parts that belong together."""


def line_count(path: Path) -> int:
    """Returns how many lines a file has."""
    return len(path.read_text().splitlines())


def test_files_are_short():
    lines = {path: line_count(path) for path in [*MODULES, *LOOSE, *TESTS]}
    assert not {path_id(path): count for path, count in lines.items() if count > MAX_LINES}


def test_few_files_are_loose():
    counts = {name: len(list((ROOT / name).glob("*.py"))) for name in MAX_LOOSE_FILES}
    assert not {name: count for name, count in counts.items() if count > MAX_LOOSE_FILES[name]}


def large_constructors(path: Path) -> Iterator[str]:
    """Yields the classes of a module whose constructors take more, besides `self`."""
    classes = [each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.ClassDef)]
    for each in classes:
        made = [
            member for member in each.body if isinstance(member, ast.FunctionDef) and member.name == "__init__"
        ]
        if any(len(init.args.args) - 1 + len(init.args.kwonlyargs) > MAX_PARAMETERS for init in made):
            yield f"{path_id(path)}: {each.name}"


def test_constructors_take_few_things():
    modules = [path for path in MODULES if path.is_relative_to(ROOT / "rpc")]
    assert not [name for path in modules for name in large_constructors(path)]
