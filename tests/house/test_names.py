"""Words that the project has replaced stay out of its names. The words are in retired_words.toml."""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import LOOSE, MODULES, PROGRAMS, ROOT, TESTS, path_id, tree

WORDS = tomllib.loads(Path(__file__).with_name("retired_words.toml").read_text())
RETIRED_NAMES = {name: entry["write"] for entry in WORDS["retired"] for name in entry.get("names", [])}
RETIRED_WORDS = {word: entry["write"] for entry in WORDS["retired"] for word in entry.get("words", [])}
KEPT = [(entry["name"], entry["where"]) for entry in WORDS.get("kept", [])]
PROTOS = sorted((ROOT / "proto").rglob("*.proto"))


def split(name: str) -> str:
    """Returns the parts of a name in lower case with spaces between and around them: ` form timeout s `."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return f" {' '.join(parts).lower()} "


@functools.cache
def replacement(name: str) -> str | None:
    """Returns what to write instead of what is retired in a name; None if nothing is."""
    if name in RETIRED_NAMES:
        return RETIRED_NAMES[name]
    parts = split(name)
    return next((write for word, write in RETIRED_WORDS.items() if f" {word} " in parts), None)


@functools.cache
def names_in(path: Path) -> tuple[tuple[int, str], ...]:
    """Returns the names of definitions, parameters, variables and attributes in a file, and their lines."""
    return tuple(_names(tree(path)))


def _names(code: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(code):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name


def is_kept(path: Path, name: str) -> bool:
    """Returns whether the list says that a name may stay in this file."""
    return any(name == kept and path_id(path).startswith(where) for kept, where in KEPT)


def is_prose(path: Path, name: str) -> bool:
    """Returns whether a name is a phrase about one test: the functions and variables of test modules are."""
    return path.name.startswith("test_") and not name.strip("_")[:1].isupper()


def findings(path: Path) -> Iterator[str]:
    """Yields the retired names in a file, as `file:line: name: what to write`."""
    if write := replacement(path.stem):
        yield f"{path_id(path)}: rename the module: write {write}"
    if not any(map(replacement, set(re.findall(r"\w+", path.read_text())))):
        return  # without parsing it
    for line, name in names_in(path):
        if not is_prose(path, name) and not is_kept(path, name) and (write := replacement(name)):
            yield f"{path_id(path)}:{line}: {name}: write {write}"


@pytest.mark.parametrize(
    "paths", [[*MODULES, *LOOSE], PROGRAMS, TESTS], ids=["package", "examples and benchmarks", "tests"]
)
def test_names_have_no_retired_words(paths):
    found = [finding for path in paths for finding in findings(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", PROTOS, ids=path_id)
def test_names_on_the_wire_have_no_retired_words(path):
    code = re.sub(r"//.*", "", path.read_text())
    found = {name: write for name in re.findall(r"\w+", code) if (write := replacement(name))}
    assert not found


def test_folders_have_no_retired_words():
    assert not [path_id(path) for path in {path.parent for path in MODULES} if replacement(path.name)]


def test_the_list_is_used_and_explained():
    assert all(entry["write"] and (entry.get("words") or entry.get("names")) for entry in WORDS["retired"])
    assert all(entry["reason"] for entry in WORDS.get("kept", []))
    paths = [*MODULES, *LOOSE, *PROGRAMS, *TESTS]
    for kept, where in KEPT:
        places = [path for path in paths if path_id(path).startswith(where) and kept in path.read_text()]
        assert any(name == kept for path in places for _, name in names_in(path)), f"remove {kept}"


@pytest.mark.parametrize(
    ("name", "is_retired"),
    [
        ("GatheringOptions", True),
        ("_messages_under_way", True),
        ("GIVE_UP_SECONDS", True),
        ("arriving", True),
        ("HTTPLane2", True),
        ("tensorboard", False),
        ("doorbell", False),
        ("_arriving", False),
        ("all_gather", False),
    ],
)
def test_words_are_found_as_parts_of_names(name, is_retired):
    assert bool(replacement(name)) == is_retired
