"""docs/failures.md says what happens when something dies, and each row names a test that shows it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "failures.md").read_text()
ROWS = [row.strip("| ").split(" | ") for row in re.findall(r"^\| [A-Z].*\|$", PAGE, re.M)]


def test_the_page_has_what_may_happen():
    subjects = " ".join(row[0] for row in ROWS)
    expected = [
        "stopped for 30 s",
        "stopped for 90 s",
        "silent",
        "connection breaks",
        "partitioned",
        "store process",
    ]
    expected += ["rank 0", "disk", "descriptors", "process group", "launcher", "backward", "owner", "user"]
    expected += ["caller", "callee", "worker is killed"]
    assert not [each for each in expected if each.lower() not in subjects.lower()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_row_names_a_test(row):
    assert len(row) == 5
    names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[4])
    assert names
    for path, name in names:
        module = ast.parse((ROOT / path).read_text())
        assert name in [each.name for each in module.body if isinstance(each, ast.FunctionDef)], f"{path}::{name}"
