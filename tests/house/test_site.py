"""The site of the documentation has all pages and all public names. `make docs` builds it."""

import importlib
import importlib.util
import inspect
import re
import sys
from types import ModuleType

import pytest

from tests.house.source import ROOT


def loaded(name: str) -> ModuleType:
    """A module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


diagrams = sys.modules["diagrams"] = loaded("diagrams")  # which pages.py imports, as mkdocs lets it
pages = loaded("pages")
del sys.modules["diagrams"]

NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
IN_NAV = re.findall(r"(\S+\.md)$", NAV, re.M)


def test_every_page_is_in_the_navigation_once():
    written = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    made = [*pages.ROOT_PAGES.values(), *(f"reference/{module}.md" for module in pages.PUBLIC_MODULES)]
    assert sorted(IN_NAV) == sorted([*written, *made])


@pytest.mark.parametrize("name", pages.PUBLIC_MODULES)
def test_the_reference_has_every_public_name(name):
    module = importlib.import_module(name)
    offered = [f"{name}.{each}" for each in module.__all__]
    page = pages.reference_page(name)
    shown = re.findall(r"^::: (\S+)$", page, re.M)[1:]
    linked = re.findall(r"\]\((\S+)\.md\)", page)
    assert sorted([*shown, *linked]) == sorted(offered)
    assert not [each for each in shown if isinstance(getattr(module, each.rpartition(".")[2]), ModuleType)]


def test_the_public_modules_are_those_that_faces_and_pages_name():
    faces = [importlib.import_module(name) for name in pages.PUBLIC_MODULES]
    named = {
        f"{face.__name__}.{name}"
        for face in faces
        for name in face.__all__
        if isinstance(getattr(face, name), ModuleType)
    }
    texts = [path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]]
    for text in texts:
        named |= set(re.findall(r"^ *(?:from|import) (gradwire[\w.]*)", text, re.M))
    assert named <= set(pages.PUBLIC_MODULES)


@pytest.mark.parametrize("name", pages.PUBLIC_MODULES)
def test_every_public_name_has_a_docstring(name):
    module = importlib.import_module(name)
    objects = [getattr(module, each) for each in module.__all__]
    assert module.__doc__
    assert not [each for each in objects if inspect.isroutine(each) or inspect.isclass(each) if not each.__doc__]


def test_every_diagram_is_drawn():
    expected = {}
    for page in (ROOT / "docs").rglob("*.md"):
        for number, source in enumerate(diagrams.diagrams(page.read_text()), 1):
            expected[diagrams.picture(page.stem, number)] = diagrams.mark(source)
    found = list((ROOT / "docs" / "diagrams").iterdir())
    assert sorted(found) == sorted(expected)
    assert not [path.name for path in found if not path.read_text().startswith(expected[path])], (
        "run docs/diagrams.py"
    )


def test_what_github_indents_less_is_part_of_its_item():
    text = "Text\n- item\n  more\n\n  ```\n    code\n  ```\n- other\n\nEnd\n  as it is\n1. one\n\n   two"
    lines = list(pages.indent_for_lists(text.splitlines()))
    assert lines[:9] == ["Text", "", "- item", "    more", "", "    ```", "      code", "    ```", "- other"]
    assert lines[9:] == ["", "End", "  as it is", "", "1. one", "", "    two"]


@pytest.mark.parametrize(
    ("page", "target", "expected"),
    [
        ("README.md", "docs/rpc.md", "rpc.md"),
        ("docs/examples/hybrid.md", "../optim.md", "../optim.md"),
        ("docs/examples/hybrid.md", "hybrid.png", "../examples/hybrid.png"),
        ("docs/security.md", "../SECURITY.md", "security_policy.md"),
        ("docs/engines.md", "../c10d/engines/base.py", "https://host/blob/main/c10d/engines/base.py"),
        ("CONTRIBUTING.md", "docs", "https://host/tree/main/docs"),
    ],
)
def test_links_lead_to_pages_or_into_the_repository(page, target, expected):
    assert pages.site_link(page, target, "#x", "https://host") == expected + "#x"


@pytest.mark.parametrize(
    ("tag", "is_loaded"),
    [
        ('<script src="https://unpkg.com/x">', True),
        ('<link href="https://fonts.googleapis.com/x" rel="stylesheet">', True),
        ("<img src=//host/x.png>", True),
        ('<script src="assets/x.js">', False),
        ('<a href="https://github.com">', False),
    ],
)
def test_what_is_loaded_from_other_hosts_is_seen(tag, is_loaded):
    assert bool(pages.LOADED.search(tag)) == is_loaded
