"""The tests of this folder are a suite of their own: `make launchers`."""

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips them in other runs: they start several interpreters each, and need programs that few have."""
    if os.environ.get("GRADWIRE_LAUNCHERS") == "1":
        return
    skip = pytest.mark.skip(reason="make launchers runs it (GRADWIRE_LAUNCHERS=1)")
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(skip)
