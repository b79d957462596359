"""Evaluation, from a script, a notebook or the command line: of weights, or of a model behind an endpoint.

Nothing here loads torch before weights are evaluated.
"""

import asyncio
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from agentrl.api.target import (
    Target,
    find,
    load_to_play,
    look_for_modules_here,
    sections,
    shipped,
    tokenizer_of,
    untrained,
    with_tasks,
    without_running_loop,
)
from agentrl.credit import Credit
from agentrl.data.files import absolute, keep_process, parse_yaml, read_bytes
from agentrl.errors import ConfigError, EnvironmentFailure
from agentrl.report.folder import EvaluationNote, RunFolder
from agentrl.report.records import pieces_of, records
from agentrl.report.statistics import settings_of
from agentrl.report.terminal import Console, announce
from agentrl.rollout.endpoint import ChatModel, Playing, evaluate_endpoint
from agentrl.rollout.evaluation import Evaluation
from agentrl.types import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from agentrl.recipe.config import Recipe
    from agentrl.recipe.sections import ModelSection, Sections


@keep_process()
def evaluate(
    target: Target = None,
    *,
    env: Any = None,
    agent: Any = None,
    tasks: Any = None,
    model: "str | Path | ModelSection | Mapping[str, Any] | None" = None,
    endpoint: str | None = None,
    api_key_env: str = "OPENAI_API_KEY",
    prices: tuple[float, float] | None = None,
    dialogues: str | Path | None = None,
    overrides: Sequence[str] = (),
    **others: "Unpack[Sections]",
) -> Evaluation:
    """Play the evaluation tasks; return the metrics and every episode, group by group.

    Args:
        target: a run or its folder, whose newest weights play; or a recipe, whose model plays as it is.
        env: as in `agentrl.train`: the environment to play in, whatever the run was trained or is evaluated in.
        agent: as in `agentrl.train`.
        tasks: as in `agentrl.train`.
        model: as in `agentrl.train`; with `endpoint`, its name there.
        endpoint: of an OpenAI-compatible server, such as `http://127.0.0.1:8000/v1`; no weights and no torch are loaded then.
            `rollout.max_live_episodes` are played at once. An episode that the endpoint does not answer is counted in
            `failed`, and is in no mean.
        api_key_env: environment variable that holds the endpoint's key; it need not be set where none is asked for.
        prices: of a million tokens that the endpoint reads, and of a million that it writes: `cost` is then a metric.
        dialogues: a new file for the episodes, a line each (`agentrl show FILE`). None: those of a run are in its folder.
        overrides: options as on the command line.
        **others: further sections, with only what changes: `evaluation={"num_tasks": 512, "samples": 4}`.

    Raises:
        UserError: for what cannot be carried out, naming the field and the fix; also if the endpoint answers nothing.
    """
    look_for_modules_here(target)
    agent = with_tasks(agent, tasks)
    console = Console(soft_wrap=True)
    if endpoint is not None:
        if not isinstance(model, str):
            raise ConfigError("evaluate: with an endpoint, give model: its name there, as a text")
        served = ChatModel(url=endpoint, name=model, api_key_env=api_key_env, prices=prices)
        playing = to_play_at_endpoint(target, overrides, changes=sections({"env": env, "agent": agent, **others}))
        keep = dialogue_writer(None if dialogues is None else Path(dialogues))
        with without_running_loop():
            return joined(evaluated_at_endpoint(playing, served, console=console, on_end=keep))
    recipe, run_dir = load_to_play(
        target, overrides, changes=sections({"env": env, "agent": agent, "model": model, **others})
    )
    with without_running_loop():
        found, _ = evaluated(recipe, run_dir, console=console, dialogues=None if dialogues is None else Path(dialogues))
    return joined(found)


def joined(found: Mapping[str, Evaluation]) -> Evaluation:
    """Return the evaluations in several environments as one."""
    return Evaluation(
        metrics={
            f"{prefix.removeprefix('eval/')}{name}": value
            for prefix, one in found.items()
            for name, value in one.metrics.items()
        },
        groups=[group for one in found.values() for group in one.groups],
        panel=tuple(task for one in found.values() for task in one.panel),
    )


def to_play_at_endpoint(target: Target, overrides: Sequence[str] = (), *, changes: Mapping[str, Any]) -> Playing:
    """Return what of a recipe, a run or an environment of this name is played at an endpoint, which needs no model of it.

    An environment that is asked for is played in, and none of the recipe's `evaluation.env`.

    Raises:
        ConfigError: for a target that is none of these, and for an option that an endpoint does not read.
    """
    asked = _options(overrides)
    target_env: dict[str, Any] = {}
    base: Any = {}
    if isinstance(target, Mapping):
        base = sections(target)
    elif isinstance(target, str | os.PathLike):
        path = Path(target)
        if path.is_dir() and not (path / "config.yaml").is_file():
            raise ConfigError(f"{path} is a folder, and none of a run")
        if path.exists() or str(path) in shipped() or path.suffix in (".yaml", ".yml"):
            file = path / "config.yaml" if path.is_dir() else find(path)
            base = parse_yaml(read_bytes(file, fix="name another"), where=f"the recipe {file}")
        else:
            target_env = {"env": {"id": str(target)}}
    elif target is not None:
        base = target.model_dump(mode="json")
    if not isinstance(base, Mapping):
        raise ConfigError(f"the recipe {target} must be a mapping of sections, got {type(base).__name__}")
    over = [changes, asked]
    if any("env" in each for each in over) and not any("env" in each.get("evaluation", {}) for each in over):
        base = {**base, "evaluation": {**(base.get("evaluation") or {}), "env": {}}}
    return Playing.read(base, target_env, *over)


