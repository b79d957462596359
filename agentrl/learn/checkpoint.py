"""Checkpoints that are there whole or not at all."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from pickle import UnpicklingError

from safetensors import SafetensorError

from agentrl.errors import ConfigError
from agentrl.learn.processes import is_main, meet, num_processes, process_index
from agentrl.learn.trainer import Trainer

_STATE = "agentrl.json"
_NO_SPACE = 2**20
"""Bytes left on a disk that a write has just filled, at most: what remains is less than a block of the writer."""


def save_checkpoint(trainer: Trainer, folder: Path, *, keep_last: int) -> Path:
    """Write `folder/step-NNNNNN` and drop all but the newest `keep_last`; a crash while writing leaves the earlier ones."""
    target = folder / f"step-{trainer.finished_steps:06d}"

    def write(partial: Path) -> None:
        trainer.save(partial)
        (partial / _state_file()).write_text(json.dumps(trainer.state_dict()), encoding="utf-8")

    write_folder(target, write)
    if is_main():
        for old in checkpoints(folder)[:-keep_last]:
            shutil.rmtree(old)
    return target


def write_folder(target: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a folder that appears whole or not at all: on every process, into the same folder.

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
    except Exception as error:  # torch, safetensors and tokenizers each raise a kind of their own
        is_full = shutil.disk_usage(partial.parent).free < _NO_SPACE
        shutil.rmtree(partial, ignore_errors=True)
        if is_full and not isinstance(error, OSError):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target)) from error
        raise
    meet()
    if is_main():
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    meet()


def checkpoints(folder: Path) -> list[Path]:
    """List the whole checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / _STATE).is_file())


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Bring a trainer to where a checkpoint was written.

    Raises:
        ConfigError: when the checkpoint does not fit the recipe's model.
    """
    with refusing_others(path):
        check_processes(path, num_processes())
        trainer.load(path)
        trainer.load_state_dict(json.loads((path / _state_file()).read_text(encoding="utf-8")))


def check_processes(path: Path, count: int) -> None:
    """Check that a run goes on with as many processes as wrote a checkpoint.

    Raises:
        ConfigError: saying how many.
    """
    found = json.loads((path / _STATE).read_text(encoding="utf-8")).get("num_processes", 1)
    if found != count:
        how = "`agentrl train`" if found == 1 else f"`agentrl launch --processes {found}`"
        raise ConfigError(f"the run was trained by {found} processes, not {count}; go on with {how}")


@contextmanager
def refusing_others(path: Path) -> Iterator[None]:
    """Turn what a checkpoint raises that is damaged, or does not fit the recipe's model, into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (SafetensorError, UnpicklingError, JSONDecodeError, EOFError, FileNotFoundError) as error:
        older = [other.name for other in checkpoints(path.parent) if other.name < path.name]
        words = f"delete it, and the run goes on from {older[-1]}" if older else "there is no older one"
        raise ConfigError(f"the checkpoint {path} is damaged ({error}): {words}") from error
    except (RuntimeError, KeyError, ValueError) as error:
        raise ConfigError(f"the checkpoint {path} does not fit this recipe: {error}") from error


def _state_file() -> str:
    """Return the name of this process's own file in a checkpoint."""
    return _STATE if is_main() else f"agentrl-{process_index()}.json"
