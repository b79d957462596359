"""A whole recipe becomes the parts of a run, wired together, on each of its ranks."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from agentrl.chat import ChatMLRenderer, Renderer, describe, load_tokenizer, pretrained_tokenizer
from agentrl.chat.chat_template import TOOLS, USER
from agentrl.credit import CreditScheme, load_credit_for
from agentrl.data.files import absolute, moved_to
from agentrl.distributed.processes import from_rank_zero, is_main, num_processes, process_index
from agentrl.engine import Engine
from agentrl.errors import ConfigError
from agentrl.learn.learner import Learner
from agentrl.learn.signals import hints, provided_by
from agentrl.learn.signals.base import SignalContext
from agentrl.learn.signals.signals import Signals
from agentrl.policy.model import Policy, check_attention, open_config
from agentrl.recipe.config import Recipe
from agentrl.report.folder import RunFolder
from agentrl.report.log import FaultLog
from agentrl.report.records import pieces_of
from agentrl.report.terminal import announce
from agentrl.report.trackers import check_trackers
from agentrl.rollout import EnvPlayer, Journal, RolloutPool, Tasks, check_limits, try_environment
from agentrl.run.parts import (
    EnvPart,
    EvaluationEnv,
    ModelPart,
    build_accelerator,
    build_agent,
    build_engine,
    build_env,
    build_evaluation_envs,
    build_learner,
    build_model,
    build_policy,
    build_pool,
    build_reference,
    build_teacher,
    build_tokenizer,
    bytes_tokenizer,
    check_positions,
    demonstrate,
    task_shard,
)
from agentrl.run.weight_sync import WeightSync
from agentrl.types import Need, TaskShard, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a run."""

    recipe: Recipe
    """With the name of its folder, which rank 0 chose."""
    warnings: tuple[str, ...]
    """Printed before anything begins."""
    on_warning: Callable[[str], object]
    """Called with a few lines about a problem during training."""
    runner: asyncio.Runner
    """Event loop on which pool and engine live."""
    env: EnvPart
    """The environment and its tasks."""
    tokenizer: Any
    policy: Policy
    """In training; its optimizer and schedule are the learner's."""
    engine: Engine
    """Samples, from weights that are synced to it."""
    pool: RolloutPool
    """Plays episodes on the engine."""
    evaluation_envs: tuple[EvaluationEnv, ...]
    """To evaluate in."""
    credit: CreditScheme
    """Turns rewards into advantages."""
    signals: Signals
    """Measures the signals that `credit` reads beyond rewards and keys."""
    learner: Learner
    """Updates the weights."""
    weight_sync: WeightSync
    """Syncs the weights to the engine."""

    @property
    def env_players(self) -> list[tuple[EnvPlayer, Tasks]]:
        """Environments that are played in, with their tasks: that of training first, if no program plays."""
        others = self.evaluation_envs if self.recipe.evaluation.env else ()
        players = [(self.env.player, self.env.tasks), *((other.player, other.tasks) for other in others)]
        return [(player, tasks) for player, tasks in players if isinstance(player, EnvPlayer)]


@contextmanager
def build(
    recipe: Recipe, *, tokenizer_folder: Path | None = None, on_warning: Callable[[str], object] = lambda _: None
) -> Iterator[Parts]:
    """Build the parts of a run, and touch no file; at exit, release threads, the engine and the event loop.

    Args:
        recipe: recipe of the run.
        tokenizer_folder: the tokenizer of a run that is resumed; None: the model's own, or one is trained.
        on_warning: called with a few lines about a problem during training.

    Raises:
        UserError: if anything in the recipe cannot be carried out.
    """
    with ExitStack() as stack:
        yield _build(recipe, stack, tokenizer_folder=tokenizer_folder, on_warning=on_warning)


