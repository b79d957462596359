"""`agentrl compare` and `agentrl sweep`."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.api.target import find
from agentrl.cli.commands import OVERRIDING, Commands
from agentrl.errors import ConfigError, TrainingError
from agentrl.report.terminal import Console

if TYPE_CHECKING:
    from agentrl.compare.comparison import Comparison
    from agentrl.compare.runner import Arm, PlannedRun

_FOLDER = Path("runs") / "compare"


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    comparing = commands.add(
        "compare",
        _compare,
        "Compare recipes over seeds: train what is missing, then print differences with intervals. Or compare runs that are "
        f"there. {OVERRIDING}",
        overrides=True,
    )
    comparing.add_argument(
        "targets",
        type=Path,
        nargs="+",
        metavar="RECIPE|RUN",
        help="recipes, the first of which the others are compared with; or folders of runs",
    )
    comparing.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="FIELD=A,B",
        help="compare values of a field: credit.scheme=uniform,gigpo",
    )
    comparing.add_argument("--control", action="store_true", help="train each recipe with shuffled credit too")
    comparing.add_argument("--threshold", type=float, help="of the metric, for steps to it (default: halfway)")
    _add_common(comparing, seeds=4)
    sweeping = commands.add(
        "sweep",
        _sweep,
        "Train a recipe with each combination of values, and say which is best, on seeds that did not choose it. "
        + OVERRIDING,
        overrides=True,
    )
    sweeping.add_argument("targets", type=Path, nargs=1, metavar="RECIPE", help="a recipe")
    sweeping.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="FIELD=A,B",
        help="values of a field: train.learning_rate=1e-4,3e-4",
    )
    sweeping.add_argument(
        "--fresh", type=int, metavar="N", help="further seeds for the best two (default: as --seeds; 0: none)"
    )
    _add_common(sweeping, seeds=3)


def _add_common(command: argparse.ArgumentParser, *, seeds: int) -> None:
    command.add_argument(
        "--seeds", type=int, metavar="N", help=f"seeds of each recipe, from the recipe's own on (default {seeds})"
    )
    command.set_defaults(default_seeds=seeds)
    command.add_argument(
        "--jobs", type=int, metavar="N", help="runs at once (default: one for each GPU, else for each core)"
    )
    command.add_argument("--folder", type=Path, default=_FOLDER, help=f"of the runs (default: {_FOLDER})")
    command.add_argument("--metric", help="to compare by (default: eval/success, else eval/score, else eval/reward)")
    command.add_argument(
        "--effect", type=float, default=0.05, help="say how many seeds it takes to see this (default 0.05)"
    )
    command.add_argument("--html", type=Path, metavar="FILE", help="the page (default: compare.html in the folder)")
    command.add_argument("--json", action="store_true", help="print the same as data")


def _compare(options: argparse.Namespace, rest: list[str]) -> None:
    _check_numbers(options)
    options.targets = list(map(find, options.targets))
    if all(target.is_dir() for target in options.targets):
        _compare_runs(options, rest)
        return
    if folders := [target for target in options.targets if target.is_dir()]:
        raise ConfigError(f"{folders[0]} is a folder and other targets are recipes; name either runs or recipes")
    from agentrl.compare.runner import make_arms, parse_varied

    varied = parse_varied(options.vary, option="--vary")
    arms, controls = make_arms(
        options.targets, varied=varied, overrides=rest, folder=options.folder, control=options.control
    )
    if len(arms) == 1:
        raise ConfigError("one recipe is nothing to compare; name another, --vary a field, or add its --control")
    seeds = _seeds(options, arms)
    console = Console(soft_wrap=True, stderr=options.json)
    failed = _train(console, options, [arm.run(seed) for seed in seeds for arm in arms])
    comparison = _judge(options, arms, seeds, controls=controls, notes=failed)
    _show(options, [comparison], options.folder)
    if failed:
        raise TrainingError(f"{len(failed)} run{'s' if len(failed) > 1 else ''} failed; the same command tries again")


def _compare_runs(options: argparse.Namespace, rest: list[str]) -> None:
    given = [*rest, *(["--vary"] if options.vary else []), *(["--control"] if options.control else [])]
    given += ["--seeds"] if options.seeds is not None else []
    if given:
        raise ConfigError(f"{given[0]}: runs are compared as they are; name recipes to train others")
    from agentrl.compare.comparison import compare
    from agentrl.compare.curves import choose_metric, code_notes, curve_of, name_recipes, read_run

    runs = [read_run(path) for path in options.targets]
    finished = [run for run in runs if run.is_finished]
    notes = [
        f"{run.path} is left out: it is not finished (agentrl train {run.path})" for run in runs if not run.is_finished
    ]
    if not finished:
        raise ConfigError("; ".join(notes))
    notes += code_notes(finished)
    metric, names = choose_metric(finished, options.metric), name_recipes(finished)
    curves = [curve_of(run, metric=metric, recipe=names[run.identity]) for run in finished]
    comparison = compare(curves, metric=metric, threshold=options.threshold, effect=options.effect, notes=notes)
    _show(options, [comparison], Path())


def _sweep(options: argparse.Namespace, rest: list[str]) -> None:
    from agentrl.compare.curves import is_gain
    from agentrl.compare.runner import make_arms, parse_varied

    _check_numbers(options)
    if options.metric is not None and not is_gain(f"eval/{options.metric.removeprefix('eval/')}"):
        raise ConfigError(
            f"--metric: a sweep chooses the highest, and {options.metric!r} is not known to be better the higher it is; name "
            "success, score, reward, reward/NAME or pass@K"
        )
    options.targets = list(map(find, options.targets))
    varied = parse_varied(options.over, option="--over")
    arms, _ = make_arms(options.targets, varied=varied, overrides=rest, folder=options.folder, control=False)
    if len(arms) == 1:
        raise ConfigError("--over: one combination is nothing to choose from; give a field several values")
    seeds = _seeds(options, arms)
    console = Console(soft_wrap=True, stderr=options.json)
    failed = _train(console, options, [arm.run(seed) for seed in seeds for arm in arms])
    chosen = _judge(options, arms, seeds, notes=failed)
    found = [chosen]
    best, second = sorted(chosen.arms, key=lambda arm: -arm.final.mean)[:2]
    num_fresh = len(seeds) if options.fresh is None else options.fresh
    if num_fresh > 0:
        finalists = [next(arm for arm in arms if arm.name == one.name) for one in (second, best)]
        fresh = [seeds[-1] + 1 + number for number in range(num_fresh)]
        failed += (more := _train(console, options, [arm.run(seed) for seed in fresh for arm in finalists]))
        try:
            found.append(_judge(options, finalists, fresh, notes=more))
        except (ConfigError, TrainingError):
            if not more:
                raise
            found = [chosen.model_copy(update={"notes": [*more, *chosen.notes]})]
    words = f"best: {best.name}, {best.final.mean:.3f} on the seeds that chose it"
    if len(found) > 1:
        words += f" and {found[1].arms[-1].final.mean:.3f} on fresh ones, which is what to expect and to report"
    elif num_fresh > 0:
        words += "; too few fresh seeds have finished to say what to expect"
    else:
        words += (
            f". The best of {len(arms)} is partly luck, and its mean too high on these seeds (the winner's curse): "
            "report it on others (--fresh)"
        )
    _show(options, found, options.folder, words=words)
    if failed:
        raise TrainingError(f"{len(failed)} run{'s' if len(failed) > 1 else ''} failed; the same command tries again")


def _check_numbers(options: argparse.Namespace) -> None:
    if not 0 < options.effect < math.inf:
        raise ConfigError(f"--effect: expected a finite number above 0, got {options.effect:g}")
    threshold = getattr(options, "threshold", None)
    if threshold is not None and not math.isfinite(threshold):
        raise ConfigError(f"--threshold: expected a finite number, got {threshold:g}")


def _seeds(options: argparse.Namespace, arms: Sequence["Arm"]) -> list[int]:
    number = options.default_seeds if options.seeds is None else options.seeds
    if number < 1:
        raise ConfigError(f"--seeds: expected at least 1, got {number}")
    if (options.jobs or 1) < 1:
        raise ConfigError(f"--jobs: expected at least 1, got {options.jobs}")
    first = arms[0].recipe.seed
    return list(range(first, first + number))


def _train(console: Console, options: argparse.Namespace, runs: "Sequence[PlannedRun]") -> list[str]:
    """Train what is missing; return what to say of the runs that failed."""
    from agentrl.compare.runner import check_sources, default_jobs, is_done, run_missing

    check_sources(runs)
    is_cpu = all(run.arm.recipe.train.device == "cpu" for run in runs)
    missing = sum(not is_done(run) for run in runs)
    jobs = min(options.jobs or default_jobs(is_cpu=is_cpu), max(1, missing))
    if missing:
        console.print(
            f"{missing} of {len(runs)} runs to train, {jobs} at once, into {options.folder}; the same command resumes them"
        )

    def tell(run: "PlannedRun", words: str | None) -> None:
        console.print(f"{run.name}: {'done' if words is None else f'failed: {words}'}", style="red" if words else None)

    from agentrl.api.training import progress  # here: it loads torch, and every command reads this file

    with progress(console) as on_progress:
        failures = run_missing(
            runs, jobs=jobs, on_end=tell, on_progress=lambda done, total: on_progress("steps", done, total, {})
        )
    return [f"{failure.run.name} failed: {failure.words}" for failure in failures]


def _judge(
    options: argparse.Namespace,
    arms: "Sequence[Arm]",
    seeds: Sequence[int],
    *,
    controls: dict[str, str] | None = None,
    notes: Sequence[str] = (),
) -> "Comparison":
    from agentrl.compare.comparison import compare
    from agentrl.compare.curves import choose_metric, curve_of

    found = [(arm.name, arm.run(seed).recorded()) for arm in arms for seed in seeds]
    finished = [(name, run) for name, run in found if run is not None and run.is_finished]
    if not finished or (notes and len({name for name, _ in finished}) < 2):  # too few to compare, since others failed
        raise TrainingError("; ".join(notes) or "no run has finished")
    metric = choose_metric([run for _, run in finished], options.metric)
    curves = [curve_of(run, metric=metric, recipe=name) for name, run in finished]
    if (first := arms[0].name) not in {curve.recipe for curve in curves}:
        notes = [
            *notes,
            f"{first}, with which the others are compared, has no finished run: the next one takes its place",
        ]
    threshold = getattr(options, "threshold", None)
    try:
        return compare(
            curves, metric=metric, controls=controls, threshold=threshold, effect=options.effect, notes=notes
        )
    except ConfigError as error:
        if not notes:
            raise
        raise TrainingError("; ".join([*notes, str(error)])) from error


def _show(
    options: argparse.Namespace, comparisons: "Sequence[Comparison]", folder: Path, *, words: str | None = None
) -> None:
    import json

    from agentrl.compare.page import lines, write_comparison

    page = write_comparison(options.html or folder / "compare.html", comparisons, words=words)
    if options.json:
        data = {
            "words": words,
            "comparisons": [each.model_dump(mode="json") for each in comparisons],
            "page": str(page),
        }
        Console(soft_wrap=True).print(json.dumps(data, indent=2), highlight=False, markup=False)
        return
    console = Console()
    for number, comparison in enumerate(comparisons):
        if number:
            console.print("\nOn fresh seeds, the best two:")
        for line in lines(comparison):
            console.print(line)
    if words:
        console.print(words)
    console.print(f"page: {page}")
