"""The parts of a run, each built from its own section of the recipe.

In this order they make a training loop: `build_accelerator`, `build_env`, `build_tokenizer`, `build_model`, a renderer
(`recipe.chat.build`), `build_engine`, `build_policy`, `build_pool`, `build_learner`, a credit scheme (`load_credit`), and
`demonstrate` for a model that needs a warm-up. `agentrl.run.build` wires them for a whole recipe, `examples/own_loop.py` for a
loop of one's own.
"""

import asyncio
import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor

from agentrl.agent.config import AgentConfig
from agentrl.chat import ChatMLRenderer, Renderer, train_tokenizer
from agentrl.distributed.processes import choose_interface, from_rank_zero, process_index, set_deadline
from agentrl.engine import Engine, EngineConfig, EngineContext
from agentrl.engine.base import AdapterEngine, Adapters, FreezableEngine, IdleEngine, is_half, merging_refused
from agentrl.env import EnvDescription
from agentrl.env.make import EnvConfig
from agentrl.errors import ConfigError, TrainingError, UserError
from agentrl.learn.config import LossConfig, TrainConfig, WarmupConfig
from agentrl.learn.learner import Learner
from agentrl.learn.policy_state import PolicyState
from agentrl.learn.tokens import rows_of
from agentrl.models.auto_classes import fix_frequencies, freeze_towers
from agentrl.models.moe import experts_of
from agentrl.policy.config import Layout, LoraSettings, ModelConfig
from agentrl.policy.layout import check_head, choose_layout
from agentrl.policy.lora import add_lora, find_layers, round_frozen
from agentrl.policy.model import (
    Policy,
    check_dropout,
    checkpoint_layers,
    compile_layers,
    load_pretrained,
    make_local_model,
)
from agentrl.policy.sharded_checkpoint import load_sharded, small_like
from agentrl.rollout import EnvPlayer, EpisodeContext, Journal, Player, RolloutConfig, RolloutPool, Tasks, describe_env
from agentrl.rollout.agent_episode import AgentPlayer
from agentrl.rollout.demonstrations import Demonstration, demonstrations, read_dialogues
from agentrl.rollout.env_driver import MakeEnv
from agentrl.rollout.evaluation import EvaluationConfig
from agentrl.rollout.tasks import Stage
from agentrl.types import TaskShard, Trajectory

_TOKENIZER_EPISODES = 256
"""Demonstrations that a local tokenizer is trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPart:
    """An environment with its description, and its tasks; or a program in its place."""

    make: MakeEnv | None
    """Makes one with `env.options` alone. None: a program plays."""
    player: Player
    """Plays episodes in it."""
    description: EnvDescription
    tasks: Tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """A model and its tokenizer, before anything is added to train it."""

    model: Any
    tokenizer: Any
    sharded_checkpoint: Mapping[str, Tensor]
    """This rank's part of each weight, if the model is on torch's device `meta`; else empty."""


class PolicyPart(NamedTuple):
    """The model as it is trained."""

    policy: Policy
    warning: str | None
    """Reason for which rows have another layout than the recipe asks for. None: they have that layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnv:
    """An environment to evaluate in."""

    name: str
    """Part of the names of its metrics, `eval/NAME/...`. Empty: the only one, with metrics `eval/...`."""
    player: Player
    tasks: Tasks
    has_tools: bool

    @property
    def prefix(self) -> str:
        """Beginning of the names of its metrics and groups."""
        return f"eval/{self.name}/" if self.name else "eval/"


def build_accelerator(config: TrainConfig) -> Accelerator:
    """Return accelerate's handle on this rank's device.

    Raises:
        ConfigError: with more ranks than this machine has GPUs.
    """
    # Logged at every checkpoint of a model whose head and embedding are one tensor, which is then written once.
    logging.getLogger("accelerate.utils.other").addFilter(lambda line: "Removed shared tensor" not in line.getMessage())
    set_deadline(config.process_timeout_s)
    choose_interface()
    number, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if config.device == "auto" and 0 < num_gpus <= number:
        raise ConfigError(
            f"--processes: one for each GPU, of which this machine has {num_gpus}; or set train.device: cpu"
        )
    # Apple's GPUs have no float64. And accelerate knows of no other ranks if it looks for a GPU and finds none.
    has_gpu = torch.accelerator.is_available() and not torch.backends.mps.is_available()
    return Accelerator(
        cpu=config.device == "cpu" or not has_gpu,
        mixed_precision="bf16" if config.precision == "bfloat16" else "no",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=config.process_timeout_s))],
    )


