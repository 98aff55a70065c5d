"""Private names of torch are used in two modules only."""

import ast
import re

import pytest

from tests.house.source import LOOSE, MODULES, ROOT


def private_names(code: str) -> list[str]:
    """Returns the names of torch with a leading underscore that a module uses, as far as its text shows."""
    of_torch: set[str] = set()
    found: list[str] = []
    nodes = list(ast.walk(ast.parse(code)))
    for node in nodes:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"]
            of_torch.update(alias.asname or "torch" for alias in node.names if alias.name in modules)
            found += [module for module in modules if "._" in module]
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            of_torch.update(alias.asname or alias.name for alias in node.names)
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if "._" in name or "distributed_c10d" in name]
    for node in nodes:
        if isinstance(node, ast.Attribute) and re.fullmatch(r"_[^_].*|distributed_c10d", node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in of_torch:
                found.append(f"{ast.unparse(node)}")
    return found


TORCH_INTERNALS = [ROOT / "torch_internals.py", ROOT / "c10d" / "torch_types.py"]
"""The modules for torch's private names; the second has types only, which torch hides from mypy."""


def test_torchs_private_names_are_used_in_one_module():
    found = {path: private_names(path.read_text()) for path in [*MODULES, *LOOSE]}
    assert not {path: names for path, names in found.items() if names and path not in TORCH_INTERNALS}
    assert all(found[path] for path in TORCH_INTERNALS)


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
