"""Checkpoints that are there whole or not at all."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from agentrl.errors import ConfigError
from agentrl.files import damage, numbered, read_json, rename, seal, sync_folder
from agentrl.learn.processes import is_main, meet, num_processes, process_index
from agentrl.learn.trainer import Trainer, TrainerState

_NAME, _STATE = "step-{}", "agentrl.json"
_NO_SPACE = 2**20
"""Bytes left on a disk that a write has just filled, at most: what remains is less than a block of the writer."""


def save_checkpoint(trainer: Trainer, folder: Path, *, keep_last: int) -> Path:
    """Write `folder/step-NNNNNN` and drop all but the newest `keep_last`; a crash while writing leaves the earlier ones."""
    target = folder / _NAME.format(f"{trainer.finished_steps:06d}")

    def write(partial: Path) -> None:
        trainer.save(partial)
        (partial / _state_file()).write_text(trainer.state_dict().model_dump_json(), encoding="utf-8")

    write_folder(target, write, is_sealed=True)
    if is_main():
        for old in checkpoints(folder)[:-keep_last]:
            shutil.rmtree(old)
    return target


def write_folder(target: Path, write: Callable[[Path], object], *, is_sealed: bool = False) -> None:
    """Let `write` fill a folder that appears whole or not at all: on every process, into the same folder.

    It has its name once the disk has all of it, so that a power cut leaves it whole or away too.

    Args:
        target: the folder.
        write: called with the folder to fill.
        is_sealed: list its files in one of it, so that `agentrl.files.damage` can tell whether they are what they were.

    Raises:
        OSError: of a full disk, in whatever words the library that met it put it.
    """
    partial = target.with_name(f".{target.name}.partial")
    if is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    meet()
    try:
        write(partial)
        meet()
        if is_main():
            if is_sealed:
                seal(partial)
            sync_folder(partial)
    except Exception as error:  # torch, safetensors and tokenizers each raise a kind of their own
        is_full = shutil.disk_usage(partial.parent).free < _NO_SPACE
        shutil.rmtree(partial, ignore_errors=True)
        if is_full and not isinstance(error, OSError):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target)) from error
        raise
    if is_main():
        shutil.rmtree(target, ignore_errors=True)
        rename(partial, target)
    meet()


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a run, oldest first."""
    return [path for _, path in numbered(folder, _NAME) if path.is_dir()]


def newest_step(folder: Path) -> int | None:
    """Return the step of a run's newest checkpoint. None: it has none yet."""
    steps = [step for step, path in numbered(folder, _NAME) if path.is_dir()]
    return steps[-1] if steps else None


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Bring a trainer to where a checkpoint was written.

    Raises:
        ConfigError: when the checkpoint does not fit the recipe's model.
    """
    with refusing_others(path):
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


@contextmanager
def refusing_others(path: Path) -> Iterator[None]:
    """Refuse a checkpoint that is damaged, or does not fit the recipe's model.

    Raises:
        ConfigError: saying which, and what the run can go on from.
    """
    if what := damage(path):
        raise _damaged(path, what)
    try:
        yield
    except ConfigError:
        raise
    except (SafetensorError, UnpicklingError, EOFError) as error:
        raise _damaged(path, " ".join(str(error).split())) from error
    except ValidationError as error:
        raise ConfigError(f"the checkpoint {path} does not fit this recipe: {error.errors()[0]['msg']}") from error
    except (RuntimeError, KeyError, ValueError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(f"the checkpoint {path} does not fit this recipe: {words}") from error


def _damaged(path: Path, what: str) -> ConfigError:
    older = [other.name for other in checkpoints(path.parent) if other.name < path.name]
    words = f"delete it, and the run goes on from {older[-1]}" if older else "there is no older one"
    return ConfigError(f"the checkpoint {path} is damaged, or of an earlier version ({what}): {words}")


def _read_state(path: Path) -> TrainerState:
    return read_json(
        path, TypeAdapter(TrainerState), fix="delete this checkpoint, and the run goes on from an older one"
    )


def _state_file() -> str:
    """Return the name of this process's own file in a checkpoint."""
    return _STATE if is_main() else f"agentrl-{process_index()}.json"