def _build(
    given: Recipe, stack: ExitStack, *, tokenizer_folder: Path | None, on_warning: Callable[[str], object]
) -> Parts:
    check_trackers(given.report.trackers)
    accelerator = build_accelerator(given.train)
    recipe = from_rank_zero(lambda: given)  # with the time of day in the name of its folder
    num_groups = recipe.rollout.num_groups
    shard = task_shard(recipe.engine, num_groups=num_groups, rank=process_index(), num_ranks=num_processes())
    set_seed(recipe.seed)
    runner = stack.enter_context(asyncio.Runner())
    limits = check_limits(recipe.rollout.live_episodes(shard.num_groups))
    env, others = _build_envs(recipe, runner, stack, on_warning=on_warning)
    credit, lack = _load_credit(recipe, env)
    check_attention(recipe.model.attention, accelerator.device, is_half=recipe.train.precision == "bfloat16")
    renderer: Renderer | None = None
    if recipe.model.name_or_path is not None:
        is_begun = tokenizer_folder is not None
        renderer = _check_dialogues(recipe, env, others, credit, runner, is_begun=is_begun)
    loaded = _load_model(recipe, env, credit, runner, tokenizer_folder=tokenizer_folder)
    renderer = renderer or recipe.chat.build(loaded.tokenizer, name="local")
    has_tools = bool(env.description.tools)
    engine = _open_engine(recipe, loaded, shard, accelerator.device, runner, stack)
    on_fault = partial(_warn_fault, FaultLog(recipe.run_dir, piece=pieces_of(loaded.tokenizer)), engine, on_warning)
    pool = build_pool(
        recipe.rollout,
        env,
        engine=engine,
        renderer=renderer,
        shard=shard,
        tokenizer=loaded.tokenizer,
        fork=reads_branches(credit),
        journal=_journal(recipe, accelerator.device),
        on_fault=on_fault,
    )
    _close_with(stack, runner, pool)
    learner, signals, layout_warning = _build_trained(recipe, env, credit, loaded, renderer, accelerator)
    own = EvaluationEnv(name="", player=env.player, tasks=env.tasks, has_tools=has_tools)
    warnings = [
        *limits,
        lack,
        *(each.tasks.fewer_tasks_warning(recipe.evaluation.num_tasks) for each in others or (own,)),
        *describe(renderer).notes,
        layout_warning,
    ]
    return Parts(
        recipe=recipe,
        warnings=tuple(filter(None, warnings)),
        on_warning=on_warning,
        runner=runner,
        env=env,
        tokenizer=loaded.tokenizer,
        policy=learner.state.policy,
        engine=engine,
        pool=pool,
        evaluation_envs=others or (own,),
        credit=credit,
        signals=signals,
        learner=learner,
        weight_sync=_weight_sync(recipe, pool, learner, runner),
    )


def check_before_loading(recipe: Recipe) -> Renderer | None:
    """Make the environments of a recipe and check what training needs of them and of a pretrained model, without its weights.

    Returns: the model's renderer. None: a model is made.

    Raises:
        UserError: naming the field and the fix.
    """
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        env, others = _build_envs(recipe, runner, stack)
        credit, _ = _load_credit(recipe, env)
        if recipe.model.name_or_path is None:
            return None
        return _check_dialogues(recipe, env, others, credit, runner)


def _check_dialogues(
    recipe: Recipe,
    env: EnvPart,
    others: tuple[EvaluationEnv, ...],
    credit: CreditScheme,
    runner: asyncio.Runner,
    *,
    is_begun: bool = False,
) -> Renderer:
    """Return the renderer of a pretrained model, after writing with it what the run will: all of it before weights are loaded.

    Raises:
        UserError: if the model's positions, its chat template, the environment's first prompt or the demonstrations do not fit.
    """
    name, rollout = str(recipe.model.name_or_path), recipe.rollout
    _, config = open_config(name, field="model.name_or_path")
    check_positions(config, max_context_tokens=rollout.max_context_tokens, owner="the model's")
    renderer = recipe.chat.build(pretrained_tokenizer(name), name=name)
    if env.description.tools or any(other.has_tools for other in others):
        renderer.start([USER], TOOLS)
    if env.make is not None:
        trial = try_environment(
            make_env=env.make, renderer=renderer, config=rollout, tasks=env.tasks, fork=reads_branches(credit)
        )
        runner.run(trial)
    if not is_begun and (recipe.warmup.steps or recipe.loss.reads_demonstrations):
        demonstrate(env, renderer, config=recipe.warmup, rollout=rollout, count=1, runner=runner)
    return renderer


