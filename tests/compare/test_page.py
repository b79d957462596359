import json
import re
from pathlib import Path
from typing import Any

from agentrl.compare.page import write_comparison
from tests.compare.test_comparison import BASE, BETTER, compared, curve

HOSTILE = "</script><img src=x onerror=alert(1)>"


def data(page: Path) -> Any:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_has_each_seed_and_the_tables_of_the_terminal(tmp_path: Path) -> None:
    page = write_comparison(tmp_path / "deep" / "page.html", [compared(*BASE, *BETTER)], words="what comes of it")
    found = data(page)
    assert found["words"] == "what comes of it"
    [comparison] = found["comparisons"]
    assert [curve["name"] for curve in comparison["curves"]] == ["base", "better"]
    assert [run["values"][-1] for run in comparison["curves"][0]["runs"]] == [
        BASE[seed].values[20] for seed in range(4)
    ]
    assert comparison["differences"]["rows"][0][0] == "better - base"
    assert len(comparison["curves"][0]["low"]) == 3


def test_names_of_recipes_are_data(tmp_path: Path) -> None:
    other = [curve(HOSTILE, seed, [0.0, 0.1 * seed, 0.2]) for seed in range(2)]
    page = write_comparison(tmp_path / "page.html", [compared(*BASE[:2], *other)])
    assert HOSTILE not in page.read_text()
    [comparison] = data(page)["comparisons"]
    assert comparison["curves"][1]["name"] == HOSTILE
    assert "low" not in comparison["curves"][1], "an interval of two seeds would hide everything"
