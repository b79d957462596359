"""docs/metrics.md explains every metric that a run writes, and none that there is not."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.report.html.report import families
from tests.support.docs import ROOT
from tests.support.packages import PACKAGES
from tests.support.small_options import SMALL_OPTIONS

pytestmark = pytest.mark.process

PAGE = ROOT / "docs" / "metrics.md"
MORE: dict[str, Any] = {
    "credit": "turn_gae",
    "loss": {"anchor": "sampled", "mismatch": "truncate", "kl_coefficient": 0.01, "reject": 5, "trust": "calibrated"},
    "rollout": {"mode": "partial", "max_staleness": 1},
    "evaluation": {"env": {"other": {"id": "calculator"}}},
}
"""What makes a run write more metrics than the default recipe does."""
_THEMES = (
    "reward|episode|turn|groups|credit|critic|ratio|clip|first|kl|mismatch|moe|staleness|time|process|pool|health|stop"
)
_MADE_OF_PARTS = {"episode", "eval", "health", "pool", "stop", "time"}
"""Themes whose names the code puts together: `f"time/{name}"`."""


@cache
def rows() -> list[list[str]]:
    """The cells of the page's tables, from each that begins with `metric`."""
    found, is_of_metrics = [], False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        is_of_metrics = bool(cells) and (is_of_metrics or cells[0] == "metric")
        if is_of_metrics and cells[0] != "metric" and not cells[0].startswith("---"):
            found.append(cells)
    return found


def on_page() -> set[str]:
    """The metrics that have a row of their own."""
    return {name for cells in rows() for name in re.findall(r"`([^`]+)`", cells[0])}


@cache
def strings() -> set[str]:
    """Every string in the code of agentrl."""
    return {
        node.value
        for path in sorted(PACKAGES["agentrl"].rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def unexplained(names: set[str]) -> Iterator[str]:
    """Yield the names that the page does not explain; what the code calls by its name must stand there by its name."""
    numbers_of_environments = {
        "episode/NAME",
        "eval/NAME",
    }  # anything would fit; that of `calculator` has rows for its own
    patterns = [re.sub("NAME|REASON|K$", "[^/]+", name) for name in on_page() - numbers_of_environments]
    for name in sorted(names - on_page() - {"step"}):
        if name in strings() or not any(re.fullmatch(pattern, name) for pattern in patterns):
            yield name


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, MORE], ids=["default", "more"])
def test_every_metric_that_a_run_writes_is_explained(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = agentrl.train("calculator", run_dir=tmp_path / "run", quiet=True, overrides=SMALL_OPTIONS, **changes)
    written = {name.replace("eval/other/", "eval/") for row in run.metrics for name in row}
    assert len(written) > 80
    assert list(unexplained(written)) == []


def test_every_metric_that_the_code_names_is_explained() -> None:
    named = {name for name in strings() if re.fullmatch(rf"({_THEMES})/[a-z_]+", name)}
    assert len(named) > 60
    assert sorted(named - on_page()) == []


def test_every_metric_on_the_page_is_one_of_the_code() -> None:
    for name in on_page():
        theme, _, rest = name.partition("/")
        is_made = theme in _MADE_OF_PARTS and (rest in strings() or all(part in strings() for part in rest.split("/")))
        assert is_made or name in strings() or re.search("NAME|REASON|@K", name), name


def test_the_report_has_a_family_for_each() -> None:
    assert "Others" not in {family["name"] for family in families(on_page())}


def test_ranges_of_the_default_recipe_are_those_it_had() -> None:
    lines = (ROOT / "benchmarks" / "golden" / "default_recipe.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if row.get("step")]
    told = 0
    for cells in rows():
        for low, high in re.findall(r"calculator[^|:]*: (-?[\d.]+) to (-?[\d.]+)", " | ".join(cells)):
            (name,) = re.findall(r"`([^`]+)`", cells[0])
            for word, value in ((low, min(row[name] for row in steps)), (high, max(row[name] for row in steps))):
                digits = len(word.partition(".")[2]) or 2
                assert float(word) == pytest.approx(value, abs=0.5001 * 10**-digits), f"{name}: {word}, was {value}"
            told += 1
    assert told > 20
