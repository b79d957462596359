"""Changes of a recipe with which it fits a GPU: each by itself, and the cheapest together."""

import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import reduce
from itertools import chain, combinations
from typing import Any, NamedTuple

import yaml

from agentrl.engine.vllm.engine import VLLMConfig
from agentrl.errors import ConfigError
from agentrl.learn.config import ADAPTER_RATE
from agentrl.recipe.config import Recipe, load_recipe
from agentrl.run.memory import ProcessMemory, Sizes, model_sizes, plan_memory

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