def _weight_sync(recipe: Recipe, pool: RolloutPool, learner: Learner, runner: asyncio.Runner) -> WeightSync:
    lora = recipe.model.lora
    return WeightSync(
        pool,
        learner,
        runner=runner,
        seed=recipe.seed,
        config=recipe.train,
        overrides=recipe.engine.overrides,
        merges_into=getattr(torch, recipe.train.precision) if lora is not None and lora.merge else None,
    )


def _close_with(stack: ExitStack, runner: asyncio.Runner, pool: RolloutPool) -> None:
    """Stop the pool's episodes and close its environments when the stack is closed."""
    stack.callback(pool.close)
    stack.callback(lambda: runner.run(pool.stop()))


def _load_credit(recipe: Recipe, env: EnvPart) -> tuple[CreditScheme, str | None]:
    """Return the scheme, and what the environment lacks if it is the recipe's fallback."""
    provided = env.description.needs | provided_by(recipe.signals)
    for need in sorted(recipe.loss.needs() - provided):
        raise ConfigError(f"loss.distill_coefficient: it needs {need}; set {hints()[need]}, or it to 0")
    return load_credit_for(recipe.credit, provided=provided, hints=hints(), env_id=recipe.player_id)


def _build_envs(
    recipe: Recipe,
    runner: asyncio.Runner,
    stack: ExitStack,
    *,
    on_warning: Callable[[str], object] = lambda _: None,
) -> tuple[EnvPart, tuple[EvaluationEnv, ...]]:
    """Build the environment to train in, and those that `evaluation.env` names."""
    seed, timeout_s = recipe.seed, recipe.rollout.env_timeout_s
    held_out = recipe.evaluation.seed
    if recipe.agent is not None:
        env = build_agent(recipe.agent, seed=seed, evaluation_seed=held_out, on_warning=on_warning)
    else:
        env = build_env(recipe.env, runner=runner, seed=seed, evaluation_seed=held_out, timeout_s=timeout_s)
    others = build_evaluation_envs(recipe.evaluation, runner=runner, stack=stack, seed=seed, timeout_s=timeout_s)
    if not others:
        env.tasks.evaluation(1)  # refused here, if there are none
    return env, others


class _Trained(NamedTuple):
    learner: Learner
    signals: Signals
    warning: str | None


def _build_trained(
    recipe: Recipe, env: EnvPart, credit: CreditScheme, loaded: ModelPart, renderer: Renderer, accelerator: Accelerator
) -> _Trained:
    """Build the trained parts: the policy with its learner, and the signals that the credit scheme reads."""
    rollout, train = recipe.rollout, recipe.train
    announce("proving which layout of rows is exact")
    policy, warning = build_policy(
        recipe.model, loaded, train=train, max_context_tokens=rollout.max_context_tokens, device=accelerator.device
    )
    is_sharded = train.is_sharded(num_processes())
    has_reference = recipe.loss.kl_coefficient > 0 or Need.REFERENCE_LOGPROBS in credit.requirements()
    reference = build_reference(policy, is_sharded=is_sharded) if has_reference else None
    signals = Signals(
        SignalContext(
            scheme=credit,
            loss_needs=recipe.loss.needs(),
            config=recipe.signals,
            policy=policy,
            reference=reference,
            load_teacher=partial(_load_teacher, recipe, loaded.tokenizer),
            renderer=renderer,
            tools=env.description.tools,
            history=rollout.history,
            temperature=rollout.temperature,
            max_tokens=train.max_tokens_per_micro_batch,
            is_sharded=is_sharded,
            seed=recipe.seed,
            autocast=accelerator.autocast,
        )
    )
    learner = build_learner(
        recipe.loss,
        policy,
        train=train,
        accelerator=accelerator,
        temperature=rollout.temperature,
        seed=recipe.seed,
        reference=reference,
    )
    return _Trained(learner, signals, warning)


