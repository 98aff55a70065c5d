"""The rules of the house: who imports whom, sorted faces, fresh generated code."""

import ast
import importlib
import re
from pathlib import Path

import gradwire
import pytest
from gradwire.proto.generate import generate

ROOT = Path(gradwire.__file__).parent
PACKAGES = ["proto", "c10d", "rpc", "rref", "autograd", "optim", "nn", "compat"]
MAY_IMPORT = {
    "proto": set(),
    "c10d": {"proto", "errors"},
    "rpc": {"proto", "c10d", "errors"},
    "rref": {"proto", "rpc", "errors"},
    "autograd": {"proto", "rpc", "errors"},
    "optim": {"rpc", "rref", "autograd", "c10d", "errors"},
    "nn": {"rpc", "rref", "autograd", "c10d", "errors"},
    "compat": {"rpc", "rref", "autograd", "optim", "nn", "c10d", "errors"},
}
NO_MODULES = [ROOT / "proto" / "v1", ROOT / "compat" / "site"]
"""What is generated, and what runs at the start of other processes."""
TOP = [ROOT / "__init__.py", ROOT / "errors.py", ROOT / "launch.py"]
MODULES = sorted(
    path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.parent not in NO_MODULES
)


def packages_imported(path: Path) -> set[str]:
    """The top-level parts of gradwire that a module imports from."""
    found = set()
    here = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level + 1]
            target = (*base, *(node.module or "").split("."))
            names = [target[0]] if target[0] else [alias.name for alias in node.names]
            found.update(names)
    return found - {here[0]}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    allowed = set(MAY_IMPORT[package])
    if path == ROOT / "rpc" / "__init__.py":
        allowed.add("rref")  # a face: it hands on RRef and remote
    assert packages_imported(path) <= allowed


@pytest.mark.parametrize(
    "path", [*MODULES, *(ROOT / name for name in ("__init__.py", "errors.py", "launch.py"))], ids=str
)
def test_every_module_says_what_it_offers(path):
    if path.name == "generate.py" or path.parent == ROOT / "proto":
        return
    name = "gradwire." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
    module = importlib.import_module(name.removesuffix(".__init__"))
    assert module.__doc__
    offered = getattr(module, "__all__", [])
    assert len(offered) == len(set(offered))
    assert all(hasattr(module, each) for each in offered)
    public = {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    }
    assert public <= set(offered)


def test_generated_modules_are_fresh(tmp_path):
    made = generate(tmp_path)
    assert made
    for path in made:
        assert path.read_text() == (ROOT / "proto" / "v1" / path.name).read_text(), "run `make proto`"


def test_every_dependency_is_justified():
    project = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|cuda|mpi|examples|dev) = \[(.*?)\]", project, re.S | re.M)
    names = {re.match(r"[A-Za-z0-9-]+", entry)[0] for text in lists for entry in re.findall(r'"([^"]+)"', text)}
    documented = (ROOT / "docs" / "dependencies.md").read_text()
    assert len(names) > 10
    assert not [name for name in names if f"`{name}`" not in documented]


def test_every_package_is_installed():
    project = (ROOT / "pyproject.toml").read_text()
    listed = set(re.findall(r'^    "(gradwire[a-z0-9_.]*)",$', project, re.M))
    found = {
        ".".join(["gradwire", *path.parent.relative_to(ROOT).parts])
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert listed == found | {"gradwire"}