def build_agent(
    config: AgentConfig,
    *,
    seed: int = 0,
    evaluation_seed: int | None = None,
    on_warning: Callable[[str], object] = lambda _: None,
) -> EnvPart:
    """Return a program that plays in place of an environment, and its tasks; it is not run.

    Args:
        config: section `agent` of the recipe.
        seed: of the training tasks.
        evaluation_seed: of the evaluation tasks. None: follows from `seed`.
        on_warning: called once for each parameter that a client gives and that is not taken over.

    Raises:
        UserError: for a program that is none, and for tasks that cannot be played.
    """
    description = config.describe()
    tasks = Tasks(seed=seed, evaluation_seed=evaluation_seed, num=description.num_tasks, hashes=description.task_hashes)
    tasks.check_train()
    if config.port:  # each rank has an endpoint
        config = config.model_copy(update={"port": config.port + process_index()})
    player = AgentPlayer(config, on_warning=on_warning)
    return EnvPart(make=None, player=player, description=description, tasks=tasks)


def build_env(
    config: EnvConfig,
    *,
    runner: asyncio.Runner,
    seed: int = 0,
    evaluation_seed: int | None = None,
    timeout_s: float = 60.0,
) -> EnvPart:
    """Make an environment once, with each entry of its schedule too, and describe it and its tasks.

    Args:
        config: section `env` of the recipe.
        runner: event loop on which environments are called.
        seed: of the training tasks.
        evaluation_seed: of the evaluation tasks. None: follows from `seed`.
        timeout_s: deadline of each call (`rollout.env_timeout_s`).

    Raises:
        UserError: if it cannot be made, or has no training tasks; with the entry of the schedule at fault.
    """

    def describe(make: MakeEnv) -> EnvDescription:
        return runner.run(describe_env(make, timeout_s=timeout_s))

    own = describe(config.make)
    makers: list[MakeEnv] = []
    stages: list[Stage] = []
    for index, entry in enumerate(config.schedule):
        makers.append(partial(config.make, index + 1))
        with naming_stage(index):
            found = describe(makers[-1])
            if (found.needs, _tool_names(found)) != (own.needs, _tool_names(own)):
                raise ConfigError(
                    "the environment has other tools, or other data for credit schemes, than with env.options alone; schedule "
                    "what changes neither"
                )
            if found.num_tasks.train == 0:
                raise ConfigError("the environment has no training tasks (num_tasks('train') returned 0)")
        stages.append(Stage(from_step=entry.from_step, num_train=found.num_tasks.train))
    tasks = Tasks(
        seed=seed,
        evaluation_seed=evaluation_seed,
        num=own.num_tasks,
        hashes=own.task_hashes,
        stages=tuple(stages),
    )
    player = EnvPlayer(config.make, stages=makers)
    return EnvPart(make=config.make, player=player, description=own, tasks=tasks)


