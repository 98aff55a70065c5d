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
STARTS_AGENTS = [
    ROOT / "rpc" / "grpc_backend.py",
    ROOT / "rpc" / "fault_injection.py",
    ROOT / "compat" / "messages.py",
]
"""The modules that know of all extensions, which they hand to the agents that they start."""
NO_MODULES = [ROOT / "proto" / "v1", ROOT / "compat" / "site"]
"""What is generated, and what runs at the start of other processes."""
TOP = [
    ROOT / f"{name}.py"
    for name in ("__init__", "__main__", "errors", "extensions", "grpc_setup", "launch", "torch_internals")
]
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
    if path in STARTS_AGENTS:
        allowed.add("extensions")
    assert packages_imported(path) - {"torch_internals"} <= allowed


def private_names(code: str) -> list[str]:
    """What a module uses of torch that has a leading underscore, as far as it can be seen without running it."""
    of_torch: set[str] = set()
    found: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"]
            of_torch.update(alias.asname or "torch" for alias in node.names if alias.name in modules)
            found += [module for module in modules if "._" in module]
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            of_torch.update(alias.asname or alias.name for alias in node.names)
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if "._" in name or "distributed_c10d" in name]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"_[^_].*|distributed_c10d", node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in of_torch:
                found.append(f"{ast.unparse(node)}")
    return found


TORCH_INTERNALS = [ROOT / "torch_internals.py", ROOT / "c10d" / "torch_types.py"]
"""The modules for torch's private names; the second has types only, which torch hides from mypy."""


@pytest.mark.parametrize("path", [*MODULES, *TOP], ids=lambda p: str(p.relative_to(ROOT)))
def test_torchs_private_names_are_used_in_one_module(path):
    assert bool(private_names(path.read_text())) == (path in TORCH_INTERNALS)


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch._C.Future",
        "import torch.distributed as dist\ndist.group._x.y",
        "from torch._C import Future",
        "from torch.jit import _script",
        "from torch.distributed.distributed_c10d import BackendConfig",
        "import torch.utils._pytree",
        "from torch.distributed import Backend\nBackend._plugins",
    ],
)
def test_private_names_are_seen(code):
    assert private_names(code)


@pytest.mark.parametrize("path", [*MODULES, *TOP], ids=str)
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


@pytest.mark.parametrize("name", ["autograd", "nn", "optim", "rpc", "rref"])
def test_a_face_shows_its_public_names_and_nothing_else(name):
    face = importlib.import_module(f"gradwire.{name}")
    assert dir(face) == sorted(face.__all__)


def test_the_other_faces_show_no_modules_of_their_making():
    assert dir(gradwire) == sorted([*gradwire.__all__, "__version__"])
    shown = set(dir(gradwire.c10d))
    assert shown >= {*gradwire.c10d.__all__, "all_reduce", "ReduceOp"}
    assert not shown & {"collectives", "process_group", "torch_types", "Any"}
