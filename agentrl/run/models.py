"""Models and tokenizers of a run: loaded, or made and trained on demonstrations."""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentrl.chat import ChatMLRenderer, Renderer, load_tokenizer, train_tokenizer
from agentrl.config import Recipe
from agentrl.distributed.processes import from_rank_zero, num_processes
from agentrl.errors import ConfigError
from agentrl.learn.tokens import rows_of
from agentrl.policy.layout import choose_layout
from agentrl.policy.model import Policy, load_pretrained, make_local_model
from agentrl.policy.rope import fix_frequencies
from agentrl.policy.shares import load_shares
from agentrl.policy.towers import freeze_towers
from agentrl.rollout import Tasks
from agentrl.rollout.demonstrations import Demonstration, demonstrations

_TOKENIZER_EPISODES = 256
"""Demonstrations that a local tokenizer is trained on."""


def make_bytes_tokenizer() -> Any:
    """Return a tokenizer that knows bytes only, and the marks of messages."""
    return train_tokenizer([], vocab_size=261)


class Loaded(NamedTuple):
    """A model to train."""

    model: Any
    tokenizer: Any
    shares: dict[str, Tensor]
    """This process's parts of the weights, where the model has none yet."""


def load_model(recipe: Recipe, runner: asyncio.Runner, *, tasks: Tasks, tokenizer_folder: Path | None) -> Loaded:
    """Return the model to train, on the CPU; or without weights, and this process's parts of them.

    Args:
        recipe: names the model, or the sizes of one to make.
        runner: event loop on which the demonstrations are played that a local tokenizer is trained on.
        tasks: to demonstrate.
        tokenizer_folder: the local tokenizer of a run that is resumed; None: one is trained.
    """
    settings = recipe.model
    if settings.name_or_path is not None:
        shares: dict[str, Tensor] = {}
        if recipe.train.is_shared_out(num_processes()):
            model, tokenizer, shares = load_shares(settings.name_or_path, attention=settings.attention)
        else:
            model, tokenizer = load_pretrained(settings.name_or_path, attention=settings.attention)
        fix_frequencies(model, recipe.rollout.max_context_tokens)
        freeze_towers(model)
        return Loaded(model, tokenizer, shares)
    tokenizer = (
        _train_tokenizer(recipe, runner, tasks) if tokenizer_folder is None else load_tokenizer(tokenizer_folder)
    )
    return Loaded(make_local_model(settings.local, tokenizer, attention=settings.attention), tokenizer, {})


def make_demonstrations(
    recipe: Recipe, renderer: Renderer, runner: asyncio.Runner, *, tasks: Tasks, count: int
) -> list[Demonstration]:
    """Let the environment's own policy play, on one process for all."""

    def playing() -> list[Demonstration]:
        return runner.run(
            demonstrations(
                recipe.env.make,
                renderer,
                count=count,
                skill=recipe.warmup.skill,
                config=recipe.rollout,
                tasks=tasks,
            )
        )

    return from_rank_zero(playing)


def load_teacher(recipe: Recipe, tokenizer: Any) -> Policy:
    """Load the model whose log-probabilities a credit scheme reads.

    Raises:
        ConfigError: where it does not read the policy's tokens, or not as many.
    """
    field, name = "signals.teacher", recipe.signals.teacher
    assert name is not None, "a scheme that reads a teacher is refused without one"
    model, other = load_pretrained(name, field=field, attention=recipe.model.attention)
    if other.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"{field}: the tokenizer of {name!r} is not the policy's, so its tokens mean something else")
    check_positions(recipe, model.config, whose=f"{field}: the teacher's")
    fix_frequencies(model, recipe.rollout.max_context_tokens)
    half = recipe.train.precision == "bfloat16"
    layout, _ = from_rank_zero(
        lambda: choose_layout(model, "auto", max_tokens=recipe.rollout.max_context_tokens, half=half)
    )
    if half:
        model = model.to(torch.bfloat16)
    return Policy(model, layout=layout, field=field)


def check_positions(recipe: Recipe, config: Any, *, whose: str = "the model's") -> None:
    """Refuse contexts that are longer than a model has positions.

    Raises:
        ConfigError: naming the limit.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and recipe.rollout.max_context_tokens > limit:
        raise ConfigError(
            f"rollout.max_context_tokens: {recipe.rollout.max_context_tokens} exceeds {whose} {limit} positions; lower it"
        )


def _train_tokenizer(recipe: Recipe, runner: asyncio.Runner, tasks: Tasks) -> Any:
    """Train a tokenizer on demonstrated dialogues, written out by one that knows bytes only; without warm-up, that one."""
    as_bytes = make_bytes_tokenizer()
    if recipe.warmup.steps == 0:
        return as_bytes
    played = make_demonstrations(recipe, ChatMLRenderer(as_bytes), runner, tasks=tasks, count=_TOKENIZER_EPISODES)
    texts = [as_bytes.decode(row.ids_L.tolist()) for demonstration in played for row in rows_of(demonstration.turns)]
    return train_tokenizer(texts, vocab_size=recipe.model.local.vocab_size)
