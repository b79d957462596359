"""Checkpoints of a run: written, read back, refused if they do not fit the recipe or the tasks.

Hashes in the run's folder prove that its tasks stay the same. After a collapse the run may go back to an earlier checkpoint
(`train.on_collapse: rewind`).
"""

import hashlib
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter
from safetensors import SafetensorError

from agentrl.data.files import damage, read_json, rename, write_whole
from agentrl.data.plain import line_of
from agentrl.distributed.checkpoints import NAME, by_step, checkpoint_errors, checkpoints, step_of, write_folder
from agentrl.distributed.processes import barrier, from_rank_zero, is_main, num_processes, process_index
from agentrl.errors import ConfigError, TrainingError
from agentrl.learn.health import COLLAPSED_STEPS
from agentrl.recipe.config import Recipe
from agentrl.recipe.plugin import fixed
from agentrl.report.folder import RunFolder, Told
from agentrl.report.statistics import best_step
from agentrl.report.terminal import read_panels
from agentrl.rollout import Tasks
from agentrl.run.build import Parts
from agentrl.types import Need, NumTasks, TaskHashes

_HASHES = TypeAdapter(TaskHashes)


def keep_hashes(tasks: Tasks, folder: RunFolder) -> None:
    """Write the hashes of the tasks with which a run begins, if the environment provides any."""
    if any(tasks.hashes):
        write_whole(folder.tasks, json.dumps(tasks.hashes._asdict()))


def check_hashes(tasks: Tasks, folder: RunFolder) -> None:
    """Compare the tasks with those of the beginning, if there are hashes of both.

    Raises:
        ConfigError: with the split whose tasks have changed.
    """
    if not folder.tasks.is_file():
        return
    before = read_json(folder.tasks, _HASHES, fix="delete it, and nothing is compared")
    for split, had, has in zip(TaskHashes._fields, before, tasks.hashes, strict=True):
        if None not in (had, has) and had != has:
            raise ConfigError(
                f"env: the tasks of the {split} split are not those with which {folder.path} began; resume with that table, or "
                "begin another run"
            )


_STATE = "agentrl.json"
_PLAYED = ("env", "chat", "rollout")
"""Sections that decide what is played, and how."""


class RunState(BaseModel):
    """State of a run beside weights and moments: in a file for each rank."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    finished_steps: NonNegativeInt
    num_processes: PositiveInt
    """Ranks that train the run."""
    pool: dict[str, Any]
    """State of this rank's stream of tasks."""
    settings: str
    """Hash of the recipe's fields that are not marked `MayChange`."""
    played: str
    """Hash of those fields that decide what is played and how."""
    num_tasks: NumTasks
    """Number of the environment's tasks: their order follows from it."""


def save(parts: Parts, folder: RunFolder, step: int) -> None:
    """Write the checkpoint of a step and drop all but the newest ones and the best; a crash while writing leaves them all."""
    parts.runner.run(parts.pool.pause())  # no deadline shall pass while the loop stands still

    def write(path: Path) -> None:
        parts.learner.state.save(path)
        parts.signals.save(path)
        state = RunState(
            finished_steps=step,
            num_processes=num_processes(),
            pool=parts.pool.state_dict(),
            settings=_settings(parts.recipe),
            played=_settings(parts.recipe, _PLAYED),
            num_tasks=parts.pool.tasks.num,
        )
        (path / _state_file()).write_text(state.model_dump_json(), encoding="utf-8")

    write_folder(folder.checkpoints / NAME.format(f"{step:06d}"), write, is_sealed=True)
    if is_main():
        kept = by_step(folder.checkpoints)
        best = best_step(folder.metrics(), among=kept)
        for old in list(kept)[: -parts.recipe.train.keep_last]:
            if old != best:
                shutil.rmtree(kept[old])
    parts.pool.drop_old_journal()


