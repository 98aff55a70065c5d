"""Draws the Mermaid diagrams of the pages, for the site: GitHub draws them itself.

    npm install mermaid@11.17.2
    python docs/diagrams.py node_modules/mermaid/dist/mermaid.min.js      # needs chromium

Each becomes `docs/diagrams/PAGE-NUMBER.svg`, which begins with a hash of its source. Commit it with the page.
"""

import hashlib
import html
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent

BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)

PAGE = """<!DOCTYPE html><meta charset="utf-8"><pre class="mermaid">{source}</pre>
<script src="file://{script}"></script>
<script>mermaid.initialize({{startOnLoad: true, htmlLabels: false, flowchart: {{htmlLabels: false}}}})</script>"""


def diagrams(page: str) -> list[str]:
    """Returns the sources of the diagrams of a page, given its text."""
    return BLOCK.findall(page)


def mark(source: str) -> str:
    """Returns the comment with which the picture of a diagram begins."""
    return f"<!-- {hashlib.sha256(source.encode()).hexdigest()} -->\n"


def picture(page: str, number: int) -> Path:
    """Returns the file of the picture of a diagram, by the name of its page and its number there, from 1."""
    return DOCS / "diagrams" / f"{page}-{number}.svg"


def draw(source: str, script: Path) -> str:
    """Returns a diagram as SVG.

    Args:
        source: the diagram, in Mermaid's language.
        script: the file `mermaid.min.js`.

    Raises:
        ValueError: chromium has drawn nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(PAGE.format(source=html.escape(source), script=script.resolve()))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
        command = ["chromium", *options, "--virtual-time-budget=30000", "--dump-dom", str(page)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"<svg.*?</svg>", shown, re.S)
    if not found:
        raise ValueError(f"chromium has drawn nothing of {source!r}")
    return found[0].replace("<br>", "<br/>") + "\n"


def main(script: Path) -> None:
    """Draws the diagrams whose sources have changed."""
    for page in sorted(DOCS.glob("*.md")):
        for number, source in enumerate(diagrams(page.read_text()), 1):
            target = picture(page.stem, number)
            if not target.exists() or not target.read_text().startswith(mark(source)):
                target.parent.mkdir(exist_ok=True)
                target.write_text(mark(source) + draw(source, script))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
