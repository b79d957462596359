"""Evaluation, from a script, a notebook or the command line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from agentrl.api.target import (
    Target,
    load_to_play,
    look_for_modules_here,
    sections,
    tokenizer_of,
    untrained,
    without_running_loop,
)
from agentrl.credit import Credit
from agentrl.data.files import keep_process
from agentrl.recipe.config import Recipe
from agentrl.report.folder import EvaluationNote, RunFolder
from agentrl.report.records import pieces_of, records
from agentrl.report.statistics import settings_of
from agentrl.report.terminal import Console, announce
from agentrl.rollout.evaluation import Evaluation
from agentrl.run.build import build
from agentrl.run.checkpoint import load_weights
from agentrl.run.evaluate import evaluate as evaluate_parts
from agentrl.run.start import reuse_environments

if TYPE_CHECKING:
    from agentrl.recipe.sections import ModelSection, Sections


@keep_process()
def evaluate(
    target: Target = None,
    *,
    env: Any = None,
    model: "str | Path | ModelSection | Mapping[str, Any] | None" = None,
    overrides: Sequence[str] = (),
    **others: "Unpack[Sections]",
) -> Evaluation:
    """Play the evaluation tasks; return the metrics and every episode, group by group.

    Args:
        target: a run or its folder, whose newest weights play; or a recipe, whose model plays as it is.
        env: as in `agentrl.train`: the environment to play in, whatever the run was trained or is evaluated in.
        model: as in `agentrl.train`.
        overrides: options as on the command line.
        **others: further sections, with only what changes: `evaluation={"num_tasks": 512, "samples": 4}`.

    Raises:
        UserError: for what cannot be carried out, naming the field and the fix.
    """
    look_for_modules_here(target)
    recipe, run_dir = load_to_play(target, overrides, changes=sections({"env": env, "model": model, **others}))
    with without_running_loop():
        found, _ = evaluated(recipe, run_dir, console=Console(soft_wrap=True))
    return Evaluation(
        metrics={
            f"{prefix.removeprefix('eval/')}{name}": value
            for prefix, one in found.items()
            for name, value in one.metrics.items()
        },
        groups=[group for one in found.values() for group in one.groups],
        panel=tuple(task for one in found.values() for task in one.panel),
    )


def evaluated(
    recipe: Recipe, run_dir: Path | None, *, console: Console, keep: bool = True, first: int = 0
) -> tuple[dict[str, Evaluation], Path | None]:
    """Play the evaluation tasks of each environment.

    Returns: the figures, by the prefix of its metrics; and the file of the run's folder that holds its rollouts. None: there
    is no run, nothing is kept, or the disk is full, which is logged.

    Args:
        recipe: names model, environments and tasks.
        run_dir: of the run whose newest weights play; None: the recipe's model plays as it is.
        console: prints warnings.
        keep: write the rollouts into the run's folder.
        first: of a table, which task comes first.
    """
    folder = RunFolder.open(run_dir) if run_dir else None

    def warn(words: str) -> None:
        console.print(f"warning: {words}", style="yellow")

    if folder is not None and (words := folder.death()) is not None:
        warn(words)
    with build(untrained(recipe), tokenizer_folder=tokenizer_of(run_dir), on_warning=warn) as parts:
        step = load_weights(parts, folder) if folder else 0
        announce("proving that engine and trainer agree")
        parts.weight_sync.verify_and_push(0)
        reuse_environments(parts)
        if first:
            envs = tuple(replace(env, tasks=replace(env.tasks, first=first)) for env in parts.evaluation_envs)
            parts = replace(parts, evaluation_envs=envs)
        announce(f"playing {recipe.evaluation.num_tasks} evaluation tasks")
        found = evaluate_parts(parts)
        if folder is None or not keep:
            return found, None
        note = EvaluationNote(step=step, settings=settings_of(recipe.model_dump(mode="json")))
        return found, _kept(found, folder, note, pieces_of(parts.tokenizer), warn)


def _kept(
    found: Mapping[str, Evaluation],
    folder: RunFolder,
    note: EvaluationNote,
    piece: Callable[[int], str],
    warn: Callable[[str], None],
) -> Path | None:
    """Write the rollouts of an evaluation into a run's folder; nobody was trained on them."""
    groups = [group for evaluation in found.values() for group in evaluation.groups]
    credits = [[Credit.excluded(t) for t in group.trajectories] for group in groups]
    try:
        return folder.add_evaluation(records(groups, credits, step=note.step, piece=piece), note)
    except OSError as error:  # what was found is worth more
        warn(f"the rollouts could not be kept in {folder.evaluations}: {error.strerror}")
        return None
