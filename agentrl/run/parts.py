"""What each process of a run samples, and on which engine.

Models and tokenizers of a run: loaded, or made and trained on demonstrations.

The environments that a run is evaluated in: its own, or those that `evaluation.env` names.

The environment of a run with the entries of `env.schedule`.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentrl.chat import ChatMLRenderer, Renderer, load_tokenizer, train_tokenizer
from agentrl.distributed.processes import from_rank_zero, num_processes
from agentrl.engine import Engine, EngineContext
from agentrl.engine.base import IdleEngine
from agentrl.env import EnvDescription
from agentrl.errors import ConfigError, TrainingError, UserError
from agentrl.learn.batch import rows_of
from agentrl.models.auto_classes import fix_frequencies, freeze_towers
from agentrl.models.moe import experts_of
from agentrl.policy.layout import choose_layout
from agentrl.policy.model import Policy, load_pretrained, make_local_model
from agentrl.policy.sharded_checkpoint import load_sharded
from agentrl.recipe.config import Recipe
from agentrl.rollout import RolloutPool, Tasks, describe_env
from agentrl.rollout.demonstrations import Demonstration, demonstrations
from agentrl.rollout.env_driver import Environments, MakeEnv
from agentrl.rollout.tasks import Stage
from agentrl.types import Share


def share_of(recipe: Recipe, process: int, count: int) -> Share:
    """Deal the tasks out to the processes that have an engine.

    Raises:
        ConfigError: where they cannot be dealt out.
    """
    num_groups, count = recipe.rollout.num_groups, recipe.engine.num_sampling(count)
    if num_groups % count:
        raise ConfigError(
            f"rollout.num_groups: {num_groups} cannot be dealt out to {count} processes; set it to a multiple of {count}"
        )
    return Share(num_groups // count, process, count) if process < count else Share(0)


def new_engine(recipe: Recipe, share: Share, model: Any, device: torch.device, *, handover: Path) -> Engine:
    """Make the engine of a process; weights are pushed to it when the run begins.

    Args:
        recipe: names it.
        share: what the process collects.
        model: in training; the engine copies it, or reads its form.
        device: where it is going to be.
        handover: folder for weights on their way to another process.

    Raises:
        ConfigError: where it cannot be had.
    """
    tells_experts = recipe.loss.routing_replay == "engine"
    if tells_experts:
        try:
            experts_of(model)
        except TrainingError as error:
            raise ConfigError(f"loss.routing_replay: {error}; set it to none") from error
    if not share.num_groups:
        return IdleEngine()
    context = EngineContext(
        model=model,
        device=device,
        dtype=torch.bfloat16 if recipe.train.precision == "bfloat16" else model.dtype,
        share=share,
        handover=handover,
        max_context_tokens=recipe.rollout.max_context_tokens,
        repeats_exactly=recipe.rollout.repeats_exactly,
        samples_during_update=recipe.rollout.samples_during_update,
        tells_experts=tells_experts,
    )
    return recipe.engine.build(context)


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
        if recipe.train.is_sharded(num_processes()):
            model, tokenizer, shares = load_sharded(settings.name_or_path, attention=settings.attention)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnv:
    """An environment to evaluate in."""

    name: str
    """Its metrics are `eval/NAME/...`. Empty: the only one, whose metrics are `eval/...`."""
    environments: Environments
    tasks: Tasks
    has_tools: bool

    @property
    def prefix(self) -> str:
        """Of its metrics and groups."""
        return f"eval/{self.name}/" if self.name else "eval/"


def describe_others(recipe: Recipe, runner: asyncio.Runner, stack: ExitStack) -> tuple[EvaluationEnv, ...]:
    """Look at the environments that `evaluation.env` names; they are closed with the stack.

    Raises:
        UserError: naming the one that cannot be made, or has no evaluation tasks.
    """
    found = []
    for name, env in recipe.evaluation.env.items():
        try:
            description = runner.run(describe_env(env.make, timeout_s=recipe.rollout.env_timeout_s))
            tasks = Tasks(seed=recipe.seed, evaluation_seed=recipe.evaluation.seed, num=description.num_tasks)
            tasks.evaluation(1)
        except UserError as error:
            raise type(error)(f"evaluation.env{f'.{name}' if name else ''}: {error}") from error
        environments = Environments(env.make)
        stack.callback(environments.close)
        found.append(
            EvaluationEnv(name=name, environments=environments, tasks=tasks, has_tools=bool(description.tools))
        )
    return tuple(found)


def own_env(pool: RolloutPool, *, has_tools: bool) -> EvaluationEnv:
    """Return the environment that the run trains in.

    Raises:
        ConfigError: where it has no evaluation tasks.
    """
    pool.tasks.evaluation(1)
    return EvaluationEnv(name="", environments=pool.environments, tasks=pool.tasks, has_tools=has_tools)


def makers(recipe: Recipe) -> tuple[MakeEnv, ...]:
    """Return what makes an environment with each entry."""
    return tuple(partial(recipe.env.make, stage) for stage in range(1, len(recipe.env.schedule) + 1))


def describe_stages(recipe: Recipe, own: EnvDescription, runner: asyncio.Runner) -> tuple[Stage, ...]:
    """Make the environment once with each entry, and look at it.

    Args:
        recipe: of the run.
        own: what the environment offers with `env.options` alone.
        runner: event loop to look on.

    Raises:
        UserError: naming the entry with which it cannot be made, has no training tasks, or offers something else.
    """
    found = []
    for place, (entry, make_env) in enumerate(zip(recipe.env.schedule, makers(recipe), strict=True)):
        with naming_stage(place):
            description = runner.run(describe_env(make_env, timeout_s=recipe.rollout.env_timeout_s))
            if (description.needs, _names(description)) != (own.needs, _names(own)):
                raise ConfigError(
                    "the environment has other tools, or other data for credit schemes, than with env.options alone; schedule "
                    "what changes neither"
                )
            if description.num_tasks.train == 0:
                raise ConfigError("the environment has no training tasks (num_tasks('train') returned 0)")
        found.append(Stage(from_step=entry.from_step, num_train=description.num_tasks.train))
    return tuple(found)


@contextmanager
def naming_stage(place: int) -> Iterator[None]:
    """Say in errors at which entry of the schedule they occurred."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"env.schedule.{place}: {error}") from error


def _names(description: EnvDescription) -> list[str]:
    return [tool["function"]["name"] for tool in description.tools]
