"""Checkpoints that exist whole or not at all."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from agentrl.data.files import damage, numbered, rename, seal, sync_folder
from agentrl.distributed.processes import barrier, is_main
from agentrl.errors import ConfigError

NAME = "step-{}"
_NO_SPACE = 2**20
"""Most bytes left on a disk that a write has just filled: less than a block of the writer remains."""


def write_folder(target: Path, write: Callable[[Path], object], *, is_sealed: bool = False) -> None:
    """Let `write` fill a folder that appears whole or not at all: on every rank, into the same folder.

    It has its name once the disk has all of it, so that a power cut leaves it whole or away too.

    Args:
        target: the folder.
        write: called with the folder to fill.
        is_sealed: list its files in one of it, so that `agentrl.data.files.damage` can detect changes.

    Raises:
        OSError: if the disk is full, whatever error the library raised.
    """
    partial = target.with_name(f".{target.name}.partial")
    if is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    try:
        write(partial)
        barrier()
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
    barrier()


def by_step(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by their steps, oldest first."""
    return {step: path for step, path in numbered(folder, NAME) if path.is_dir()}


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a run, oldest first."""
    return list(by_step(folder).values())


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix(NAME.format("")))


def newest_step(folder: Path) -> int | None:
    """Return the step of a run's newest checkpoint. None: it has none yet."""
    return max(by_step(folder), default=None)


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Refuse a checkpoint that is damaged, or does not fit the recipe's model.

    Raises:
        ConfigError: with the damaged file, and the checkpoint from which the run can resume.
    """
    if what := damage(path):
        raise _damaged(path, what)
    try:
        yield
    except ConfigError:
        raise
    except UnpicklingError as error:  # its message advises to read the file all the same
        raise _damaged(path, "a file of tensors holds something else, which is not read") from error
    except (SafetensorError, EOFError) as error:
        raise _damaged(path, " ".join(str(error).split())) from error
    except ValidationError as error:
        raise ConfigError(f"the checkpoint {path} does not fit this recipe: {error.errors()[0]['msg']}") from error
    except (RuntimeError, LookupError, ValueError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(f"the checkpoint {path} does not fit this recipe: {words}") from error


def _damaged(path: Path, what: str) -> ConfigError:
    older = [other.name for other in checkpoints(path.parent) if other.name < path.name]
    words = f"delete it, and the run resumes from {older[-1]}" if older else "there is no older one"
    return ConfigError(f"the checkpoint {path} is damaged ({what}): {words}")


class RandomState(BaseModel):
    """States of the global generators of Python, numpy and torch. agentrl draws nothing from them once a run has started."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, list[int], int, int, float]
    torch: str
    """State in hexadecimal digits, like `cuda`."""
    cuda: list[str]

    @classmethod
    def now(cls) -> Self:
        """Return the states at this moment."""
        name, keys, *rest = np.random.get_state(legacy=True)
        return cls.model_validate(
            {
                "python": random.getstate(),
                "numpy": (name, np.asarray(keys).tolist(), *rest),
                "torch": _digits(torch.get_rng_state()),
                "cuda": [_digits(state) for state in torch.cuda.get_rng_state_all()],
            }
        )

    def restore(self) -> None:
        """Restore the generators, for as many GPUs as there are now."""
        random.setstate(self.python)
        name, keys, position, has_gauss, gauss = self.numpy
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        torch.set_rng_state(_bytes(self.torch))
        for device in range(min(torch.cuda.device_count(), len(self.cuda))):
            torch.cuda.set_rng_state(_bytes(self.cuda[device]), device)


def _digits(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _bytes(digits: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
