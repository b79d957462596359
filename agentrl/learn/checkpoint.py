"""A trainer's state in the checkpoints of its run."""

import shutil
from pathlib import Path

from pydantic import TypeAdapter

from agentrl.distributed.checkpoints import NAME, checkpoint_errors, checkpoints, write_folder
from agentrl.distributed.processes import is_main, num_processes, process_index
from agentrl.errors import ConfigError
from agentrl.files import read_json
from agentrl.learn.trainer import Trainer, TrainerState

_STATE = "agentrl.json"


def save_checkpoint(trainer: Trainer, folder: Path, *, keep_last: int) -> Path:
    """Write `folder/step-NNNNNN` and drop all but the newest `keep_last`; a crash while writing leaves the earlier ones."""
    target = folder / NAME.format(f"{trainer.finished_steps:06d}")

    def write(partial: Path) -> None:
        trainer.save(partial)
        (partial / _state_file()).write_text(trainer.state_dict().model_dump_json(), encoding="utf-8")

    write_folder(target, write, is_sealed=True)
    if is_main():
        for old in checkpoints(folder)[:-keep_last]:
            shutil.rmtree(old)
    return target


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Bring a trainer to where a checkpoint was written.

    Raises:
        ConfigError: when the checkpoint does not fit the recipe's model.
    """
    with checkpoint_errors(path):
        check_processes(path, num_processes())
        trainer.load(path)
        trainer.load_state_dict(_read_state(path / _state_file()))


def check_processes(path: Path, count: int) -> None:
    """Check that a run goes on with as many processes as wrote a checkpoint.

    Raises:
        ConfigError: saying how many.
    """
    found = _read_state(path / _STATE).num_processes
    if found != count:
        how = "`agentrl train`" if found == 1 else f"`agentrl launch --processes {found}`"
        raise ConfigError(f"the run was trained by {found} processes, not {count}; go on with {how}")


def _read_state(path: Path) -> TrainerState:
    return read_json(
        path, TypeAdapter(TrainerState), fix="delete this checkpoint, and the run goes on from an older one"
    )


def _state_file() -> str:
    """Return the name of this process's own file in a checkpoint."""
    return _STATE if is_main() else f"agentrl-{process_index()}.json"
