"""A comparison as one page of HTML: curves with intervals, and the tables of the terminal."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from agentrl.compare.comparison import Arm, Comparison
from agentrl.compare.text import differences_rows, levels_rows, verdict
from agentrl.report.html.page import write_page

_BAND = 3
"""Seeds from which an interval is drawn: that of two hides everything else."""
_STYLE = ".chart, .scroll { margin: 0 0 20px; } .legend { margin: 16px 0 8px; } ul:not(.legend) { padding-left: 22px; }"


def write_comparison(out: Path, comparisons: Sequence[Comparison], *, words: str | None = None) -> Path:
    """Write the page, and return its path.

    Args:
        out: the file.
        comparisons: one; of a sweep, that of all combinations and that of the best two on fresh seeds.
        words: what comes of them all together.
    """
    script = (files("agentrl.compare") / "assets" / "compare.js").read_text(encoding="utf-8")
    out.parent.mkdir(parents=True, exist_ok=True)
    data = {"words": words, "comparisons": [_data(comparison) for comparison in comparisons]}
    return write_page(out, title="agentrl: a comparison", data=data, scripts=[script], styles=[_STYLE])


def _data(comparison: Comparison) -> dict[str, Any]:
    columns, rows = levels_rows(comparison)
    difference_columns, difference_rows = differences_rows(comparison)
    return {
        "metric": comparison.metric,
        "panel": comparison.panel,
        "num_tasks": comparison.num_tasks,
        "curves": [_curve(arm, comparison.steps, number) for number, arm in enumerate(comparison.arms)],
        "levels": {"columns": columns, "rows": rows},
        "differences": {"columns": difference_columns, "rows": difference_rows},
        "verdicts": [verdict(difference, comparison) for difference in comparison.differences],
        "notes": comparison.notes,
    }


def _ends(arm: Arm, side: Literal["low", "high"]) -> list[float]:
    ends = [getattr(level, side) for level in arm.mean]
    return [level.mean if end is None else end for level, end in zip(arm.mean, ends, strict=True)]


def _curve(arm: Arm, steps: list[int], number: int) -> dict[str, Any]:
    return {
        "name": arm.name,
        "color": number,
        "steps": steps,
        "mean": [level.mean for level in arm.mean],
        **({"low": _ends(arm, "low"), "high": _ends(arm, "high")} if len(arm.seeds) >= _BAND else {}),
        "runs": [
            {"name": f"seed {seed}", "values": values} for seed, values in zip(arm.seeds, arm.curves, strict=True)
        ],
    }
