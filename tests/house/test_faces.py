"""Every module says what it offers, and the faces of the packages show that and nothing else."""

import ast
import importlib

import gradwire
import pytest
from gradwire import compat

from tests.house.source import LOOSE, MODULES, ROOT, module_name, path_id, tree

WITHOUT_NAMES = [ROOT / "proto" / "__init__.py", ROOT / "proto" / "generate.py"]


@pytest.mark.parametrize("path", [path for path in [*MODULES, *LOOSE] if path not in WITHOUT_NAMES], ids=path_id)
def test_every_module_says_what_it_offers(path):
    name = "gradwire" if path == ROOT / "__init__.py" else f"gradwire.{module_name(path)}"
    module = importlib.import_module(name)
    compat.uninstall()  # compat/import_hooks.py installs it
    assert module.__doc__
    offered = getattr(module, "__all__", [])
    assert len(offered) == len(set(offered))
    assert all(hasattr(module, each) for each in offered)
    public = {
        node.name
        for node in tree(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    }
    assert public <= set(offered)


@pytest.mark.parametrize("name", ["autograd", "nn", "optim", "rpc", "rref"])
def test_a_face_shows_its_public_names_and_nothing_else(name):
    face = importlib.import_module(f"gradwire.{name}")
    assert dir(face) == sorted(face.__all__)


def test_the_other_faces_show_no_modules_of_their_making():
    assert dir(gradwire) == sorted([*gradwire.__all__, "__version__"])
    shown = set(dir(gradwire.c10d))
    assert shown >= {*gradwire.c10d.__all__, "all_reduce", "ReduceOp"}
    assert not shown & {"collectives", "process_group", "torch_types", "Any"}
