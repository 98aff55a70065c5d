"""What tests set in gradwire's modules and classes exists: a renamed limit would be set without any effect."""

import ast
import functools

from tests.house.source import ROOT, path_id


def names_replaced(code: str) -> dict[str, bool]:
    """Returns which names of gradwire's modules and classes the code assigns to, and whether each exists."""
    nodes = list(ast.walk(ast.parse(code)))
    imported: dict[str, object] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gradwire":
            exec(ast.unparse(node), imported)  # noqa: S102 - an import statement
    found = {}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            *path, name = ast.unparse(node).split(".")
            if path[0] in imported:
                owner = functools.reduce(getattr, path[1:], imported[path[0]])
                found[ast.unparse(node)] = hasattr(owner, name)
    return found


def test_what_tests_replace_exists():
    replaced = {path_id(path): names_replaced(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    assert any(replaced.values())
    missing = {path: [name for name, exists in names.items() if not exists] for path, names in replaced.items()}
    assert not {path: names for path, names in missing.items() if names}


def test_replaced_names_are_seen():
    code = "from gradwire import rpc as r\nr.RRef = 1\nr.NO_SUCH_NAME, x = 1, 2"
    assert names_replaced(code) == {"r.RRef": True, "r.NO_SUCH_NAME": False}
