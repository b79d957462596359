"""Evaluation, from a script, a notebook or the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.api.given import sections
from agentrl.api.notebook import without_running_loop
from agentrl.api.target import Target, load, tokenizer_of, untrained
from agentrl.config import Recipe
from agentrl.report.folder import RunFolder
from agentrl.report.terminal import Console
from agentrl.rollout.evaluation import Evaluation
from agentrl.run.build import build
from agentrl.run.evaluate import evaluate as evaluate_parts
from agentrl.run.resume import load_weights
from agentrl.run.start import reuse_environments


def evaluate(
    target: Target = None,
    *,
    env: Any = None,
    model: str | Path | dict[str, Any] | None = None,
    overrides: Sequence[str] = (),
    **others: Any,
) -> Evaluation:
    """Play the evaluation tasks; return the metrics and every episode, group by group.

    Args:
        target: the folder of a run, whose newest weights play; or a recipe, whose model plays as it is.
        env: as in `agentrl.train`; with a run, another environment than it was trained in.
        model: as in `agentrl.train`.
        overrides: options as on the command line.
        **others: further sections, with only what changes: `evaluation={"num_tasks": 512, "samples": 4}`.

    Raises:
        UserError: for what cannot be carried out, naming the field and the fix.
    """
    recipe, run_dir = load(target, overrides, changes=sections({"env": env, "model": model, **others}))
    with without_running_loop():
        found = evaluated(recipe, run_dir, console=Console(soft_wrap=True))
    return Evaluation(
        metrics={
            f"{prefix.removeprefix('eval/')}{name}": value
            for prefix, one in found.items()
            for name, value in one.metrics.items()
        },
        groups=[group for one in found.values() for group in one.groups],
        panel=tuple(task for one in found.values() for task in one.panel),
    )


def evaluated(recipe: Recipe, run_dir: Path | None, *, console: Console) -> dict[str, Evaluation]:
    """Play the evaluation tasks of each environment; return what was found by the prefix of its metrics.

    Args:
        recipe: names model, environments and tasks.
        run_dir: of the run whose newest weights play; None: the recipe's model plays as it is.
        console: prints warnings.
    """
    folder = RunFolder.open(run_dir) if run_dir else None

    def warn(words: str) -> None:
        console.print(f"warning: {words}", style="yellow")

    with build(untrained(recipe), tokenizer_folder=tokenizer_of(run_dir), on_warning=warn) as parts:
        if folder:
            load_weights(parts, folder)
        parts.link.start(0)
        reuse_environments(parts)
        return evaluate_parts(parts)
