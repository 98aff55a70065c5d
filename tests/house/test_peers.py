"""What this worker knows of another one is in that one's Peer, and in no table by its id."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import MODULES, ROOT, path_id

ROOMS = ("peers", "membership", "collectives")
"""Rooms that are about sets of workers: the peers themselves, who is a member, and the members of a round."""

TABLE = re.compile(r"\b(dict|OrderedDict|defaultdict|Counter|set)\[(int|str)\b")
BY_WORKER = re.compile(
    r"\b(by|ids of)( (the|its|wire|worker|id|ids|name|names|of|all))* (worker|peer|sender|receiver|caller)s?\b",
    re.I,
)


def tables_by_worker(path: Path) -> Iterator[str]:
    """Yields the attributes of a module that are said to be by worker."""
    for function in ast.walk(ast.parse(path.read_text())):
        body = function.body if isinstance(function, ast.FunctionDef | ast.ClassDef) else []
        for statement, text in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and TABLE.search(ast.unparse(statement.annotation)):
                said = text.value if isinstance(text, ast.Expr) else None
                if isinstance(said, ast.Constant) and BY_WORKER.search(str(said.value)):
                    yield f"{path_id(path)}:{statement.lineno}: {ast.unparse(statement.target)}"


def test_there_are_no_tables_by_worker_beside_the_peers():
    rpc = ROOT / "rpc"
    modules = [path for path in MODULES if path.is_relative_to(rpc)]
    found = [path for path in modules if path.relative_to(rpc).parts[0] not in ROOMS]
    assert not [table for path in found for table in tables_by_worker(path)]
    assert any(True for path in modules for _ in tables_by_worker(path))  # in the rooms that may have some
