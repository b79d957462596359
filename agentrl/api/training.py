"""Training from a script, a notebook or the command line: checks before it, its lines in the terminal, and its end."""

import datetime as dt
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rich.filesize import decimal
from rich.table import Column, Table

from agentrl.api.target import (
    Target,
    line_display,
    load,
    look_for_modules_here,
    name_of,
    sections,
    tokenizer_of,
    without_running_loop,
)
from agentrl.api.trained_run import TrainedRun
from agentrl.data.files import absolute, dump_yaml, keep_process, shown
from agentrl.distributed.checkpoints import by_step, newest_step
from agentrl.errors import ConfigError, TrainingError, UserError
from agentrl.recipe import registry
from agentrl.recipe.config import Recipe, plan
from agentrl.recipe.config import warnings as recipe_warnings
from agentrl.report import terminal
from agentrl.report.folder import RunFolder
from agentrl.report.log import logged
from agentrl.report.statistics import best_step
from agentrl.report.terminal import Console, announced_by
from agentrl.run import loop
from agentrl.run.build import build
from agentrl.run.checkpoint import CollapsedError, go_back
from agentrl.run.launch import USER_MISTAKE

if TYPE_CHECKING:
    from agentrl.recipe.sections import ModelSection, Sections


@contextmanager
def progress(console: Console, *, verbose: bool = False) -> Iterator[Any]:
    """Show one bar a phase; in a notebook, a line that changes; elsewhere, a line now and then. The log has a line a step.

    `verbose`: print what each step shows, too.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    whole = Column(no_wrap=True)  # on a narrow terminal the note alone takes two lines
    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(bar_width=12, table_column=whole),
        MofNCompleteColumn(table_column=whole),
        TimeRemainingColumn(table_column=whole),
        TextColumn("{task.fields[note]}", table_column=Column()),
    )
    tell = line_display() if console.is_jupyter and not console.quiet else None
    with Progress(*columns, console=console, disable=not console.is_terminal or console.quiet) as progress:
        bars: dict[str, Any] = {}
        begun: dict[str, tuple[int, float]] = {}

        def on_progress(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
            note = _note(metrics)
            first, begin_s = begun.setdefault(phase, (step, time.perf_counter()))
            pace_s = (
                (time.perf_counter() - begin_s) / (step - first) if step > first else metrics.get("time/step_s", 0.0)
            )
            left = f"  ETA {dt.timedelta(seconds=round(pace_s * (total - step)))}" if step < total and pace_s else ""
            line = f"{phase} {step}/{total}  {note}{left}"
            if tell is not None:
                tell(line)
                terminal.note(line)
                return
            if phase not in bars:
                bars[phase] = progress.add_task(phase, total=total, note="")
            progress.update(bars[phase], completed=step, note=note)
            if not console.is_terminal and (step == total or step % max(1, total // 20) == 0):
                console.print(line)
            else:
                terminal.note(line)
            if verbose and phase == "training":
                console.print("\n".join(f"  {words}" for words in details(metrics)))

        yield on_progress


def print_end(console: Console, folder: "RunFolder", recipe: "Recipe") -> None:
    """Print what a run came to, and where it is."""
    console.print(summary(folder.metrics(), recipe.evaluation.samples))
    if words := _checkpoints(folder):
        console.print(words)
    console.print(f"run folder: {shown(folder.path)}")
    console.print(f"look at it: agentrl view {shlex.quote(shown(folder.path))}")


def _checkpoints(folder: "RunFolder") -> str:
    """Return which checkpoints there are, how large, and which was best; empty if there is none."""
    kept = by_step(folder.checkpoints)
    if not kept:
        return ""
    size = sum(file.stat().st_size for path in kept.values() for file in path.rglob("*") if file.is_file())
    best = best_step(folder.metrics(), among=kept)
    words = f"checkpoints: steps {', '.join(map(str, kept))}, {decimal(size)}"
    return (
        words if best in (None, max(kept)) else f"{words}; the best evaluation is of step {best} (export --step {best})"
    )


def evaluation_lines(metrics: dict[str, float]) -> Iterator[str]:
    """Yield a line for each environment, of the evaluation before the first step."""
    for prefix in (name.removesuffix("episodes") for name in metrics if name.endswith("/episodes")):
        forms = {"success": ".1%", "score": ".1%", "reward": ".3f"}
        parts = [
            f"{name} {metrics[f'{prefix}{name}']:{form}}"
            for name, form in forms.items()
            if f"{prefix}{name}" in metrics
        ]
        of = f"{prefix.split('/')[1]}: " if prefix != "eval/" else ""
        number = metrics[f"{prefix}episodes"]
        failed = f", {metrics[f'{prefix}failed']:.0f} failed" if metrics.get(f"{prefix}failed") else ""
        yield f"before the first step: {of}{', '.join([*parts, f'{number:.0f} episodes'])}{failed}"


def summary(rows: list[dict[str, float]], samples: int) -> str:
    """Compare the first and the last evaluation, of so many episodes a task, in a line for each environment."""
    found = [name for row in rows for name in row if name.startswith("eval/") and name.endswith("/episodes")]
    prefixes = dict.fromkeys(name.removesuffix("episodes") for name in found)
    lines = [_summary(rows, samples, prefix) for prefix in prefixes]
    return "\n".join(lines) or "no result: nothing was evaluated"


def _summary(rows: list[dict[str, float]], samples: int, prefix: str) -> str:
    """Compare the evaluations of one environment; one whose every episode failed has no means."""
    evaluations = [row for row in rows if f"{prefix}episodes" in row]
    played = [row for row in evaluations if f"{prefix}reward" in row]
    of = f"{prefix.split('/')[1]}: " if prefix != "eval/" else ""
    number = (evaluations[-1][f"{prefix}episodes"] + evaluations[-1].get(f"{prefix}failed", 0.0)) / samples
    tasks = f"{number:.0f} evaluation task{'s' if number > 1 else ''}"
    if not played:
        return f"{of}no result on {tasks}: every episode of them failed"
    first, last = played[0], played[-1]

    def change(name: str, form: str) -> str:
        before, after = first[f"{prefix}{name}"], last[f"{prefix}{name}"]
        return f"{name} {before:{form}} -> {after:{form}}"

    names = [name for name in ("success", "score") if f"{prefix}{name}" in first and f"{prefix}{name}" in last]
    if all(row.get(f"{prefix}score") == row.get(f"{prefix}success") for row in (first, last)):
        names = names[:1]  # an environment without a between
    parts = [*(change(name, ".1%") for name in names), change("reward", ".3f")]
    words = f"{of}{', '.join(parts)} on {tasks}, {rows[-1]['step']:.0f} steps"
    if len(played) == len(evaluations):
        return words
    steps = ", ".join(f"{row['step']:.0f}" for row in evaluations if f"{prefix}reward" not in row)
    return f"{words}; left out, because every episode of them failed: step {steps}"


_DETAILS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/",)),
    ("episodes", ("episode/", "turn/")),
    ("ended by", ("stop/",)),
    ("groups", ("groups/", "credit/", "pool/")),
    ("update", ("loss", "ratio/", "clip/", "kl/", "entropy", "grad_norm", "learning_rate", "staleness/", "first/")),
    ("time", ("time/",)),
    ("evaluation", ("eval/",)),
)


def details(metrics: dict[str, float]) -> Iterator[str]:
    """Yield the metrics of a step, in a line for each theme; what is 0 is left out."""
    for theme, prefixes in _DETAILS:
        shown = {name: value for name, value in metrics.items() if name.startswith(prefixes) and value}
        if shown:
            theirs = prefixes[0] if prefixes[0].endswith("/") else ""
            yield f"{theme}: " + ", ".join(f"{name.removeprefix(theirs)} {value:.4g}" for name, value in shown.items())


def _note(metrics: dict[str, float]) -> str:
    faults = f"  faults {metrics['pool/faults']:.0f}" if metrics.get("pool/faults") else ""
    shown = {"loss": "loss", "reward/mean": "reward", "episode/score": "score", "clip/tokens": "clipped"}
    if "reward/mean" in metrics:
        del shown["loss"]
    parts = [f"{word} {metrics[name]:.3f}" for name, word in shown.items() if name in metrics]
    speeds = {"time/step_s": "{:.2f} s/step", "time/tokens_per_s": "{:,.0f} tokens/s"}
    parts += [form.format(metrics[name]) for name, form in speeds.items() if name in metrics]
    return "  ".join(parts) + faults


OnStep = Callable[[dict[str, float]], object]
"""Callback that gets the metrics of each step, with its number as `step`."""


@keep_process()
def train(
    recipe: Target = None,
    *,
    env: Any = None,
    model: "str | Path | ModelSection | Mapping[str, Any] | None" = None,
    credit: Any = None,
    on_step: OnStep | None = None,
    processes: int = 1,
    overrides: Sequence[str] = (),
    quiet: bool = False,
    **others: "Unpack[Sections]",
) -> TrainedRun:
    """Train a recipe, or resume a run; return what it came to. It may be interrupted at any time, and resumed.

    `agentrl.train("calculator", env=MyEnv, credit="gigpo", seed=1, train={"steps": 40})` takes the recipe `calculator`, with
    another environment, another credit scheme, another seed and fewer steps. Where a recipe has a name, a class or a function
    is taken. In this process it is found wherever it was defined; other commands (`agentrl eval RUN`) find it where its module
    can be imported from the working directory.

    Args:
        recipe: the name of one that comes with agentrl, a YAML file, its sections as a dict; None: the defaults. Or the folder
            of a run, which is resumed.
        env: section `env`, or what stands for its `id`: a class, a function that returns an environment, a name.
        model: section `model`, or what stands for its `name_or_path`: a Hugging Face name or folder.
        credit: section `credit`, or what stands for it: a scheme, its class or its name.
        on_step: called after each step with its metrics. What it raises ends the run, which can then be resumed.
        processes: how many train together, one for each GPU; they import what the recipe names.
        overrides: options as on the command line, over all else; a script that gives `sys.argv[1:]` takes them.
        quiet: print nothing but warnings.
        **others: further sections and fields of the recipe, with only what changes: `seed=1`, `rollout={"group_size": 4}`.

    Raises:
        UserError: for what cannot be carried out, naming the field and the fix.
        AgentRLError: if the run fails.
    """
    if registry.importing:
        raise UserError(
            f"{registry.importing[0]} trains while it is imported: put its agentrl.train(...) under `if __name__ == "
            '"__main__":`'
        )
    look_for_modules_here(recipe)
    changes = sections({"env": env, "model": model, "credit": credit, **others})
    if processes != 1:
        return _launch(recipe, changes, overrides, processes=processes, on_step=on_step, quiet=quiet)
    planned, run_dir = load(recipe, overrides, changes=changes)
    planned = with_run_dir(planned, run_dir, name=name_of(recipe, planned))
    with without_running_loop():
        return run(planned, run_dir, console=Console(soft_wrap=True, quiet=quiet), on_step=on_step)


def with_run_dir(recipe: Recipe, run_dir: Path | None, *, name: str, is_main: bool = True) -> Recipe:
    """Return a recipe that names the folder of its run: `runs/NAME-DATE` where it names none.

    Args:
        recipe: to train.
        run_dir: of the run that is resumed; None: it begins.
        name: of the run.
        is_main: False for a process that leaves the checks to another.

    Raises:
        ConfigError: if a run cannot begin there, or has more steps behind it than the recipe has.
    """
    if recipe.run_dir is None:
        first = f"{name}-{dt.datetime.now():%Y%m%d-%H%M%S}"  # local time: a name for a person
        names = chain([first], (f"{first}-{number}" for number in count(2)))  # a tiny run takes less than a second
        free = next(path for name in names if not (path := absolute(f"runs/{name}")).exists())
        return recipe.model_copy(update={"run_dir": free})
    folder = absolute(recipe.run_dir)
    recipe = recipe.model_copy(update={"run_dir": folder})
    if not is_main:
        return recipe
    if run_dir is None:
        RunFolder.check_free(folder)  # before the work of building a model
        return recipe
    done = newest_step(RunFolder.open(run_dir).checkpoints)
    if done is not None and recipe.train.steps < done:
        raise ConfigError(
            f"train.steps: {recipe.train.steps} is less than the {done} steps that {run_dir} has done; raise it"
        )
    return recipe


def run(
    recipe: Recipe,
    run_dir: Path | None,
    *,
    console: Console,
    on_step: OnStep | None = None,
    is_main: bool = True,
    verbose: bool = False,
) -> TrainedRun:
    """Train, and show how it goes; the first process keeps in the run's `log.txt` what is printed.

    Args:
        recipe: to train, with the run's folder.
        run_dir: of the run that is resumed; None: it begins.
        console: prints.
        on_step: gets the metrics of each step.
        is_main: False for a rank that prints only what it alone has found.
        verbose: print what each step shows.
    """
    assert recipe.run_dir is not None, "see `with_run_dir`"
    with logged(recipe.run_dir) if is_main else nullcontext():
        return _run(recipe, run_dir, console=console, on_step=on_step, is_main=is_main, verbose=verbose)


def _run(
    recipe: Recipe, run_dir: Path | None, *, console: Console, on_step: OnStep | None, is_main: bool, verbose: bool
) -> TrainedRun:
    assert recipe.run_dir is not None, "see `with_run_dir`"
    folder = RunFolder.open(run_dir) if run_dir else None
    if folder and int(os.environ.get("WORLD_SIZE", "1")) == 1 and _is_done(console, folder, recipe):
        return TrainedRun(folder.path)
    opening = [_plan_table(recipe), f"run folder: {shown(recipe.run_dir)}"]
    likely_mistakes = recipe_warnings(recipe) if is_main else []
    teller = Console(soft_wrap=True) if console.quiet else console

    def warn(words: str) -> None:
        teller.print(f"warning: {words}", style="yellow")

    def show_announcement(words: str) -> None:  # the first comes once environment and model are found
        while opening:
            console.print(opening.pop(0))
        while likely_mistakes:
            warn(likely_mistakes.pop(0))
        console.print(f"{words} ...")

    resumed = None
    with (
        announced_by(show_announcement),
        build(recipe, tokenizer_folder=tokenizer_of(run_dir), on_warning=warn) as parts,
    ):
        recipe = parts.recipe  # the first process's, with the folder that it has named
        assert recipe.run_dir is not None, "see `with_run_dir`"
        if folder and _is_done(console, folder, recipe):
            return TrainedRun(folder.path)
        warnings = list(parts.warnings)
        for warning in warnings if is_main else ():
            warn(warning)
        with progress(console, verbose=verbose) as show:

            def on_progress(phase: Any, step: int, total: int, metrics: dict[str, float]) -> None:
                if phase == "evaluation":
                    console.print("\n".join(evaluation_lines(metrics)))
                    return
                show(phase, step, total, metrics)
                if on_step is not None and phase == "training":
                    on_step(dict(metrics))

            try:
                loop.train(parts, folder, on_progress=on_progress)
            except CollapsedError as collapsed:
                resumed, words = go_back(recipe, RunFolder(recipe.run_dir), collapsed)
    if resumed is not None:
        if is_main:
            warn(words)
        return _run(resumed, resumed.run_dir, console=console, on_step=on_step, is_main=is_main, verbose=verbose)
    print_end(console, RunFolder(recipe.run_dir), recipe)
    return TrainedRun(recipe.run_dir)


def _plan_table(recipe: Recipe) -> Table:
    table = Table(title=f"{recipe.player_id}, seed {recipe.seed}", title_justify="left", show_header=False, box=None)
    for name, value in plan(recipe).items():
        table.add_row(name, value)
    return table


def _is_done(console: Console, folder: RunFolder, recipe: Recipe) -> bool:
    """Say so where a run has no step left."""
    if newest_step(folder.checkpoints) != recipe.train.steps:
        return False
    print_end(console, folder, recipe)
    console.print(f"all {recipe.train.steps} steps are done; resume with a larger --train.steps")
    return True


def _launch(
    target: Target,
    changes: dict[str, Any],
    overrides: Sequence[str],
    *,
    processes: int,
    on_step: OnStep | None,
    quiet: bool,
) -> TrainedRun:
    """Train as several processes, as `agentrl launch` does."""
    if on_step is not None:
        raise ConfigError(
            "on_step: a function of this process is not called in several; leave out on_step, or processes"
        )
    recipe, run_dir = load(target, overrides, changes=changes)
    recipe = with_run_dir(recipe, run_dir, name=name_of(target, recipe))
    with tempfile.TemporaryDirectory(prefix="agentrl-launch-") as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(dump_yaml(recipe.model_dump(mode="json")), encoding="utf-8")
        # The fields that changed of a run's recipe are options; a new one is whole in its file.
        options = [*(f"--{name}={json.dumps(value)}" for name, value in changes.items()), *overrides]
        where = [str(run_dir), *options] if run_dir else [str(file)]
        how = ["--processes", str(processes), *(["--quiet"] if quiet else [])]
        command = [sys.executable, "-m", "agentrl.cli.attached", "launch", *how, *where]
        paths = os.pathsep.join([sys.path[0], *filter(None, [os.environ.get("PYTHONPATH")])])  # where the script lies
        environment = {**os.environ, "PYTHONPATH": paths}
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True) as launcher:
            # It is interrupted when its standard input ends: by what follows, or with this process, however that ends.
            try:
                status = launcher.wait()
            except KeyboardInterrupt:
                launcher.communicate()
                raise
    if status == USER_MISTAKE:
        raise UserError("the ranks ended with what is printed above")
    if status:
        raise TrainingError(f"the processes ended with exit status {status}; what they printed is above")
    assert recipe.run_dir is not None, "it was named above"
    return TrainedRun(recipe.run_dir)
