"""The page of a comparison as a browser shows it, light and dark, narrow and wide."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.compare.page import write_comparison
from agentrl.report.folder import RunFolder
from tests.compare.test_comparison import BASE, BETTER, compared, curve
from tests.report.test_html_browser import PAYLOADS
from tests.support.browser import Watched, browser, until

pytestmark = pytest.mark.process
LONG = "a recipe whose name does not fit into the window of a telephone, nor into a narrow column of a table"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    long = [curve(LONG, seed, [0.1, 0.2 + 0.05 * seed, 0.3]) for seed in range(4)]
    return write_comparison(tmp_path_factory.mktemp("compare") / "compare.html", [compared(*BASE, *BETTER, *long)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("dark", 390),
        ("light", 390),
        ("dark", 1400),
        ("light", 1400),
    ],
)
def test_curves_names_and_numbers_are_seen(chromium: Any, page: Path, scheme: str, width: int) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    try:
        watched = Watched(context.new_page())
        found = watched.page
        found.goto(page.as_uri())
        until(found, "document.querySelector('.chart canvas') !== null")
        assert found.evaluate("document.documentElement.scrollWidth") <= width
        assert found.locator("li", has_text="better against base: better by 0.31").is_visible()
        assert found.locator("tr", has_text="better - base").inner_text().split()[4] == "+0.310"
        assert found.locator(".legend li").all_inner_texts() == ["base", "better", LONG]
        for caption in found.locator("caption > span").all():
            box = caption.bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
        drawn = found.evaluate(DRAWN)
        names = ["surface", "curve-0", "curve-1", "curve-2"]
        assert len({drawn["colors"][name] for name in names}) == len(names)
        assert all(count > 20 for count in drawn["pixels"]), "each recipe's mean is drawn in the colour of the legend"
        assert drawn["ground"] < 60 if scheme == "dark" else drawn["ground"] > 200
        assert watched.errors == []
        assert watched.requests == [page.as_uri()]
    finally:
        context.close()


DRAWN = """
() => {
  const names = ["surface", "curve-0", "curve-1", "curve-2"];
  const colors = Object.fromEntries(names.map((name) => [name, color(name)]));
  const bytes = (text) => {
    const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const canvas = document.querySelector(".chart canvas");
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const count = ([r, g, b]) => {
    let found = 0;
    for (let at = 0; at < data.length; at += 4)
      found += data[at + 3] > 250 && Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b) < 12;
    return found;
  };
  return {
    colors,
    pixels: names.slice(1).map((name) => count(bytes(colors[name]))),
    ground: bytes(getComputedStyle(document.body).backgroundColor)[0],
  };
}
"""


@pytest.mark.slow
def test_what_strangers_runs_say_runs_nothing_and_hides_nothing(
    chromium: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    payloads = [text.format(n=number) for number, text in enumerate(PAYLOADS) if "\ud800" not in text]
    metric = "eval/<img src=x onerror=HIT(99)>\u202e"
    numbers = ("1e308", "NaN", "-1e99", "Infinity", "1e-320")
    runs = []
    for number, text in enumerate(payloads):
        folder = RunFolder.create(
            tmp_path / f"<img src=x onerror=HIT({number})> {number}",
            {"env": {"id": "key_door"}, "chat": {"system": text}, "train": {"steps": 2, "device": "cpu"}},
        )
        for step in range(3):
            value = numbers[(number + step) % len(numbers)] if step == 1 else str(0.1 * step)
            row = f'{{"step": {step}, "eval/episodes": 4, {json.dumps(metric)}: {value}}}\n'
            with (folder.path / "metrics.jsonl").open("a") as file:
                file.write(row)
        runs.append(str(folder.path))
    page = tmp_path / "page.html"
    main(["compare", *runs, "--metric", metric, "--html", str(page)])
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", capsys.readouterr().out)
    context = chromium.new_context()
    try:
        context.add_init_script("window.HIT = (n) => console.error(`it ran: ${n}`)")
        watched = Watched(context.new_page())
        watched.page.goto(page.as_uri())
        until(watched.page, "document.querySelector('.chart canvas') !== null")
        seen = watched.page.locator("main").inner_text()
        assert "<img src=x onerror=HIT(3)>" in seen
        assert "⟨U+202E⟩" in seen
        assert "\u202e" not in seen
        assert (watched.errors, watched.dialogs, watched.requests) == ([], [], [page.as_uri()])
    finally:
        context.close()