def resume(parts: Parts, folder: RunFolder) -> tuple[int, bool]:
    """Restore policy, engine and pool from a run's newest checkpoint.

    Returns: the number of its finished steps; whether the recipe has changed what is played since.

    Raises:
        ConfigError: when it has no checkpoint, none that fits the recipe, or a file that is damaged.
    """
    newest = newest_checkpoint(folder)
    read_panels(folder)  # the next evaluation needs them, and would refuse after steps
    if parts.learner.state.reference is not None:
        _load_reference(parts, folder)
    finished_steps = load_checkpoint(parts, newest)
    parts.weight_sync.verify_and_push(finished_steps)
    if parts.pool.recover(ignore=has_changed(parts.recipe, folder), settings=_settings(parts.recipe)) and is_main():
        parts.on_warning("the recipe has changed: what was sampled since the last checkpoint is sampled again")
    return finished_steps, _read_state(newest / _STATE).played != _settings(parts.recipe, _PLAYED)


def load_checkpoint(parts: Parts, path: Path) -> int:
    """Restore policy and pool from a checkpoint; return the number of finished steps.

    Raises:
        ConfigError: when the checkpoint does not fit the recipe.
    """
    with checkpoint_errors(path):
        check_processes(path, num_processes())
        parts.learner.state.load(path)
        parts.signals.load(path, device=parts.learner.state.device)
        state = _read_state(path / _state_file())
        if state.finished_steps != step_of(path):
            raise ConfigError(
                f"the checkpoint {path} was written after step {state.finished_steps}; give it its name back, or delete it"
            )
        _check_num_tasks(before=state.num_tasks, now=parts.pool.tasks.num)
        parts.pool.load_state_dict(state.pool)
    return state.finished_steps


def _check_num_tasks(*, before: NumTasks, now: NumTasks) -> None:
    for split, had, has in zip(NumTasks._fields, before, now, strict=True):
        if had != has:
            words = [f"{num} tasks" if num is not None else "tasks without end" for num in (had, has)]
            raise ConfigError(
                f"env: the run began with {words[0]} in the {split} split, and the environment has {words[1]} now; resume with "
                "the tasks that it began with, or begin another run"
            )


def load_weights(parts: Parts, folder: RunFolder) -> int:
    """Restore the policy alone from the newest checkpoint of a run; return its step.

    Raises:
        ConfigError: when it has none, or none that fits the recipe.
    """
    newest = newest_checkpoint(folder)
    with checkpoint_errors(newest):
        parts.learner.state.load_weights(newest)
    return step_of(newest)


def newest_checkpoint(folder: RunFolder) -> Path:
    """Return the newest checkpoint of a run.

    Raises:
        ConfigError: when it has none.
    """
    if not (found := checkpoints(folder.checkpoints)):
        raise ConfigError(f"{folder.path} has no checkpoint yet; resume the run: agentrl train {folder.path}")
    return found[-1]


def checkpoint_at(folder: RunFolder, step: int | None) -> Path:
    """Return the checkpoint of a step. None: the newest.

    Raises:
        ConfigError: when there is none.
    """
    newest, found = newest_checkpoint(folder), by_step(folder.checkpoints)
    if step is None:
        return newest
    if step not in found:
        raise ConfigError(f"{folder.path} has no checkpoint of step {step}; it has {', '.join(map(str, found))}")
    return found[step]


def check_processes(path: Path, count: int) -> None:
    """Check that a run is resumed with as many ranks as wrote a checkpoint.

    Raises:
        ConfigError: with their number.
    """
    found = _read_state(path / _STATE).num_processes
    if found != count:
        how = "`agentrl train`" if found == 1 else f"`agentrl launch --processes {found}`"
        raise ConfigError(f"the run was trained by {found} processes, not {count}; resume it with {how}")


def has_changed(recipe: Recipe, folder: RunFolder) -> bool:
    """Return whether a field that is not marked `MayChange` has changed since the newest checkpoint, here or in config.yaml."""
    return _read_state(newest_checkpoint(folder) / _STATE).settings != _settings(recipe)


def _settings(recipe: Recipe, sections: Collection[str] | None = None) -> str:
    """Return a hash of the fields that are not marked `MayChange`, of all sections or of some."""
    given = {name: section for name, section in fixed(recipe).items() if sections is None or name in sections}
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()


