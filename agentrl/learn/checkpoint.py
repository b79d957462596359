"""Checkpoints that are there whole or not at all."""

import json
import shutil
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.learn.trainer import Trainer

_STATE = "agentrl.json"


def save_checkpoint(trainer: Trainer, folder: Path, *, keep_last: int) -> Path:
    """Write `folder/step-NNNNNN` and drop all but the newest `keep_last`; a crash while writing leaves the earlier ones."""
    target = folder / f"step-{trainer.finished_steps:06d}"
    partial = folder / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    trainer.save(partial)
    (partial / _STATE).write_text(json.dumps(trainer.state_dict()), encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    for old in checkpoints(folder)[:-keep_last]:
        shutil.rmtree(old)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """List the whole checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / _STATE).is_file())


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Bring a trainer to where a checkpoint was written.

    Raises:
        ConfigError: when the checkpoint does not fit the recipe's model.
    """
    try:
        trainer.load(path)
        trainer.load_state_dict(json.loads((path / _STATE).read_text(encoding="utf-8")))
    except (RuntimeError, KeyError, ValueError) as error:
        raise ConfigError(f"the checkpoint {path} does not fit this recipe: {error}") from error
