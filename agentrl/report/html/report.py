"""The report of runs in one page: every run of a recipe, their mean curve, and its 95 % interval over the runs."""

import datetime as dt
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from agentrl.errors import ConfigError
from agentrl.report.html.page import asset, write_page
from agentrl.report.html.runs import RecipeRuns, Run, by_recipe, open_runs
from agentrl.report.html.store import RolloutStore
from agentrl.report.statistics import player_of, t_quantile, with_unreported, within

MAX_POINTS = 1500
"""Points of a curve: of more steps, neighbours are averaged."""

_FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Success", ("episode/success", "episode/score")),
    ("Reward", ("reward/mean", "reward/spread")),
    ("Components of the reward", ("reward/",)),
    ("Evaluation", ("eval/",)),
    ("Ratios and clipping", ("ratio/", "clip/", "first/", "kl/", "mismatch/", "moe/")),
    (
        "Learning",
        (
            "loss",
            "entropy",
            "nll",
            "updates",
            "grad_norm",
            "learning_rate",
            "skipped_",
            "shortened_",
            "credit/",
            "critic/",
            "groups/",
        ),
    ),
    ("Staleness", ("staleness/",)),
    ("Episodes", ("episode/", "turn/", "tool/", "tools/")),
    ("How episodes end", ("stop/",)),
    ("Time", ("time/",)),
    ("Memory and process", ("process/",)),
    ("Rollout pool", ("pool/",)),
    ("Health", ("health/", "recipe_changes")),
)
"""Families of metrics in the order in which they are shown, by how names begin; the first that fits counts."""
_OTHERS = "Others"
_CONSTANT_STEPS = 3


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 95 % interval of a mean, from Student's t; one value has none."""
    mean, num = fmean(values), len(values)
    if num < 2:
        return None, None
    half = t_quantile(0.975, num - 1) * stdev(values) / math.sqrt(num)
    return mean - half, mean + half


def curves(recipes: Sequence[RecipeRuns]) -> dict[str, list[dict[str, Any]]]:
    """Return the curves of each metric, one for each recipe that has it; every step is that of any of its runs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number, recipe in enumerate(recipes):
        names = dict.fromkeys(name for run in recipe.runs for row in run.rows for name in row)
        last = max((row["step"] for run in recipe.runs for row in run.rows), default=0.0)
        columns = [_columns(with_unreported(run.rows, names)) for run in recipe.runs]
        for name in dict.fromkeys(name for of_run in columns for name in of_run):
            of_runs = [of_run.get(name, {}) for of_run in columns]
            if max(map(len, of_runs)) > MAX_POINTS:
                of_runs = [_averaged(of_run, width=math.ceil((last + 1) / MAX_POINTS)) for of_run in of_runs]
            steps = sorted({step for of_run in of_runs for step in of_run})
            at = [[of_run[step] for of_run in of_runs if step in of_run] for step in steps]
            bounds = [interval(values) for values in at]
            curve: dict[str, Any] = {
                "name": recipe.name,
                "color": number,
                "steps": steps,
                "mean": _short(map(fmean, at)),
                "runs": [
                    {"name": run.name, "values": _short(of_run.get(step) for step in steps)}
                    for run, of_run in zip(recipe.runs, of_runs, strict=True)
                ],
            }
            if len(recipe.runs) > 1:
                low, high = ([within(name, end) for end in ends] for ends in zip(*bounds, strict=True))
                curve |= {"low": _short(low), "high": _short(high)}
            found.setdefault(name, []).append(curve)
    return found


def families(names: Iterable[str]) -> list[dict[str, Any]]:
    """Sort the names of metrics into families."""
    found: dict[str, list[str]] = {family: [] for family in (*(family for family, _ in _FAMILIES), _OTHERS)}
    for name in sorted(names):
        family = next((family for family, begins in _FAMILIES if name.startswith(begins)), _OTHERS)
        found[family].append(name)
    return [{"name": family, "metrics": members} for family, members in found.items() if members]


def constants(drawn: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Return the value of each metric that has one alone in every run, once three steps are there."""
    found: dict[str, float] = {}
    if max((len(curve["steps"]) for of_recipes in drawn.values() for curve in of_recipes), default=0) < _CONSTANT_STEPS:
        return found
    for name, of_recipes in drawn.items():
        values = {
            value for curve in of_recipes for run in curve["runs"] for value in run["values"] if value is not None
        }
        if len(values) == 1:
            found[name] = values.pop()
    return found