@contextmanager
def naming_stage(index: int) -> Iterator[None]:
    """Name in errors the entry of the schedule at which they occurred."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"env.schedule.{index}: {error}") from error


def _tool_names(description: EnvDescription) -> list[str]:
    return [tool["function"]["name"] for tool in description.tools]


def build_evaluation_envs(
    config: EvaluationConfig, *, runner: asyncio.Runner, stack: ExitStack, seed: int, timeout_s: float
) -> tuple[EvaluationEnv, ...]:
    """Return the environments that `evaluation.env` names; they are closed with the stack.

    Raises:
        UserError: with the name of the one that cannot be made, or has no evaluation tasks.
    """
    found = []
    for name, env in config.env.items():
        try:
            description = runner.run(describe_env(env.make, timeout_s=timeout_s))
            tasks = Tasks(seed=seed, evaluation_seed=config.seed, num=description.num_tasks)
            tasks.evaluation(1)
        except UserError as error:
            raise type(error)(f"evaluation.env{f'.{name}' if name else ''}: {error}") from error
        player = EnvPlayer(env.make)
        stack.callback(player.close)
        found.append(EvaluationEnv(name=name, player=player, tasks=tasks, has_tools=bool(description.tools)))
    return tuple(found)


def demonstrate(
    env: EnvPart,
    renderer: Renderer,
    *,
    config: WarmupConfig,
    rollout: RolloutConfig,
    count: int,
    runner: asyncio.Runner,
) -> list[Demonstration]:
    """Return episodes that the environment's own policy plays, or the dialogues of a file; on rank 0 for all ranks.

    Args:
        env: plays, and names the tools of a dialogue that does not.
        renderer: turns messages into tokens.
        config: section `warmup` of the recipe.
        rollout: limits.
        count: number of episodes; of a file, all dialogues are read.
        runner: event loop on which environments are called.

    Raises:
        UserError: without an oracle, or for a file that holds something else.
    """
    if (path := config.dialogues) is not None:
        reading = partial(read_dialogues, path, renderer, tools=env.description.tools, view=rollout.history)
        return from_rank_zero(lambda: reading(max_tokens=rollout.max_context_tokens))
    assert env.make is not None, "a recipe with a program has a file of dialogues"
    playing = partial(
        demonstrations, env.make, renderer, count=count, skill=config.skill, config=rollout, tasks=env.tasks
    )
    return from_rank_zero(lambda: runner.run(playing()))


def bytes_tokenizer() -> Any:
    """Return a tokenizer that knows bytes only, and the marks of messages."""
    return train_tokenizer([], vocab_size=261)


def build_tokenizer(
    config: ModelConfig, env: EnvPart, *, warmup: WarmupConfig, rollout: RolloutConfig, runner: asyncio.Runner
) -> Any:
    """Return the tokenizer of a local model: trained on demonstrated dialogues; without a warm-up, one of bytes."""
    as_bytes = bytes_tokenizer()
    if warmup.steps == 0:
        return as_bytes
    played = demonstrate(
        env, ChatMLRenderer(as_bytes), config=warmup, rollout=rollout, count=_TOKENIZER_EPISODES, runner=runner
    )
    texts = [as_bytes.decode(row.ids_L.tolist()) for demonstration in played for row in rows_of(demonstration.turns)]
    return train_tokenizer(texts, vocab_size=config.local.vocab_size)


def build_model(
    config: ModelConfig,
    *,
    max_context_tokens: int,
    num_shards: int = 1,
    tokenizer: Any = None,
) -> ModelPart:
    """Return the model to train, on the CPU; or, if it is sharded, without weights and with this rank's parts of them.

    Args:
        config: section `model` of the recipe.
        max_context_tokens: longest row, in tokens (`rollout.max_context_tokens`).
        num_shards: number of ranks over which each weight is sharded: each reads its part of a checkpoint.
        tokenizer: that of a local model. None: one that knows bytes only.

    Raises:
        ConfigError: for a checkpoint that cannot be loaded, dropout, or contexts that are longer than the model's positions.
    """
    sharded_checkpoint: dict[str, Tensor] = {}
    if config.name_or_path is None:
        tokenizer = bytes_tokenizer() if tokenizer is None else tokenizer
        model = make_local_model(config.local, tokenizer, attention=config.attention)
    else:
        if num_shards > 1:
            model, tokenizer, sharded_checkpoint = load_sharded(
                config.name_or_path, num_shards=num_shards, attention=config.attention
            )
        else:
            model, tokenizer = load_pretrained(config.name_or_path, attention=config.attention)
        fix_frequencies(model, max_context_tokens)
        freeze_towers(model)
    check_dropout(model.config)
    check_positions(model.config, max_context_tokens=max_context_tokens, owner="the model's")
    return ModelPart(model=model, tokenizer=tokenizer, sharded_checkpoint=sharded_checkpoint)


def build_teacher(
    name: str, *, config: ModelConfig, train: TrainConfig, max_context_tokens: int, tokenizer: Any
) -> Policy:
    """Return the model whose log-probabilities a credit scheme reads (`signals.teacher`).

    Raises:
        ConfigError: if it does not read the policy's tokens, or not as many.
    """
    field = "signals.teacher"
    model, other = load_pretrained(name, field=field, attention=config.attention)
    if other.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"{field}: the tokenizer of {name!r} is not the policy's, so its tokens mean something else")
    check_positions(model.config, max_context_tokens=max_context_tokens, owner=f"{field}: the teacher's")
    fix_frequencies(model, max_context_tokens)
    is_half = train.precision == "bfloat16"
    layout, _ = from_rank_zero(lambda: choose_layout(model, "auto", max_tokens=max_context_tokens, half=is_half))
    if is_half:
        model = model.to(torch.bfloat16)
    return Policy(model, layout=layout, field=field)


def check_positions(config: Any, *, max_context_tokens: int, owner: str) -> None:
    """Refuse contexts that are longer than a model has positions."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max_context_tokens > limit:
        raise ConfigError(
            f"rollout.max_context_tokens: {max_context_tokens} exceeds {owner} {limit} positions; lower it"
        )


