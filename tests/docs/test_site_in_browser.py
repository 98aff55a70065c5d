"""The site of the documentation in a real browser: it loads nothing from elsewhere. `make browser` runs this."""

import functools
import http.server
import threading
from pathlib import Path

import pytest

from tests.view.browser import LONGER, browser_or_skip

SITE = Path(__file__).parent.parent.parent / "out" / "docs"
PAGES = ["index.html", "rpc.html", "failures.html", "architecture.html", "reference/gradwire.rpc.html"]


@pytest.fixture(scope="module")
def browser():
    with browser_or_skip() as found:
        yield found


@pytest.fixture(scope="module")
def address():
    """Serves the site that `make docs` has built."""
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built: make docs")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="site")
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@LONGER
@pytest.mark.parametrize("page", PAGES)
def test_pages_load_nothing_from_elsewhere_and_fit(browser, address, tmp_path, page):
    for width in (1400, 900, 390):
        context = browser.context(viewport={"width": width, "height": 900})
        asked: list[str] = []
        shown = context.new_page()
        shown.on("request", lambda sent, asked=asked: asked.append(sent.url))
        shown.goto(f"{address}/{page}", wait_until="networkidle")
        assert asked
        assert not [url for url in asked if not url.startswith((address, "data:"))]
        assert shown.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        shown.screenshot(path=tmp_path / f"{width}.png")
        context.close()
