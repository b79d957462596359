"""The report of runs: all of their folders in one page."""

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.report.html.curves import curves, families
from agentrl.report.html.page import asset, write_page
from agentrl.report.html.runs import Run, by_recipe, open_runs
from agentrl.report.html.store import RolloutStore

SCRIPTS, STYLES = ("runs.js", "rollouts.js", "dialogue.js", "report.js"), ("report.css", "rollouts.css", "dialogue.css")
"""Assets of the report, in the order in which they run."""


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write what runs have left in their folders as one page of HTML that opens anywhere; return its path.

    Runs that differ in their seed alone are shown as repetitions of one recipe. Damaged rollouts are left out, and the page
    says so.

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
        data=report_data(runs, store),
        scripts=[asset(name) for name in SCRIPTS],
        styles=[asset(name) for name in STYLES],
        blocks=(block.data for block in store.blocks.values()),
    )


def report_data(runs: Sequence[Run], store: RolloutStore, *, is_live: bool = False) -> dict[str, Any]:
    """Return the data of the page, but for the blocks."""
    recipes = by_recipe(runs)
    drawn = curves(recipes)
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
        "runs": [run.described() for run in runs],
        "recipes": [
            {"name": recipe.name, "runs": [run.number for run in recipe.runs], **_parts(recipe.runs[0])}
            for recipe in recipes
        ],
        "families": families(drawn),
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
    envs = dict.fromkeys(str(run.field("env.id")) for run in runs)
    return f"{', '.join(envs)}: {len(runs)} runs"


def _parts(run: Run) -> dict[str, Any]:
    """Return what a reader wants to know first of a recipe."""
    model = run.field("model.name_or_path") or ("a local model" if run.field("model.local") else None)
    fields = {
        "environment": run.field("env.id"),
        "model": model,
        "credit": run.field("credit.scheme"),
        "ratio unit": run.field("loss.unit"),
        "groups": f"{run.field('rollout.num_groups')} of {run.field('rollout.group_size')}",
        "mode": run.field("rollout.mode"),
    }
    return {"parts": {name: str(value) for name, value in fields.items() if value is not None}}
