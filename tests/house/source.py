"""The source of gradwire as the house tests see it: its files, and which module imports which."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import gradwire

ROOT = Path(gradwire.__file__).parent
PACKAGES = [
    "proto",
    "net",
    "c10d",
    "launch",
    "rpc",
    "rref",
    "autograd",
    "optim",
    "nn",
    "view",
    "tracing",
    "compat",
    "cli",
]
LOOSE = sorted(ROOT.glob("*.py"))
"""The modules of the package that are in no folder."""

NOT_WRITTEN_AS_MODULES = [ROOT / "proto" / "v1", ROOT / "compat" / "site"]
"""Generated code, and what other processes run when they start."""

MODULES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if path.parent not in NOT_WRITTEN_AS_MODULES
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PROGRAMS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))


def path_id(path: Path) -> str:
    """Returns a path as a test's id shows it."""
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    """Returns the name of a module inside gradwire: `rpc.wire.tensors`, or `rpc.wire` for its `__init__`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def tree(path: Path) -> ast.Module:
    """Returns the parsed source of a file. Not kept: with all trees, garbage collections take 100 ms."""
    return ast.parse(path.read_text(), filename=str(path))


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Returns the modules of gradwire that a module imports anywhere, imports for type checkers included."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            source = ".".join(part for part in base if part)
            for alias in node.names:
                inner = f"{source}.{alias.name}".lstrip(".")
                yield inner if _is_module(inner) else source


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def import_graph(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Returns for each of some modules which others of them it imports."""
    names = {module_name(path): path for path in paths}
    return {
        name: {each for each in imported_modules(path) if each in names} - {name} for name, path in names.items()
    }


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns the groups of nodes that reach each other, by Tarjan's algorithm (SIAM J. Comput. 1, 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for successor in sorted(graph[node]):
            if successor not in index:
                visit(successor)
                lowest[node] = min(lowest[node], lowest[successor])
            elif successor in stack:
                lowest[node] = min(lowest[node], index[successor])
        if lowest[node] == index[node]:
            position = stack.index(node)
            component = stack[position:]
            del stack[position:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found)
