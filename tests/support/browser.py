"""A real browser without a window: Debian's chromium, driven by playwright."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def browser() -> Iterator[Any]:
    """Yield a browser of playwright; skip where there is none."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with api.sync_playwright() as playwright:
        # Its own sandbox does not start as root, as which containers run; the pages are ours.
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield found
        finally:
            found.close()


def until(page: Any, expression: str, *, seconds: float = 60.0) -> None:
    """Wait until an expression holds: playwright's own way evaluates text, which our pages refuse."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


class Watched:
    """A page of the browser, and what it did that it should not."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.requests: list[str] = []
        self.refused: list[str] = []
        """Of the requests, those that the page's policy stopped."""
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("requestfailed", self._note_failure)
        page.on("console", lambda message: self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", self._dismiss)

    def _note_failure(self, request: Any) -> None:
        if request.failure == "csp":
            self.refused.append(request.url)

    def _dismiss(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()