def _load_reference(parts: Parts, folder: RunFolder) -> None:
    if not folder.reference.is_dir():
        recipe = parts.recipe
        asking = f"loss.kl_coefficient: {recipe.loss.kl_coefficient:g}"
        if Need.REFERENCE_LOGPROBS in parts.credit.requirements():
            asking = f"credit.scheme: {recipe.credit['scheme']!r}"
        raise ConfigError(
            f"{asking} needs the policy with which {folder.path} began, and that run kept none; begin a new run with it"
        )
    what = damage(folder.reference)
    if what is None:
        try:
            parts.learner.state.load_reference(folder.reference)
        except ConfigError:
            raise
        except (SafetensorError, RuntimeError, KeyError, ValueError) as error:  # weights are sealed by their size alone
            what = line_of(error)
    if what is not None:
        raise ConfigError(f"the policy with which this run began is damaged ({what}); begin a new run")


def _read_state(path: Path) -> RunState:
    return read_json(
        path, TypeAdapter(RunState), fix="delete this checkpoint, and the run is resumed from an older one"
    )


def _state_file() -> str:
    """Return the name of this rank's own file in a checkpoint."""
    return _STATE if is_main() else f"agentrl-{process_index()}.json"


class _Note(BaseModel):
    """Note of the step that a run goes back to: in its folder until it has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    learning_rate: float
    """Learning rate from then on. Once the run's recipe has it, the run has gone back, whatever is left to be dropped."""
    words: str


class CollapsedError(TrainingError):
    """The policy has collapsed, and the recipe asks for going back."""

    def __init__(self, step: int, words: str, *, first: int) -> None:
        """Make the error of a step, with its message and the first step of the collapse."""
        super().__init__(f"step {step}: {words}")
        self.step, self.first = step, first


def go_back(recipe: Recipe, folder: RunFolder, collapsed: CollapsedError) -> tuple[Recipe, str]:
    """Drop the checkpoints since a policy began to collapse; return the recipe to resume with, and a message.

    The recipe has half the learning rate, and ends the run at the next collapse. Called on every rank. A run that is killed
    meanwhile goes back when it is resumed: its recipe is already changed (`finish_going_back`), or its policy collapses again.

    Raises:
        TrainingError: if no earlier checkpoint is left.
    """
    # Collapsed weights sampled the first step that showed it: the weights before it, or ones older by the bound.
    bound = recipe.rollout.staleness_bound
    steps = from_rank_zero(lambda: list(by_step(folder.checkpoints)))
    good = [step for step in steps if step <= collapsed.first - 2 - bound]
    # A slow collapse may have begun before all checkpoints: then the oldest one before its last steps.
    good = good or [step for step in steps if step <= collapsed.step - COLLAPSED_STEPS - 1 - bound][:1]
    if not good:
        raise TrainingError(
            f"{collapsed}. No checkpoint from before is left to go back to: raise train.checkpoint_every or "
            "train.keep_last, and begin again"
        )
    rate = recipe.train.learning_rate / 2
    words = f"{collapsed}. The run goes back to step {good[-1]}, with half the learning rate, {rate:g}"
    changed = {"learning_rate": rate, "on_collapse": "stop"}
    if is_main():
        write_whole(folder.going_back, _Note(step=good[-1], learning_rate=rate, words=words).model_dump_json())
        folder.keep_begun_config()
        config = folder.config()
        folder.write_config({**config, "train": {**config["train"], **changed}})
        finish_going_back(folder)
    barrier()
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changed)}), words


def finish_going_back(folder: RunFolder) -> None:
    """Drop the steps that a run leaves behind when it goes back, if its recipe has changed: also after a kill in between.

    Raises:
        ConfigError: if a file of the folder is damaged.
    """
    if not folder.going_back.is_file():
        return
    note = read_json(
        folder.going_back, TypeAdapter(_Note), fix="delete it, and checkpoints of the policy that collapsed"
    )
    if folder.config()["train"]["learning_rate"] == note.learning_rate:
        for step, path in by_step(folder.checkpoints).items():
            if step > note.step:
                rename(path, path.with_name(f".{path.name}.partial"))  # so that none is there in part
        folder.rewind(note.step)
        warning = Told(step=note.step, name="rewind", words=note.words)
        if warning not in folder.warnings():
            folder.add_warning(warning)
    folder.going_back.unlink()
