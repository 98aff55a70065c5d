"""Every module says what it offers, and the faces of the packages show that and nothing else."""

import ast
import importlib
from pathlib import Path

import gradwire
import pytest
from gradwire import compat

from tests.house.source import LOOSE, MODULES, ROOT, module_name, path_id, tree

WITHOUT_NAMES = {ROOT / "proto" / "__init__.py", ROOT / "proto" / "generate.py"}


def faults_of(path: Path) -> list[str]:
    """Returns what is wrong with what a module offers."""
    module = importlib.import_module(
        "gradwire" if path == ROOT / "__init__.py" else f"gradwire.{module_name(path)}"
    )
    offered = getattr(module, "__all__", [])
    public = {
        node.name
        for node in tree(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    }
    wrong = [f"offers {each} and has none" for each in offered if not hasattr(module, each)]
    wrong += [f"offers {each} twice" for each in set(offered) if offered.count(each) > 1]
    wrong += [f"has {each} and does not offer it" for each in public.difference(offered)]
    return wrong if module.__doc__ else [*wrong, "has no docstring"]


def test_every_module_says_what_it_offers():
    paths = [path for path in [*MODULES, *LOOSE] if path not in WITHOUT_NAMES]
    faults = {path_id(path): faults_of(path) for path in paths}
    compat.uninstall()  # compat/import_hooks.py installs it
    assert len(faults) > 100
    assert not {name: wrong for name, wrong in faults.items() if wrong}


@pytest.mark.parametrize("name", ["autograd", "nn", "optim", "rpc", "rref"])
def test_a_face_shows_its_public_names_and_nothing_else(name):
    face = importlib.import_module(f"gradwire.{name}")
    assert dir(face) == sorted(face.__all__)


def test_the_other_faces_show_no_modules_of_their_making():
    assert dir(gradwire) == sorted([*gradwire.__all__, "__version__"])
    shown = set(dir(gradwire.c10d))
    assert shown >= {*gradwire.c10d.__all__, "all_reduce", "ReduceOp"}
    assert not shown & {"collectives", "process_group", "torch_types", "Any"}
