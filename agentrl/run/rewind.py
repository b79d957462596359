"""Back to before a policy collapsed: `train.on_collapse: rewind`."""

import shutil

from agentrl.config import Recipe
from agentrl.distributed.checkpoints import by_step
from agentrl.distributed.processes import barrier, from_rank_zero, is_main
from agentrl.errors import TrainingError
from agentrl.learn.health import COLLAPSED_STEPS
from agentrl.report.folder import RunFolder, Told


class CollapsedError(TrainingError):
    """The policy has collapsed, and the recipe asks for going back."""

    def __init__(self, step: int, words: str) -> None:
        """Take the step that showed it, and what it showed."""
        super().__init__(f"step {step}: {words}")
        self.step = step


def go_back(recipe: Recipe, folder: RunFolder, collapsed: CollapsedError) -> tuple[Recipe, str]:
    """Drop the checkpoints since a policy began to collapse; return the recipe to resume with, and what to tell.

    That has half the learning rate, and ends the run at the next collapse. Called on every process.

    Raises:
        TrainingError: where no earlier checkpoint is left.
    """
    # The steps that showed it were sampled by weights that had collapsed before the first of them.
    newest_good = collapsed.step - COLLAPSED_STEPS - 1
    steps = from_rank_zero(lambda: list(by_step(folder.checkpoints)))
    if not (good := [step for step in steps if step <= newest_good]):
        raise TrainingError(
            f"{collapsed}. No checkpoint from before is left to go back to: raise train.checkpoint_every or "
            "train.keep_last, and begin again"
        )
    rate = recipe.train.learning_rate / 2
    words = f"{collapsed}. The run goes back to step {good[-1]}, with half the learning rate, {rate:g}"
    if is_main():
        for step, path in by_step(folder.checkpoints).items():
            if step > good[-1]:
                shutil.rmtree(path)
        folder.keep_begun_config()
        folder.add_warning(Told(step=good[-1], name="rewind", words=words))
    barrier()
    changed = {"learning_rate": rate, "on_collapse": "stop"}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changed)}), words