def reads_branches(credit: CreditScheme) -> bool:
    """Return whether a scheme reads rollouts that are forked from an episode's turns."""
    return Need.BRANCHES in credit.requirements()


def _load_model(
    recipe: Recipe, env: EnvPart, credit: CreditScheme, runner: asyncio.Runner, *, tokenizer_folder: Path | None
) -> ModelPart:
    rollout, tokenizer = recipe.rollout, None
    if (name := recipe.model.name_or_path) is not None:
        announce(f"loading {name}")
    else:
        announce("making a model and its tokenizer")
        if env.make is not None:
            # Demonstrations for the tokenizer are about to be played; the context is measured once there is one.
            trial = try_environment(
                make_env=env.make,
                renderer=ChatMLRenderer(bytes_tokenizer()),
                config=rollout.model_copy(update={"max_context_tokens": 2**31}),
                tasks=env.tasks,
                fork=reads_branches(credit),
            )
            runner.run(trial)
        if tokenizer_folder is None:
            tokenizer = build_tokenizer(recipe.model, env, warmup=recipe.warmup, rollout=rollout, runner=runner)
        else:
            tokenizer = load_tokenizer(tokenizer_folder)
    return build_model(
        recipe.model,
        max_context_tokens=rollout.max_context_tokens,
        num_shards=recipe.train.num_shards(num_processes()),
        tokenizer=tokenizer,
    )


def _load_teacher(recipe: Recipe, tokenizer: Any) -> Policy:
    name = recipe.signals.teacher
    assert name is not None, "a scheme that reads a teacher is refused without one"
    return build_teacher(
        name,
        config=recipe.model,
        train=recipe.train,
        max_context_tokens=recipe.rollout.max_context_tokens,
        tokenizer=tokenizer,
    )


def _open_engine(
    recipe: Recipe, loaded: ModelPart, shard: TaskShard, device: torch.device, runner: asyncio.Runner, stack: ExitStack
) -> Engine:
    """Build the engine; it is closed with the stack."""
    announce(f"starting the engine ({recipe.engine.name})")
    handover = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-weights-")))
    engine = build_engine(
        recipe.engine,
        loaded.model,
        rollout=recipe.rollout,
        train=recipe.train,
        shard=shard,
        device=device,
        handover=handover,
        is_exact=recipe.agent is None,
        returns_experts=recipe.loss.routing_replay == "engine",
        lora=recipe.model.lora,
    )
    stack.callback(lambda: runner.run(engine.close()))
    return engine


def warn_of_move(parts: Parts, env_id: str) -> None:
    """Warn if an environment has changed the working directory of the process, the first time."""
    if (now := moved_to()) is not None and is_main():
        parts.on_warning(
            f"the environment {env_id!r} changed the working directory to {now}: paths of the recipe still begin in "
            f"{absolute('')}, and others of the environment's own code do not"
        )


def _warn_fault(faults: FaultLog, engine: Engine, on_warning: Callable[[str], object], trajectory: Trajectory) -> None:
    """Warn of an episode whose environment failed, if it is the first of its kind."""
    if (words := faults.add(trajectory, step=engine.version + 1)) is not None:
        on_warning(words)


def _journal(recipe: Recipe, device: torch.device) -> Journal | None:
    """Return this rank's journal. None: after a kill the same episodes are sampled again.

    A run that has one keeps it: it may hold episodes of another engine, which would not be sampled again.
    """
    if recipe.run_dir is None:
        return None
    folder = RunFolder(recipe.run_dir).journal
    repeats = recipe.agent is None and recipe.rollout.repeats_exactly(device.type) and recipe.engine.is_deterministic
    if repeats and not folder.is_dir():
        return None
    return Journal(folder if is_main() else folder / f"process-{process_index()}")
