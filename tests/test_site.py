"""The site as a browser shows it: built once, served from a folder."""

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Watched, browser
from tests.support.docs import ROOT

pytestmark = [pytest.mark.process, pytest.mark.slow]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_request(self, *_: object) -> None:
        pass


def build(folder: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "docs" / "build.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    site = tmp_path_factory.mktemp("site") / "site"
    built = build(site)
    assert built.returncode == 0, built.stdout + built.stderr
    handler = functools.partial(Quiet, directory=str(site / "html"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_read_and_searched_without_asking_anyone_else(
    chromium: Any, address: str, scheme: str, width: int
) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    try:
        watched = Watched(context.new_page())
        page = watched.page
        for name in ("index", "start", "report", "api", "fields", "your-environment", "design/index"):
            page.goto(f"{address}/{name}.html")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)"), (
                name
            )
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor").strip("rgba()").split(",")
        assert (int(ground[0]) > 200) == (scheme == "light")
        box = page.get_by_placeholder("Search")
        box.wait_for(state="attached", timeout=60_000)  # by a script, which hears no key before
        page.keyboard.press("Control+k")
        box.press_sequentially("staleness")
        page.get_by_text("How old a group may become").first.wait_for(timeout=60_000)
        assert all(url.startswith(("data:", "blob:", f"{address}/")) for url in watched.requests)
        assert watched.errors == []
    finally:
        context.close()


def test_the_reference_has_docstrings_and_dead_links_end_the_build(tmp_path: Path, address: str) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("build.py", "zensical.toml", "site.css"):
        (tmp_path / "docs" / name).write_text((ROOT / "docs" / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "docs" / "design").mkdir()
    settings = (tmp_path / "docs" / "zensical.toml").read_text(encoding="utf-8")
    head, _, tail = settings.partition("nav = [")
    (tmp_path / "docs" / "zensical.toml").write_text(head + tail.partition("\n]\n")[2], encoding="utf-8")
    (tmp_path / "README.md").write_text("# Top\n\n[a](docs/page.md#here)\n", encoding="utf-8")
    page = tmp_path / "docs" / "page.md"
    page.write_text("# Page\n\n## Here\n\n[code](build.py)\n", encoding="utf-8")
    assert build(tmp_path / "site", tmp_path).returncode == 0
    assert (tmp_path / "site" / "html" / "build.py.html").is_file()
    for dead in ("[b](nowhere.md)", "[c](#there)", "![d](none.png)", "[e](../README.md#nope)", "::: agentrl.nothing"):
        page.write_text(f"# Page\n\n## Here\n\n{dead}\n", encoding="utf-8")
        assert build(tmp_path / "site", tmp_path).returncode != 0, dead
