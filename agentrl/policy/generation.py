"""How an exported model generates text: its `generation_config`."""

import copy
from collections.abc import Iterable
from typing import Any

__all__ = ["stop_at", "writable"]


def stop_at(model: Any, token_ids: Iterable[int]) -> None:
    """Let a model's generation end at further tokens, in place: a base model knows none of those that end a turn."""
    own = model.generation_config.eos_token_id
    ids = list(dict.fromkeys([*token_ids, *(own if isinstance(own, list) else [] if own is None else [own])]))
    model.generation_config.eos_token_id = ids[0] if len(ids) == 1 else ids


def writable(config: Any) -> Any:
    """Return a copy that transformers writes: a temperature of a model that does not sample it reads, but does not write.

    Where more is wrong, the copy has the special tokens alone.
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
