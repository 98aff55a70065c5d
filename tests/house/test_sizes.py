"""Files stay short enough to read in one go: one subject each, whether that takes 60 lines or 700."""

from pathlib import Path

from tests.house.source import LOOSE, MODULES, ROOT, TESTS, path_id

MAX_LINES = 700
MAX_LOOSE_FILES = 10


def line_count(path: Path) -> int:
    """Returns how many lines a file has."""
    return len(path.read_text().splitlines())


def test_files_are_short():
    lines = {path: line_count(path) for path in [*MODULES, *LOOSE, *TESTS]}
    assert not {path_id(path): count for path, count in lines.items() if count > MAX_LINES}


def test_rpc_has_few_loose_files():
    assert len(list((ROOT / "rpc").glob("*.py"))) <= MAX_LOOSE_FILES
