"""A real browser without a window, and what a person sees of a job in it.

Debian's package `chromium` has the browser. Without it, or without playwright, the tests that need it are skipped.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["LONGER", "Browser", "browser_or_skip", "pictures"]

CHROMIUM = os.environ.get("GRADWIRE_CHROMIUM") or shutil.which("chromium")

LONGER = pytest.mark.skipif(
    not os.environ.get("GRADWIRE_BROWSER"), reason="a longer test in a browser: make browser runs it"
)

ARGUMENTS = [
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # there is no internet
    "--force-color-profile=srgb",
]

TIMEOUT_MS = 100_000

MAX_PICTURE_BYTES = 150_000

ROOT = Path(__file__).parents[2]

SHORTEN = """root => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(root, "");
}"""
"""Leaves out of what is seen where this checkout is."""

CONTRAST = """selector => {
  const part = c => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = color => {
    const [red, green, blue] = color.match(/[0-9.]+/g).map(Number).map(part);
    return .2126 * red + .7152 * green + .0722 * blue;
  };
  const text = light(getComputedStyle(document.querySelector(selector)).color);
  const back = light(getComputedStyle(document.body).backgroundColor);
  return (Math.max(text, back) + .05) / (Math.min(text, back) + .05);
}"""


class Browser:
    """A browser. Each page that it opens reports errors of the console, and what it loads from elsewhere."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    def context(self, **options: Any) -> Any:
        """Returns a context of playwright, in which nothing is known from before. Who asks for it closes it."""
        return self._chromium.new_context(**options)

    @contextmanager
    def open(self, url: str, *, expected: str = "", **options: Any) -> Iterator["View"]:
        """Opens a URL as somebody who has not been there. Fails in the end if there were errors.

        Args:
            url: of the page.
            expected: what errors have that there must be.
            options: of playwright's `new_context`, such as `viewport` and `color_scheme`.
        """
        options.setdefault("viewport", {"width": 1280, "height": 900})
        context = self._chromium.new_context(**options)
        try:
            view = View(context.new_page(), url)
            yield view
            assert all(expected and expected in each for each in view.errors), view.errors
            assert view.errors or not expected, "the console shows no error"
        finally:
            context.close()


class View:
    """The page of a job in a browser."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.errors: list[str] = []
        origin = url.partition("/?")[0]
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", lambda said: self._record(said.type in ("error", "warning"), said.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda sent: self._record(not sent.url.startswith((origin, "data:")), sent.url))
        self.status = page.goto(url).status

    def _record(self, is_error: bool, text: str) -> None:
        if is_error:
            self.errors.append(text)

    def refreshed(self) -> None:
        """Waits until the page shows what workers have answered from now on."""
        asked = self.page.evaluate("Date.now() / 1000")
        self.page.wait_for_function("asked => Number(document.documentElement.dataset.time) > asked", arg=asked)

    def rows(self, table: str) -> list[dict[str, str]]:
        """Returns the rows of a table, by the names of its columns."""
        names = self.page.locator(f"#{table} th").all_inner_texts()
        lines = [line.locator("td").all_inner_texts() for line in self.page.locator(f"#{table} tbody tr").all()]
        return [dict(zip(names, line, strict=False)) for line in lines]  # a text may take the rest of a row

    def wait_for(self, pattern: str, selector: str = "body") -> str:
        """Waits until a text matches a regular expression; returns the text."""
        found = self.page.locator(selector).filter(has_text=re.compile(pattern))
        found.first.wait_for()
        return str(found.first.inner_text())

    def picture(self, path: Path, selector: str | None = None) -> None:
        """Saves what is seen; with a selector, of the elements from the top to the one that it names."""
        clip = None
        self.page.evaluate(SHORTEN, f"{ROOT}/")
        self.page.evaluate("window.scrollTo(0, 0)")
        if selector is not None:
            box, size = self.page.locator(selector).bounding_box(), self.page.viewport_size
            clip = {"x": 0, "y": 0, "width": size["width"], "height": box["y"] + box["height"] + 16}
        self.page.screenshot(path=path, clip=clip, full_page=True)
        assert selector is None or path.stat().st_size < MAX_PICTURE_BYTES

    def overflow(self) -> int:
        """Returns by how many pixels the page is wider than its window."""
        return int(
            self.page.evaluate("document.body.parentNode.scrollWidth - document.body.parentNode.clientWidth")
        )

    def contrast(self, selector: str) -> float:
        """Returns the contrast of a text to the background of the page, from 1 to 21, as WCAG defines it."""
        return float(self.page.evaluate(CONTRAST, selector))


@contextmanager
def browser_or_skip() -> Iterator[Browser]:
    """Starts a browser; skips the test if there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium, or name it by GRADWIRE_CHROMIUM")
    with playwright.sync_playwright() as driver:
        is_root = os.geteuid() == 0  # whom the sandbox of the browser does not run for
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, chromium_sandbox=not is_root)
        try:
            yield Browser(chromium)
        finally:
            chromium.close()


def pictures(folder: Path) -> Path:
    """Returns where pictures are saved: GRADWIRE_PICTURES in the environment, or else this folder."""
    path = Path(os.environ.get("GRADWIRE_PICTURES") or folder)
    path.mkdir(parents=True, exist_ok=True)
    return path