def _options(arguments: Sequence[str]) -> dict[str, Any]:
    """Return options such as `--evaluation.num_tasks 8` as sections; values are YAML."""
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        section = name.removeprefix("--").split(".")[0]
        if not name.startswith("--") or section not in Playing.model_fields:
            known = ", ".join(f"--{field}" for field in Playing.model_fields)
            raise ConfigError(f"{name}: with an endpoint, an option is a field of {known}")
        if not has_value:
            if not rest:
                raise ConfigError(f"{name}: needs a value")
            value = rest.pop(0)
        nested = found
        *path, last = name.removeprefix("--").split(".")
        for part in path:
            nested = nested.setdefault(part, {})
        nested[last] = parse_yaml(value, where=f"{name}: {value[:80]!r}")
    return found


def evaluated_at_endpoint(
    playing: Playing,
    model: ChatModel,
    *,
    console: Console,
    on_end: Callable[[Trajectory], object] = lambda _: None,
    first: int = 0,
) -> dict[str, Evaluation]:
    """Play the evaluation tasks with a model behind an endpoint; return the figures, by the prefix of their metrics.

    Raises:
        UserError: if no episode at all could be played, with the most frequent reason.
    """
    found = asyncio.run(
        evaluate_endpoint(
            playing,
            model,
            first=first,
            on_end=on_end,
            on_warning=lambda words: console.print(f"warning: {words}", style="yellow"),
        )
    )
    everyone = [t for each in found.values() for group in each.groups for t in group.trajectories]
    reasons = Counter(t.error for t in everyone if t.stop_reason.is_fault or not t.turns)
    if (num := sum(reasons.values())) == 0:
        return found
    reason, often = reasons.most_common(1)[0]
    if num == len(everyone):
        raise EnvironmentFailure(f"no episode could be played: {reason}")
    console.print(
        f"warning: {num} of {len(everyone)} episodes failed and are in no mean; {often} of them: {reason}",
        style="yellow",
    )
    return found


def dialogue_writer(
    path: Path | None, *, step: int = 0, piece: Callable[[int], str] = str
) -> Callable[[Trajectory], None]:
    """Return what appends an episode to a new file, at once, so that an interruption loses none. None: it does nothing.

    Raises:
        ConfigError: if something is there already.
    """
    if path is None:
        return lambda _: None
    path = absolute(path)
    if path.exists():
        raise ConfigError(f"{path} is there already; name another file")

    def keep(trajectory: Trajectory) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        group = TrajectoryGroup(group_id=trajectory.group_id, trajectories=(trajectory,))
        with path.open("a", encoding="utf-8", newline="\n") as file:
            for record in records([group], [[Credit.excluded(trajectory)]], step=step, piece=piece):
                file.write(record.model_dump_json(exclude_defaults=True) + "\n")

    return keep


def new_dialogue_file(*names: str) -> Path:
    """Return a file in `evaluations/` that is not there yet, named after an environment and a model."""
    stem = "-".join(re.sub(r"[^\w.]+", "-", name.rpartition(":")[2]).strip("-.") for name in names)
    paths = (Path("evaluations") / f"{stem}{'' if number == 1 else f'-{number}'}.jsonl" for number in count(1))
    return next(path for path in paths if not path.exists())


def evaluated(
    recipe: "Recipe",
    run_dir: Path | None,
    *,
    console: Console,
    keep: bool = True,
    dialogues: Path | None = None,
    first: int = 0,
) -> tuple[dict[str, Evaluation], Path | None]:
    """Play the evaluation tasks of each environment.

    Returns: the figures, by the prefix of its metrics; and the file that holds the rollouts. None: nothing is kept, or the disk
    is full, which is logged.

    Args:
        recipe: names model, environments and tasks.
        run_dir: of the run whose newest weights play; None: the recipe's model plays as it is.
        console: prints warnings.
        keep: write the rollouts into the run's folder.
        dialogues: a new file for them, in place of one in the run's folder. None: without a run they are not kept.
        first: of a table, which task comes first.
    """
    from agentrl.run.build import build
    from agentrl.run.checkpoint import load_weights
    from agentrl.run.evaluate import evaluate as evaluate_parts
    from agentrl.run.start import reuse_environments

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
        piece = pieces_of(parts.tokenizer)
        if keep and dialogues is not None:
            keep_one = dialogue_writer(dialogues, step=step, piece=piece)
            for trajectory in (t for each in found.values() for group in each.groups for t in group.trajectories):
                keep_one(trajectory)
            return found, dialogues
        if folder is None or not keep:
            return found, None
        note = EvaluationNote(step=step, settings=settings_of(recipe.model_dump(mode="json")))
        return found, _kept(found, folder, note, piece, warn)


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
