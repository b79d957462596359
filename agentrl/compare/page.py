"""A comparison of recipes as tables for the terminal, and as one page of HTML with curves and intervals."""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from agentrl.compare.comparison import Arm, Comparison, Difference, Level
from agentrl.compare.curves import is_gain
from agentrl.report.html.page import write_page


def lines(comparison: Comparison) -> Iterator[Table | Text]:
    """Yield what to print."""
    tasks = f", {comparison.num_tasks} tasks (panel {comparison.panel})" if comparison.panel else ""
    yield _table(f"{comparison.metric}{tasks}; means over seeds [95 % interval]", *levels_rows(comparison))
    if comparison.differences:
        yield _table("differences, paired by seed [95 % interval]", *differences_rows(comparison))
    for difference in comparison.differences:
        yield Text(verdict(difference, comparison))
    for note in comparison.notes:
        yield Text(f"note: {note}", "yellow")


def levels_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table of recipes."""
    columns = ["recipe", "seeds", f"at step {comparison.steps[-1]}", "area", f"steps to {comparison.threshold:.3g}"]
    rows = []
    for arm in comparison.arms:
        never = len(arm.seeds) - arm.reached
        steps = "never"
        if arm.steps:
            steps = (
                f"over {arm.steps.mean:.3g}; {never} of {len(arm.seeds)} never" if never else f"{arm.steps.mean:.3g}"
            )
        rows.append([arm.name, str(len(arm.seeds)), _level(arm.final), _level(arm.area), steps])
    return columns, rows


def differences_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table of differences."""
    p = "p (Holm)" if len(comparison.differences) > 1 else "p"
    columns = ["difference", "pairs", f"at step {comparison.steps[-1]}", p, "area", "steps"]
    rows = [
        [
            f"{difference.name} - {difference.against}",
            str(len(difference.seeds)),
            _level(difference.final, signed=True),
            "-" if difference.p_holm is None else f"{difference.p_holm:.2g}",
            _level(difference.area, signed=True),
            _level(difference.steps, signed=True, digits=3),
        ]
        for difference in comparison.differences
    ]
    return columns, rows


def verdict(difference: Difference, comparison: Comparison) -> str:
    """Say what a difference amounts to, and what its seeds could have shown."""
    final, pair = difference.final, f"{difference.name} against {difference.against}"
    if final.low is None:
        return f"{pair}: {final.mean:+.3f}; no interval, so nothing is shown"
    more, less = ("better", "worse") if is_gain(comparison.metric) else ("higher", "lower")
    side = more if final.mean > 0 else less
    said = f"{side} by {abs(final.mean):.3f}" if difference.differs else "not told apart"
    num, needed = len(difference.seeds), difference.seeds_needed
    need = "more than 1,000 seeds" if needed is None else f"{needed} seeds"
    return (
        f"{pair}: {said}. {num} seeds see a difference of {difference.seen:.2g} in four of five such comparisons; "
        f"{need} to see {comparison.effect:.2g}"
    )


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _level(level: Level | None, *, signed: bool = False, digits: int = 0) -> str:
    if level is None:
        return "-"
    form = f"{'+' if signed else ''}.{digits}g" if digits else f"{'+' if signed else ''}.3f"
    if level.low is None or level.high is None:
        return f"{level.mean:{form}}"
    return f"{level.mean:{form}} [{level.low:{form}}, {level.high:{form}}]"


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
