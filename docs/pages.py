"""What `make docs` adds to the pages in this folder: those at the root, and the reference of all public names.

mkdocs calls the functions whose names begin with `on_`. Pages are written for GitHub, too; what Python-Markdown
reads differently is translated: the indentation of lists, and links to files that are not part of the site.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diagrams import BLOCK, mark

ROOT = Path(__file__).parents[1]

PUBLIC_MODULES = [
    "gradwire",
    "gradwire.rpc",
    "gradwire.rpc.aio",
    "gradwire.rpc.functions",
    "gradwire.rpc.backend_registry",
    "gradwire.rpc.fault_injection",
    "gradwire.rpc.grpc_backend",
    "gradwire.rref",
    "gradwire.autograd",
    "gradwire.optim",
    "gradwire.nn",
    "gradwire.nn.functional",
    "gradwire.c10d",
    "gradwire.c10d.engines",
    "gradwire.c10d.engines.reductions",
    "gradwire.launch",
    "gradwire.logs",
    "gradwire.errors",
    "gradwire.compat",
]
"""The modules whose names programs may use. Each has a page in the reference."""

ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security_policy.md",
}
"""Files at the root, and the pages of the site that they become."""

FENCE = re.compile(r"^( *)(```+)")
ITEM = re.compile(r"^(- |\d+\. )")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
LOADED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?(?:https?:)?//"
    r"|<link\b(?=[^>]*\bstylesheet\b)[^>]*\bhref=\"?(?:https?:)?//"
)


def module_path(module: str) -> Path:
    """Returns the file of a module of gradwire."""
    folder = ROOT.joinpath(*module.split(".")[1:])
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def public_names(module: str) -> list[str]:
    """Returns the `__all__` of a module, which is not imported."""
    for node in ast.parse(module_path(module).read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
    raise ValueError(f"{module} has no __all__")


def documented_names(module: str) -> list[str]:
    """Returns the public names of a module that its page documents: all but those of modules."""
    return [name for name in public_names(module) if f"{module}.{name}" not in PUBLIC_MODULES]


def reference_page(module: str) -> str:
    """Returns the page of a module: its docstring, and each of its public names with its docstring.

    Functions come first. A name that is a module is a link to the page of that module.
    """
    shown = sorted(documented_names(module), key=lambda name: (name[0].isupper(), name))
    modules = [f"{module}.{name}" for name in public_names(module) if f"{module}.{name}" in PUBLIC_MODULES]
    parts = [f"# {module}", f"::: {module}\n    options: {{members: false, show_root_heading: false}}"]
    if modules:
        parts.append("Modules: " + ", ".join(f"[`{each}`]({each}.md)" for each in modules))
    parts += [f"::: {module}.{name}" for name in shown]
    return "\n\n".join(parts) + "\n"


def indent_for_lists(lines: Iterable[str]) -> Iterator[str]:
    """Indents what belongs to the item of a list by four columns, and begins each list after an empty line."""
    width = 0  # of the item's mark, as long as lines belong to it
    fenced = None
    before = ""
    for line in lines:
        fence = FENCE.match(line)
        item = ITEM.match(line) if fenced is None else None
        if item:
            if not width and before.strip():
                yield ""
            width = item.end()
        elif fenced is None and line.strip() and not line.startswith(" ") and (not before.strip() or fence):
            width = 0
        if fence and fenced is None:
            fenced = fence[2]
        elif fence and line.strip() == fenced:
            fenced = None
        yield "    " + line[width:] if width and line.startswith(" " * width) and not item else line
        before = line


def site_link(page: str, target: str, anchor: str, repository: str) -> str:
    """Returns where a link of a page leads in the site: to another page, or to a file in the repository.

    Args:
        page: the file with the link, relative to the root of the repository.
        target: the file that the link names, relative to the page.
        anchor: what follows it: `#a-heading`, or nothing.
        repository: the address of the repository.
    """
    file = (ROOT / page).parent.joinpath(target).resolve().relative_to(ROOT).as_posix()
    if file in ROOT_PAGES:
        inside = ROOT_PAGES[file]
    elif file.startswith("docs/") and not file.endswith((".txt", ".json", ".py")):
        inside = file.removeprefix("docs/")
    else:
        kind = "tree" if (ROOT / file).is_dir() else "blob"
        return f"{repository}/{kind}/main/{file}{anchor}"
    place = ROOT_PAGES.get(page, page.removeprefix("docs/"))
    return "../" * place.count("/") + inside + anchor


def picture_of(page: str, source: str) -> str:
    """Returns the Markdown of the picture that docs/diagrams.py has drawn of a diagram, at its own width."""
    for path in (ROOT / "docs" / "diagrams").glob(f"{page}-*.svg"):
        drawing = path.read_text()
        if drawing.startswith(mark(source)):
            width = re.search(r'viewBox="\S+ \S+ (\d+)', drawing)[1]
            return f'![Diagram](diagrams/{path.name}){{ width="{width}" style="background: white" }}'
    raise ValueError(f"a diagram of {page}.md is not drawn: run docs/diagrams.py")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages at the root of the repository, and the reference."""
    from mkdocs.structure.files import File

    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for module in PUBLIC_MODULES:
        files.append(File.generated(config, f"reference/{module}.md", content=reference_page(module)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Translates a page from GitHub's Markdown."""
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        return markdown
    source = next((each for each, there in ROOT_PAGES.items() if there == uri), f"docs/{uri}")

    def link(found: re.Match[str]) -> str:
        return f"]({site_link(source, found[1], found[2] or '', config.extra['repository'])})"

    with_pictures = BLOCK.sub(lambda found: picture_of(page.file.name, found[1]), markdown)
    return LINK.sub(link, "\n".join(indent_for_lists(with_pictures.splitlines())))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Checks that a page loads nothing from other hosts, and that the reference has what it should.

    Raises:
        PluginError: it does not.
    """
    from mkdocs.exceptions import PluginError

    if loaded := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {loaded[0]}")
    if page.file.src_uri.startswith("reference/"):
        module = page.file.src_uri.removeprefix("reference/").removesuffix(".md")
        missing = [name for name in documented_names(module) if f'id="{module}.{name}"' not in output]
        if missing:
            raise PluginError(f"the reference of {module} lacks {', '.join(missing)}")
    return output
