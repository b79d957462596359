"""Runs of a comparison: recipes, times the fields that vary, times seeds, each in a folder named by its recipe.

Missing runs are started, each in a process of its own, as many at once as there are cores or GPUs.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import product
from pathlib import Path
from typing import IO, Any

import yaml

from agentrl.compare.curves import RecordedRun, identity, read_run
from agentrl.data.files import check_links, dump_yaml, write_whole
from agentrl.errors import ConfigError
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.report.folder import RunFolder
from agentrl.report.sources import differing, read_sources, sources
from agentrl.run.launch import USER_MISTAKE

_EVALUATIONS = 10
"""Evaluations of a run whose recipe asks for none on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A recipe of the comparison."""

    name: str
    recipe: Recipe
    """With the first of the seeds."""
    folder: Path
    """Folder of its runs; it is named by all of the recipe, so that the same recipe finds its runs again."""

    def run(self, seed: int) -> "PlannedRun":
        """Return the run of a seed."""
        return PlannedRun(arm=self, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run of the comparison, which may be there already."""

    arm: Arm
    seed: int

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self.arm.folder / f"seed-{self.seed}"

    @property
    def name(self) -> str:
        """Return its name."""
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def has_begun(self) -> bool:
        """Whether there is something to resume."""
        return (self.folder / "config.yaml").is_file()

    def recorded(self) -> RecordedRun | None:
        """Return what it has written so far. None: nothing, or what is damaged, which resuming it reports."""
        try:
            return read_run(self.folder) if self.has_begun else None
        except ConfigError:
            return None

    def arguments(self) -> list[str]:
        """Return what begins or resumes it, after `agentrl`."""
        if self.has_begun:
            return ["train", str(self.folder)]
        return ["train", str(self.arm.folder / "recipe.yaml"), "--seed", str(self.seed), "--run_dir", str(self.folder)]


def make_arms(
    paths: Sequence[Path], *, varied: Mapping[str, Sequence[str]], overrides: Sequence[str], folder: Path, control: bool
) -> tuple[list[Arm], dict[str, str]]:
    """Return the recipes to compare, and of each one that has a control, the control's name.

    Raises:
        ConfigError: for a recipe that is wrong, and for two that say the same.
    """
    if any(option.partition("=")[0] == "--run_dir" for option in overrides):
        raise ConfigError("--run_dir: each run has a folder of its own; --folder says where")
    arms = []
    stems = [path.stem for path in paths]
    for path, values in product(paths, product(*varied.values())):
        given = [f"--{field}={value}" for field, value in zip(varied, values, strict=True)]
        stem = path.stem if stems.count(path.stem) == 1 else str(path)
        name = _name(stem if len(paths) > 1 else "", dict(zip(varied, values, strict=True)))
        arms.append(_arm(name, load_recipe(path, [*overrides, *given]), folder, path.stem))
    panel_seed = arms[0].recipe.seed
    arms = [
        _arm(arm.name, _measured(arm.recipe, panel_seed), folder, arm.folder.name.rpartition("-")[0]) for arm in arms
    ]
    controls = {}
    for arm in list(arms) if control else []:
        of = {key: value for key, value in arm.recipe.credit.items() if key != "fallback"}
        recipe = arm.recipe.model_copy(update={"credit": {"scheme": "shuffled", "of": of}})
        controls[arm.name] = f"{arm.name}, shuffled"
        arms.append(_arm(controls[arm.name], recipe, folder, arm.folder.name.rpartition("-")[0]))
    for index, arm in enumerate(arms):
        for other in arms[:index]:
            if arm.folder == other.folder:
                raise ConfigError(f"{other.name} and {arm.name} are the same recipe; there is nothing to compare")
    return arms, controls


def check_sources(runs: Sequence[PlannedRun]) -> None:
    """Check that what has begun was trained on the code that is there now, and that all is written where it stands.

    Raises:
        ConfigError: naming what has changed since, or a link out of a recipe's folder, and what to do.
    """
    changed: dict[str, set[str]] = {}
    for folder in {run.arm.folder for run in runs}:
        check_links(folder, what="the recipe's folder")
    for run in runs:
        if run.has_begun:
            began, now = read_sources(RunFolder.open(run.folder)), sources(run.arm.recipe.model_dump(mode="json"))
            for module in differing(began, now):
                changed.setdefault(module, set()).add(str(run.arm.folder))
    if changed:
        module, folders = next(iter(changed.items()))
        raise ConfigError(
            f"the file of the module {module!r} has changed since runs in {', '.join(sorted(folders))} began: delete these to "
            "train them again, put the file back, or train elsewhere (--folder)"
        )


def parse_varied(given: Sequence[str], *, option: str) -> dict[str, list[str]]:
    """Read `FIELD=VALUE,VALUE` pairs; values are as in YAML, so that a list stands in brackets.

    Raises:
        ConfigError: for anything else.
    """
    found: dict[str, list[str]] = {}
    for text in given:
        field, has_values, values = text.partition("=")
        try:
            node = yaml.compose(f"[{values}]")
        except yaml.YAMLError:
            node = None
        if not (has_values and field and isinstance(node, yaml.SequenceNode) and node.value) or field in found:
            raise ConfigError(f"{option}: expected each field once, as FIELD=VALUE,VALUE, got {text!r}")
        found[field] = [f"[{values}]"[item.start_mark.index : item.end_mark.index] for item in node.value]
    return found


def write_recipe(arm: Arm) -> None:
    """Write the recipe that the runs begin with."""
    arm.folder.mkdir(parents=True, exist_ok=True)
    said: dict[str, Any] = arm.recipe.model_dump(mode="json", exclude={"run_dir"})
    write_whole(arm.folder / "recipe.yaml", dump_yaml(said))