def _columns(rows: Sequence[dict[str, float]]) -> dict[str, dict[int, float]]:
    """Return each metric by step."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and math.isfinite(value):
                found.setdefault(name, {})[int(row["step"])] = value
    return found


def _averaged(column: dict[int, float], *, width: int) -> dict[int, float]:
    """Return the mean of `width` steps in a row, at the first of them."""
    found: dict[int, list[float]] = {}
    for step, value in column.items():
        found.setdefault(step // width * width, []).append(value)
    return {step: fmean(values) for step, values in found.items()}


def _short(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.6g}") for value in values]


SCRIPTS, STYLES = ("runs.js", "rollouts.js", "dialogue.js", "report.js"), ("report.css", "rollouts.css", "dialogue.css")
"""Assets of the report, in the order in which they run."""


def write_report(folders: Sequence[Path], out: Path, *, defaults: Mapping[str, Any] | None = None) -> Path:
    """Write what runs have left in their folders as one page of HTML that opens anywhere; return its path.

    Runs that differ in their seed alone are shown as repetitions of one recipe. Damaged rollouts are left out, and the page
    says so.

    Args:
        folders: of the runs.
        out: the file.
        defaults: fields of a recipe that sets none; a recipe is shown as its difference from them.

    Raises:
        ConfigError: for a folder that is no run, one without metrics and rollouts, or damaged metrics.
    """
    runs = open_runs(folders)
    store = RolloutStore()
    store.read(runs)
    if not store.blocks and not any(run.rows for run in runs):
        raise ConfigError(f"{', '.join(map(str, folders))}: no metrics and no rollouts yet; wait for the first step")
    return write_page(
        out,
        title=title(runs),
        data=report_data(runs, store, defaults=defaults),
        scripts=[asset(name) for name in SCRIPTS],
        styles=[asset(name) for name in STYLES],
        blocks=(block.data for block in store.blocks.values()),
    )


def report_data(
    runs: Sequence[Run], store: RolloutStore, *, defaults: Mapping[str, Any] | None = None, is_live: bool = False
) -> dict[str, Any]:
    """Return the data of the page, but for the blocks."""
    recipes = by_recipe(runs)
    drawn = curves(recipes)
    constant = constants(drawn)
    notices = [*store.notices]
    warnings = []
    for run in runs:
        try:
            told = run.folder.warnings()
        except ConfigError as error:
            notices.append(f"{error}. The warnings of this run are not shown")
            continue
        warnings += [{"run": run.number, "step": each.step, "name": each.name, "words": each.words} for each in told]
    if store.left_out:
        notices.append(
            f"The newest {len(store.entries()):,} rollouts are shown; {store.left_out} older files are left out"
        )
    return {
        "title": title(runs),
        "live": is_live,
        "written": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "runs": [run.described(defaults) for run in runs],
        "recipes": [
            {"name": recipe.name, "runs": [run.number for run in recipe.runs], **_parts(recipe.runs[0])}
            for recipe in recipes
        ],
        "families": families(name for name in drawn if name not in constant),
        "constants": dict(sorted(constant.items())),
        "curves": drawn,
        "warnings": warnings,
        "faults": [
            {"run": run.number, "kind": kind.name, "kept": len(list(kind.glob("*.jsonl")))}
            for run in runs
            for kind in run.folder.fault_kinds()
        ],
        "notices": notices,
        "rollouts": store.entries(),
    }


def title(runs: Sequence[Run]) -> str:
    """Return the name of the one run, or of what the runs train on."""
    if len(runs) == 1:
        return runs[0].name
    envs = dict.fromkeys(player_of(run.config) for run in runs)
    return f"{', '.join(envs)}: {len(runs)} runs"


def _parts(run: Run) -> dict[str, Any]:
    """Return what a reader wants to know first of a recipe."""
    model = run.field("model.name_or_path") or ("a local model" if run.field("model.local") else None)
    fields = {
        "environment" if run.field("agent") is None else "agent": player_of(run.config),
        "model": model,
        "credit": run.field("credit.scheme"),
        "ratio unit": run.field("loss.unit"),
        "groups": f"{run.field('rollout.num_groups')} of {run.field('rollout.group_size')}",
        "mode": run.field("rollout.mode"),
    }
    return {"parts": {name: str(value) for name, value in fields.items() if value is not None}}
