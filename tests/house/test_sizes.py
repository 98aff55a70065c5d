"""Files stay short enough to read in one go."""

from pathlib import Path

from tests.house.source import LOOSE, MODULES, ROOT, TESTS, path_id

MAX_MODULE_LINES = 400
MAX_TEST_LINES = 500
MAX_LOOSE_FILES = 10


def line_count(path: Path) -> int:
    """Returns how many lines a file has."""
    return len(path.read_text().splitlines())


def limit(path: Path) -> int:
    """Returns how many lines a file may have."""
    return MAX_TEST_LINES if path.is_relative_to(ROOT / "tests") else MAX_MODULE_LINES


def test_files_are_short():
    lines = {path: line_count(path) for path in [*MODULES, *LOOSE, *TESTS]}
    assert not {path_id(path): count for path, count in lines.items() if count > limit(path)}


def test_rpc_has_few_loose_files():
    assert len(list((ROOT / "rpc").glob("*.py"))) <= MAX_LOOSE_FILES
