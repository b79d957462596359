"""Back to before a policy collapsed: `train.on_collapse: rewind`."""

from pydantic import BaseModel, ConfigDict, TypeAdapter

from agentrl.config import Recipe
from agentrl.distributed.checkpoints import by_step
from agentrl.distributed.processes import barrier, from_rank_zero, is_main
from agentrl.errors import TrainingError
from agentrl.files import read_json, rename, write_whole
from agentrl.learn.health import COLLAPSED_STEPS
from agentrl.report.folder import RunFolder, Told


class _Note(BaseModel):
    """What a run goes back to: in its folder until it has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    learning_rate: float
    """From then on. Once the run's recipe has it, the run has gone back, whatever is left to be dropped."""
    words: str


class CollapsedError(TrainingError):
    """The policy has collapsed, and the recipe asks for going back."""

    def __init__(self, step: int, words: str, *, first: int) -> None:
        """Take the step that showed it, what it showed, and the first step by which it did."""
        super().__init__(f"step {step}: {words}")
        self.step, self.first = step, first


def go_back(recipe: Recipe, folder: RunFolder, collapsed: CollapsedError) -> tuple[Recipe, str]:
    """Drop the checkpoints since a policy began to collapse; return the recipe to resume with, and what to tell.

    That has half the learning rate, and ends the run at the next collapse. Called on every process. A run that is killed
    meanwhile goes back when it is resumed: its recipe says so already (`finish_going_back`), or its policy collapses again.

    Raises:
        TrainingError: where no earlier checkpoint is left.
    """
    # Weights that had collapsed sampled the first step that showed it: those before it, or so much older ones.
    bound = recipe.rollout.staleness_bound
    steps = from_rank_zero(lambda: list(by_step(folder.checkpoints)))
    good = [step for step in steps if step <= collapsed.first - 2 - bound]
    # One that showed itself over many steps may be older than all checkpoints: then the oldest of those that one asks for.
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
    """Drop what a run leaves behind that goes back, where its recipe says that it does: also after a kill in between.

    Raises:
        ConfigError: where a file of the folder is damaged.
    """
    if not folder.going_back.is_file():
        return
    note = read_json(
        folder.going_back, TypeAdapter(_Note), fix="delete it, and checkpoints of the policy that collapsed"
    )
    if folder.config()["train"]["learning_rate"] == note.learning_rate:
        for step, path in by_step(folder.checkpoints).items():
            if step > note.step:
                rename(path, path.with_name(f".{path.name}.partial"))  # none is there in part
        folder.rewind(note.step)
        told = Told(step=note.step, name="rewind", words=note.words)
        if told not in folder.warnings():
            folder.add_warning(told)
    folder.going_back.unlink()
