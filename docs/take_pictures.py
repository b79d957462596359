"""Take the pictures of docs/report.md from the pages of a run and of a comparison.

python docs/take_pictures.py runs/calculator-…/report.html runs/compare/compare.html
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

PICTURES = Path(__file__).parent / "pictures"


def rollout(page: Any) -> None:
    """Open a rollout that got something right and something wrong."""
    page.click("#tab-rollouts")
    page.fill("[placeholder='Reward from']", "0.3")
    page.fill("[placeholder='Reward to']", "0.5")
    page.locator("select", has_text="Any step").select_option(label="Step 20")


def dialogue(page: Any) -> None:
    """Open one of three turns whose answer was wrong."""
    rollout(page)
    page.wait_for_timeout(500)
    page.locator(".row", has_text="3 turns").first.click()


def group(page: Any) -> None:
    """Open its group."""
    rollout(page)
    page.wait_for_timeout(500)
    page.click("button:text('Group of')")


def tree(page: Any) -> None:
    """Open its group as a tree."""
    rollout(page)
    page.wait_for_timeout(500)
    page.click("button:text-is('Tree')")


def main(report: Path, comparison: Path) -> None:
    """Take all pictures."""
    views: list[tuple[str, Path, str, int, Callable[[Any], None]]] = [
        ("overview", report, "light", 720, lambda page: page.click("#tab-overview")),
        ("dialogue", report, "dark", 780, dialogue),
        ("group", report, "light", 720, group),
        ("tree", report, "dark", 600, tree),
        ("compare", comparison, "light", 900, lambda page: page.click("h1")),
    ]
    with sync_playwright() as playwright:
        browser: Any = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, page, scheme, height, look in views:
            seen = browser.new_page(viewport={"width": 1200, "height": height}, color_scheme=scheme)
            seen.goto(page.resolve().as_uri())
            look(seen)
            seen.wait_for_timeout(1000)
            seen.screenshot(path=PICTURES / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