def task_shard(config: EngineConfig, *, num_groups: int, rank: int = 0, num_ranks: int = 1) -> TaskShard:
    """Return the rank's shard of each step's tasks: an even one for each rank that has an engine.

    Raises:
        ConfigError: if the groups cannot be divided evenly.
    """
    num_sampling = config.num_sampling(num_ranks, num_groups=num_groups)
    if num_groups % num_sampling:
        raise ConfigError(
            f"rollout.num_groups: {num_groups} cannot be dealt out to {num_sampling} processes; set it to a multiple of "
            f"{num_sampling}"
        )
    return TaskShard(num_groups // num_sampling, rank, num_sampling) if rank < num_sampling else TaskShard(0)


def build_engine(
    config: EngineConfig,
    model: Any,
    *,
    rollout: RolloutConfig,
    train: TrainConfig,
    shard: TaskShard,
    device: torch.device,
    handover: Path,
    is_exact: bool = True,
    returns_experts: bool = False,
    lora: LoraSettings | None = None,
) -> Engine:
    """Return the engine of this rank, which samples from a copy of the model's weights.

    Args:
        config: section `engine` of the recipe.
        model: in training; the engine copies it, or reads its form.
        rollout: lengths, and whether it samples during an update.
        train: precision.
        shard: tasks that this rank samples; if there are none, its engine does not sample.
        device: of the engine.
        handover: folder for weights on their way to another process.
        is_exact: samples may depend on nothing but seeds, as long as the recipe allows it. False: a program's calls come when
            they come.
        returns_experts: the engine reports the experts that a mixture chose, which training replays.
        lora: adapters, if these are trained.

    Raises:
        ConfigError: if it cannot be had.
    """
    if returns_experts:
        try:
            experts_of(model)
        except TrainingError as error:
            raise ConfigError(f"loss.routing_replay: {error}; set it to none") from error
    if not shard.num_groups:
        return IdleEngine()
    context = EngineContext(
        model=model,
        device=device,
        dtype=torch.bfloat16 if train.precision == "bfloat16" else model.dtype,
        shard=shard,
        handover=handover,
        max_context_tokens=rollout.max_context_tokens,
        max_live_episodes=rollout.live_episodes(shard.num_groups),
        repeats_exactly=is_exact and rollout.repeats_exactly(device.type),
        samples_during_update=rollout.samples_during_update,
        keeps_cache=rollout.keep_cache,
        returns_experts=returns_experts,
        adapters=_adapters(model, lora),
    )
    if rollout.keep_cache and context.adapters is not None and is_half(context.dtype):
        raise ConfigError(
            "rollout.keep_cache: actions under way lose an adapter that is replaced; set model.lora.merge: true"
        )
    engine = config.build(context)
    if rollout.keep_cache and not isinstance(engine, FreezableEngine):
        raise ConfigError(f"rollout.keep_cache: engine.name: {config.name} keeps no cache; set it to vllm_server")
    if context.adapters is not None and is_half(context.dtype) and not isinstance(engine, AdapterEngine):
        raise merging_refused(f"engine.name: {config.name} takes merged weights only")
    return engine


def _adapters(model: Any, lora: LoraSettings | None) -> Adapters | None:
    """Return the adapters that an engine may not merge."""
    if lora is None or lora.merge:
        return None
    return Adapters(rank=lora.rank, layers=tuple(find_layers(model, lora.target_modules)))


def build_pool(
    config: RolloutConfig,
    env: EnvPart,
    *,
    engine: Engine,
    renderer: Renderer,
    shard: TaskShard,
    tokenizer: Any = None,
    fork: bool = False,
    journal: Journal | None = None,
    on_fault: Callable[[Trajectory], object] = lambda _: None,
) -> RolloutPool:
    """Return the pool of episodes that are played in an environment on an engine.

    Args:
        config: section `rollout` of the recipe.
        env: plays them.
        engine: samples their actions.
        renderer: turns messages into tokens.
        shard: tasks that this rank samples.
        tokenizer: gives the text of tokens to a program that plays. None: it asks for no stop strings.
        fork: rollouts are forked from the episodes' turns.
        journal: keeps the samples, for a run that is killed.
        on_fault: called with each episode whose environment failed.
    """
    return RolloutPool(
        player=env.player,
        context=EpisodeContext(
            engine=engine,
            renderer=renderer,
            config=config,
            decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        ),
        tasks=env.tasks,
        fork=fork,
        shard=shard,
        journal=journal,
        on_fault=on_fault,
    )


def build_policy(
    config: ModelConfig, loaded: ModelPart, *, train: TrainConfig, max_context_tokens: int, device: torch.device
) -> PolicyPart:
    """Return the model as it is trained: with its adapters, on its device, its rows in a layout that is proven.

    Build the engine before: it copies the model without adapters.
    """
    model, is_half = loaded.model, train.precision == "bfloat16"
    is_rounded = config.lora is not None and is_half
    is_whole = not (loaded.sharded_checkpoint or is_rounded)
    if is_whole:
        model.to(device)
    if config.lora is not None:
        add_lora(model, config.lora)
    if train.gradient_checkpointing:
        checkpoint_layers(model, every=int(train.gradient_checkpointing))

    def choose() -> tuple[Layout, str | None]:  # in float32: rounding would hide differences
        probed = model if is_whole else small_like(model, device)
        check_head(probed)
        return choose_layout(probed, train.layout, max_tokens=max_context_tokens, half=is_half)

    layout, warning = from_rank_zero(choose)
    if is_rounded:  # before it goes to the device, which may have no room for it in float32
        round_frozen(model)
        if not loaded.sharded_checkpoint:
            model.to(device)
    if train.compile == "layers":
        compile_layers(model, device)
    return PolicyPart(Policy(model, layout=layout, sharded_checkpoint=loaded.sharded_checkpoint), warning)


def build_reference(policy: Policy, *, is_sharded: bool) -> Policy:
    """Return a copy of the policy, which keeps the weights of today. It shares frozen weights, unless it is sharded."""
    frozen = [] if is_sharded else [p for p in policy.parameters() if not p.requires_grad]
    return copy.deepcopy(policy, {id(p): p for p in frozen})


def build_learner(
    config: LossConfig,
    policy: Policy,
    *,
    train: TrainConfig,
    accelerator: Accelerator,
    temperature: float = 1.0,
    seed: int = 0,
    reference: Policy | None = None,
) -> Learner:
    """Return the learner, which updates the policy from credited trajectories.

    Args:
        config: section `loss` of the recipe.
        policy: to train.
        train: optimizer, minibatches and budgets.
        accelerator: this rank's.
        temperature: of the rollouts.
        seed: of the drawing of minibatches.
        reference: KL target. None: there is no KL term, and no scheme reads one.
    """
    state = PolicyState(policy, accelerator=accelerator, config=train, reference=reference)
    return Learner(state, loss=config, config=train, temperature=temperature, seed=seed)