def _arm(name: str, recipe: Recipe, folder: Path, stem: str) -> Arm:
    return Arm(name=name, recipe=recipe, folder=folder / f"{stem}-{identity(recipe)}")


def _measured(recipe: Recipe, panel_seed: int) -> Recipe:
    """Return the recipe with evaluations on its way, on the tasks that all recipes and seeds share."""
    evaluation = recipe.evaluation
    update: dict[str, Any] = {}
    if evaluation.seed is None:
        update["seed"] = panel_seed
    if not evaluation.every:
        update["every"] = max(1, recipe.train.steps // _EVALUATIONS)
    return recipe.model_copy(update={"evaluation": evaluation.model_copy(update=update)})


def _name(stem: str, varied: Mapping[str, str]) -> str:
    """Name a recipe by its file, if there are several, and by what varies."""
    if len(varied) == 1 and not stem:
        return re.sub(r"\s+", " ", next(iter(varied.values())))
    return ", ".join(
        [*([stem] if stem else []), *(f"{field.rpartition('.')[2]}={value}" for field, value in varied.items())]
    )


_POLL_S = 0.2
_END_S = 60.0
"""Seconds that a run that is interrupted may take to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A run that ended before its last step, or was left out."""

    run: PlannedRun
    words: str


def default_jobs(*, is_cpu: bool) -> int:
    """Return how many runs to do at once: one for each GPU, else one for each core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if is_cpu else len(visible_gpus()) or cores


def is_done(run: PlannedRun) -> bool:
    """Return whether nothing of a run is missing."""
    recorded = run.recorded()
    return recorded is not None and recorded.is_finished


def run_missing(
    runs: Sequence[PlannedRun],
    *,
    jobs: int,
    on_progress: Callable[[int, int], object] = lambda *_: None,
    on_end: Callable[[PlannedRun, str | None], object] = lambda *_: None,
) -> list[Failure]:
    """Begin or resume each run that is not finished; one that fails is reported, and the others continue.

    If a mistake ends a run before it has begun, the recipe's waiting seeds are left out, and reported: they would meet it.
    What interrupts this interrupts the runs, which the next call resumes from their checkpoints.

    Args:
        runs: of the comparison, those of one seed beside one another.
        jobs: how many at once.
        on_progress: gets the steps done, and those in all, now and then.
        on_end: gets each run that ends or is left out, with the reason of a failure.
    """
    waiting = [run for run in runs if not is_done(run)]
    for arm in {run.arm.folder: run.arm for run in waiting}.values():
        write_recipe(arm)
    total = sum(run.arm.recipe.train.steps for run in runs)
    failures: list[Failure] = []
    active: dict[int, _Process] = {}
    told = -1
    try:
        while waiting or active:
            for slot in range(jobs):
                if slot not in active and waiting:
                    active[slot] = _Process(waiting.pop(0), slot=slot, jobs=jobs)
            time.sleep(_POLL_S)
            if (done := sum(map(_steps_done, runs))) != told:
                on_progress(done, total)
                told = done
            for slot, process in list(active.items()):
                if (status := process.poll()) is None:
                    continue
                del active[slot]
                ended = process.run
                words = None if status == 0 and is_done(ended) else process.last_words(status)
                on_end(ended, words)
                if words is None:
                    continue
                failures.append(Failure(run=ended, words=words))
                if status == USER_MISTAKE and not ended.has_begun:
                    words = f"left out, as seed {ended.seed} could not begin"
                    for run in [run for run in waiting if run.arm is ended.arm]:
                        waiting.remove(run)
                        on_end(run, words)
                        failures.append(Failure(run=run, words=words))
    finally:
        for process in active.values():
            process.interrupt()
        for process in active.values():
            process.end()
    return failures


class _Process:
    """A run under way. It ends when its standard input does, that is, with this process, however that ends."""

    def __init__(self, run: PlannedRun, *, slot: int, jobs: int) -> None:
        self.run = run
        self._log = run.arm.folder / f"seed-{run.seed}.log"
        with self._log.open("ab") as log:
            self._log_began = log.tell()
            self._process = start(run.arguments(), log=log, environment=_environment(slot, jobs))

    def poll(self) -> int | None:
        """Return its exit status. None: it runs."""
        status: int | None = self._process.poll()
        return status

    def interrupt(self) -> None:
        """Let it end as Ctrl-C would."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def end(self) -> None:
        """Wait for its end, and after a while end it."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_words(self, status: int) -> str:
        """Return why it failed."""
        lines = self._log.read_bytes()[self._log_began :].decode(errors="replace").strip().splitlines()
        told = [line for line in lines if line.startswith("agentrl: ")]
        words = (told or lines or [f"it ended with status {status}"])[-1].removeprefix("agentrl: ")
        return f"{words} (log: {self._log})"


def start(arguments: Sequence[str], *, log: IO[bytes], environment: dict[str, str]) -> Any:
    """Start `agentrl ...` as a process in a session of its own, which a Ctrl-C in the terminal does not reach twice."""
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli.attached", *arguments],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def _environment(slot: int, jobs: int) -> dict[str, str]:
    """Divide cores and GPUs among the runs at once."""
    threads = max(1, default_jobs(is_cpu=True) // jobs)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    if gpus := visible_gpus():
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return environment


def visible_gpus() -> list[str]:
    """List the GPUs that are ours, without the seconds that asking torch takes."""
    if (ours := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in ours.split(",") if name]
    return [str(number) for number in range(len(glob("/dev/nvidia[0-9]*")))]


def _steps_done(run: PlannedRun) -> int:
    try:
        return RunFolder(run.folder).last_step()
    except ConfigError:  # what is damaged is reported by the run
        return 0
