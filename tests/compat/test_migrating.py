"""docs/migrating.md lists every public name of torch, and only names that gradwire has."""

import importlib
import re
from pathlib import Path
from typing import Any

import gradwire
import pytest
import torch.distributed.autograd
import torch.distributed.nn
import torch.distributed.optim
import torch.distributed.rpc

GUIDE = (Path(gradwire.__file__).parent / "docs" / "migrating.md").read_text()
PUBLIC = {
    "torch.distributed.rpc": set(torch.distributed.rpc.__all__),
    "torch.distributed.autograd": {*torch.distributed.autograd.__all__, "backward", "get_gradients"},
    "torch.distributed.optim": set(torch.distributed.optim.__all__),
    "torch.distributed.nn": {
        name
        for name, value in vars(torch.distributed.nn).items()
        if getattr(value, "__module__", "").startswith("torch.distributed.nn") and not name.startswith("_")
    },
}


def rows(module: str) -> list[tuple[str, str]]:
    """Returns torch's names in the table of a module, with the name of gradwire's equivalent."""
    (section,) = re.findall(rf"^## {re.escape(module)}\n(.*?)(?=^## |\Z)", GUIDE, re.M | re.S)
    return re.findall(r"^\| `([\w.]+)` \| `?([\w.]+)`? \|", section, re.M)


def find(name: str) -> Any:
    """Returns the object with a dotted name."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for part in parts[1:]:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("module", PUBLIC)
def test_the_table_has_every_public_name(module):
    assert PUBLIC[module] <= {name.rpartition(".")[2] for name, _ in rows(module)}


@pytest.mark.parametrize("module", PUBLIC)
def test_all_names_in_the_table_exist(module):
    for theirs, ours in rows(module):
        assert find(f"{module}.{theirs}") is not None
        owner, _, name = ours.rpartition(".")
        assert ours == "none" or name in find(owner).__all__
