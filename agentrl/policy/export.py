"""Export of a policy as a plain Hugging Face folder, which `AutoModelForCausalLM` and vLLM load."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from agentrl.distributed.checkpoints import write_folder
from agentrl.distributed.processes import is_main
from agentrl.errors import ConfigError
from agentrl.policy.lora import merged_weights, save_adapter


def stop_at(model: Any, token_ids: Iterable[int]) -> None:
    """Let a model's generation end at the tokens at which training ends sampling, in place."""
    ids = list(token_ids)
    model.generation_config.eos_token_id = ids[0] if len(ids) == 1 else ids


def writable(config: Any) -> Any:
    """Return a copy of a generation config that transformers can write: it reads, but does not write, an unused temperature.

    If more is wrong, the copy has the special tokens alone.
    """
    config = copy.deepcopy(config)
    for is_sampling in (config.do_sample, True):
        config.do_sample = is_sampling
        try:
            config.validate(strict=True)
        except ValueError:
            continue
        return config
    return type(config)(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, bos_token_id=config.bos_token_id
    )


Also = Callable[[Path], object]
"""Function that writes further files into a folder."""


def export_model(
    model: Any, tokenizer: Any, folder: Path, *, dtype: torch.dtype | None = None, also: Also = lambda _: None
) -> None:
    """Write a transformers model, adapters merged into its weights, and its tokenizer; the folder appears whole or not at all.

    Called on every rank, and rank 0 writes.

    Args:
        model: model to export; it is left as it is.
        tokenizer: tokenizer with the chat template that the model was trained on.
        folder: folder to make, with its parents.
        dtype: dtype of the weights in the folder. None: as they are.
        also: writes further files.

    Raises:
        ConfigError: if the folder exists and is not empty.
        OSError: if the disk is full.
    """
    folder = _free(folder)
    plain = _plain(model, dtype)

    def write(path: Path) -> None:
        if is_main():
            also(path)  # first: it may raise before anything large is written
            plain.save_pretrained(path)
            tokenizer.save_pretrained(path)

    write_folder(folder, write)


def write_config(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the configuration and the tokenizer of a transformers model, without weights."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # unset for a model that was not loaded
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def export_adapter(model: Any, folder: Path, *, also: Also = lambda _: None) -> None:
    """Write the adapters of a model alone, as `save_adapter` does; the folder appears whole or not at all.

    Called on every rank, and rank 0 writes.

    Raises:
        ConfigError: if the folder exists and is not empty.
        OSError: if the disk is full.
    """

    def write(path: Path) -> None:
        if is_main():
            also(path)
        save_adapter(model, path)

    write_folder(_free(folder), write)


def _free(folder: Path) -> Path:
    """Return the absolute path of a folder that writing may replace."""
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already; name another folder")
    return folder


def _plain(model: Any, dtype: torch.dtype | None) -> Any:
    """Return a model of the same class without adapters; weights that are not converted are shared with the original."""
    with torch.device("meta"):
        plain = type(model)(copy.deepcopy(model.config))
    weights = {
        name: weight.to(dtype) if dtype is not None and weight.is_floating_point() else weight
        for name, weight in merged_weights(model)
    }
    plain.load_state_dict(weights, assign=True)
    plain.tie_weights()  # so that tied weights are written once
    plain.generation_config = writable(model.generation_config)
    return plain
