"""What is listed in one file and lives in others agrees: generated code, dependencies, packages, commands."""

import re
import subprocess
import tomllib

import pytest
from gradwire.proto.generate import generate

from tests.house.source import LOOSE, MODULES, PACKAGES, ROOT, path_id

FILES = [f"/{path_id(path)}" for package in PACKAGES for path in (ROOT / package).rglob("*")]
FILES += [f"/{path_id(path)}" for path in ROOT.iterdir()]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def package_names(requirements: list[str]) -> set[str]:
    """Returns the names of the packages that some requirements name."""
    return {re.match(r"[A-Za-z0-9-]+", requirement)[0] for requirement in requirements}


def test_generated_modules_are_fresh(tmp_path):
    made = generate(tmp_path)
    assert made
    for path in made:
        assert path.read_text() == (ROOT / "proto" / "v1" / path.name).read_text(), "run `make proto`"


def test_every_dependency_is_justified():
    extras = PROJECT["project"]["optional-dependencies"]
    names = package_names(
        [*PROJECT["project"]["dependencies"], *(each for extra in extras.values() for each in extra)]
    )
    documented = (ROOT / "docs" / "dependencies.md").read_text()
    assert len(names) > 10
    assert not [name for name in names if f"`{name}`" not in documented]


def test_every_development_dependency_is_pinned():
    files = (ROOT / f"requirements-{name}.txt" for name in ("demo", "dev", "long"))
    pins = [name for file in files for name in re.findall(r"^([A-Za-z0-9_.-]+)==", file.read_text(), re.M)]
    assert package_names(PROJECT["project"]["optional-dependencies"]["dev"]) <= set(pins)


def test_no_command_installs_the_package_from_an_index():
    """It is on none: extras are installed from a checkout, and errors name the packages themselves."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "changelog.d").iterdir()]
    command = re.compile(r"pip install [^`\n]*gradwire(?!/|_)\b")
    named = {path_id(path): command.findall(path.read_text()) for path in [*pages, *MODULES, *LOOSE]}
    assert not {name: found for name, found in named.items() if found}


def test_the_readme_names_every_extra():
    readme = (ROOT / "README.md").read_text()
    extras = PROJECT["project"]["optional-dependencies"].keys() - {"dev", "docs"}
    assert not [name for name in extras if f"'.[{name}]'" not in readme]


def test_every_package_is_installed():
    found = {
        ".".join(["gradwire", *path.parent.relative_to(ROOT).parts])
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found | {"gradwire"}


def test_make_alone_lists_every_command():
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    phony = re.search(r"^\.PHONY: (.*?)\n\n", (ROOT / "Makefile").read_text(), re.M | re.S)[1]
    targets = set(phony.replace("\\\n", " ").split())
    assert {"demo", "test", "lint"} <= targets
    assert set(re.findall(r"^  make (\S+)", shown, re.M)) == targets


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_every_page_can_be_found(page):
    """Each page is linked from the README, or from the page about the examples."""
    links = (ROOT / "README.md").read_text() + (ROOT / "docs" / "examples" / "README.md").read_text()
    assert page.name in links


ROOT_PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "changelog.d" / "README.md"]


@pytest.mark.parametrize("page", ROOT_PAGES, ids=lambda page: page.name)
def test_links_of_pages_at_the_root_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


def files_named(page: str) -> list[str]:
    """Returns the files and folders that a page names, which may leave out the folders that they are in."""
    return re.findall(r"`([a-z0-9_/]+(?:/|\.py))`", (ROOT / "docs" / page).read_text())


@pytest.mark.parametrize("page", ["architecture.md", "decisions.md", "extending.md", "failures.md", "security.md"])
def test_pages_name_files_that_exist(page):
    folders = [ROOT / "tests", ROOT / "benchmarks"]
    files = [*FILES, *(f"/{path_id(path)}" for folder in folders for path in folder.rglob("*"))]
    assert not [name for name in files_named(page) if not any(f"/{name}" in f"{path}/" for path in files)]


def test_the_architecture_page_names_what_exists():
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "architecture.md").read_text())
    words = {word for path in [*MODULES, *LOOSE] for word in re.findall(r"\w+", path.read_text())}
    names = {part for each in quoted if re.fullmatch(r"[A-Za-z_.]+", each) for part in each.split(".")}
    assert not names - words - {""}  # of `.grad`
