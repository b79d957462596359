"""A recipe becomes the parts of a run, wired together: in each of its processes."""

import asyncio
import copy
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed

from agentrl.chat import ChatMLRenderer, describe
from agentrl.chat.chat_template import TOOLS, USER
from agentrl.credit import CreditScheme, load_credit_for
from agentrl.distributed.processes import from_rank_zero, is_main, num_processes, process_index, set_deadline
from agentrl.engine import Engine
from agentrl.env import EnvDescription
from agentrl.errors import ConfigError
from agentrl.learn.learner import Learner
from agentrl.learn.policy_state import PolicyState
from agentrl.learn.signals import hints, provided_by
from agentrl.learn.signals.base import SignalContext
from agentrl.learn.signals.signals import Signals
from agentrl.policy.config import Layout
from agentrl.policy.layout import check_head, choose_layout
from agentrl.policy.lora import add_lora, round_frozen
from agentrl.policy.model import Policy, check_attention, check_dropout
from agentrl.policy.sharded_checkpoint import small_like
from agentrl.recipe.config import Recipe
from agentrl.report.folder import RunFolder
from agentrl.report.log import FaultLog
from agentrl.report.records import pieces_of
from agentrl.report.trackers import check_trackers
from agentrl.rollout import EpisodeContext, Journal, RolloutPool, Tasks, check_limits, describe_env, try_environment
from agentrl.run.parts import (
    EvaluationEnv,
    Loaded,
    check_positions,
    describe_others,
    describe_stages,
    load_model,
    load_teacher,
    make_bytes_tokenizer,
    makers,
    new_engine,
    own_env,
    share_of,
)
from agentrl.run.weight_sync import EngineLink
from agentrl.types import Need, Share, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of."""

    recipe: Recipe
    """With the name of its folder, the first process's."""
    warnings: tuple[str, ...]
    """What to tell before anything begins."""
    on_warning: Callable[[str], object]
    """Told, in a few lines, what goes wrong while it trains."""
    runner: asyncio.Runner
    """Event loop on which pool and engine live."""
    tokenizer: Any
    policy: Policy
    """In training; its optimizer and schedule are the learner's."""
    engine: Engine
    """Samples, from weights that are pushed to it."""
    pool: RolloutPool
    """Plays episodes on the engine."""
    evaluation_envs: tuple[EvaluationEnv, ...]
    """To evaluate in."""
    credit: CreditScheme
    """Turns rewards into advantages."""
    signals: Signals
    """Measures what `credit` reads beyond rewards and keys."""
    learner: Learner
    """Updates the weights."""
    link: EngineLink
    """Hands the weights to the engine."""


@contextmanager
def build(
    recipe: Recipe, *, tokenizer_folder: Path | None = None, on_warning: Callable[[str], object] = lambda _: None
) -> Iterator[Parts]:
    """Build the parts of a run, and touch no file; at exit, release threads, the engine and the event loop.

    Args:
        recipe: what to run.
        tokenizer_folder: the tokenizer of a run that is resumed; None: the model's own, or one is trained.
        on_warning: told, in a few lines, what goes wrong while it trains.

    Raises:
        UserError: for whatever in the recipe cannot be carried out.
    """
    with ExitStack() as stack:
        yield _build(recipe, stack, tokenizer_folder=tokenizer_folder, on_warning=on_warning)


def _build(
    given: Recipe, stack: ExitStack, *, tokenizer_folder: Path | None, on_warning: Callable[[str], object]
) -> Parts:
    accelerator = _new_accelerator(given)
    recipe = from_rank_zero(lambda: given)  # with the time of day in the name of its folder
    share = share_of(recipe, process_index(), num_processes())
    set_seed(recipe.seed)
    runner = stack.enter_context(asyncio.Runner())
    limits = check_limits(recipe.rollout.max_live_episodes)

    description = runner.run(describe_env(recipe.env.make, timeout_s=recipe.rollout.env_timeout_s))
    stages = describe_stages(recipe, description, runner)
    tasks = Tasks(
        seed=recipe.seed,
        evaluation_seed=recipe.evaluation.seed,
        num=description.num_tasks,
        hashes=description.task_hashes,
        stages=stages,
    )
    others = describe_others(recipe, runner, stack)
    if not others:
        tasks.evaluation(1)  # refused here, where there are none
    credit, lack = _load_credit(recipe, description)
    is_half = recipe.train.precision == "bfloat16"
    check_attention(recipe.model.attention, accelerator.device, is_half=is_half)
    loaded = _load_model(recipe, credit, tasks, runner, tokenizer_folder=tokenizer_folder)
    model, tokenizer = loaded.model, loaded.tokenizer
    renderer = recipe.chat.build(tokenizer, name=str(recipe.model.name_or_path or "local"))
    if description.tools or any(other.has_tools for other in others):
        renderer.start([USER], TOOLS)  # refused here, before anything is sampled
    engine = _new_engine(recipe, share, model, accelerator.device, runner, stack)
    on_fault = partial(_tell_fault, FaultLog(recipe.run_dir, piece=pieces_of(tokenizer)), engine, on_warning)
    pool = RolloutPool(
        make_env=recipe.env.make,
        context=EpisodeContext(engine=engine, renderer=renderer, config=recipe.rollout),
        tasks=tasks,
        fork=reads_branches(credit),
        share=share,
        journal=_journal(recipe),
        on_fault=on_fault,
    )
    pool.environments.stages = makers(recipe)
    stack.callback(pool.close)
    stack.callback(lambda: runner.run(pool.stop()))

    policy, layout = _new_policy(recipe, loaded, accelerator.device)
    reference = _new_reference(recipe, credit, policy)
    signals = Signals(
        SignalContext(
            scheme=credit,
            config=recipe.signals,
            policy=policy,
            reference=reference,
            load_teacher=partial(load_teacher, recipe, tokenizer),
            renderer=renderer,
            tools=description.tools,
            history=recipe.rollout.history,
            temperature=recipe.rollout.temperature,
            max_tokens=recipe.train.max_tokens_per_micro_batch,
            is_sharded=recipe.train.is_sharded(num_processes()),
            seed=recipe.seed,
            autocast=accelerator.autocast,
        )
    )
    state = PolicyState(policy, accelerator=accelerator, config=recipe.train, reference=reference)
    learner = Learner(
        state, loss=recipe.loss, config=recipe.train, temperature=recipe.rollout.temperature, seed=recipe.seed
    )
    evaluation_envs = others or (own_env(pool, has_tools=bool(description.tools)),)
    few = [each.tasks.words_if_fewer(recipe.evaluation.num_tasks) for each in evaluation_envs]
    warnings = [
        *recipe.loss.warnings(staleness_bound=recipe.rollout.staleness_bound),
        *limits,
        lack,
        *few,
        *describe(renderer).notes,
        layout,
    ]
    return Parts(
        recipe=recipe,
        warnings=tuple(filter(None, warnings)),
        on_warning=on_warning,
        runner=runner,
        tokenizer=tokenizer,
        policy=policy,
        engine=engine,
        pool=pool,
        evaluation_envs=evaluation_envs,
        credit=credit,
        signals=signals,
        learner=learner,
        link=EngineLink(pool, learner, runner=runner, seed=recipe.seed, agreement=recipe.train.agreement_bound()),
    )


def reads_branches(credit: CreditScheme) -> bool:
    """Tell whether a scheme reads rollouts that are forked from an episode's turns."""
    return Need.BRANCHES in credit.requirements()


def _load_credit(recipe: Recipe, description: EnvDescription) -> tuple[CreditScheme, str | None]:
    """Return the scheme, and what the environment lacks where it is the recipe's fallback."""
    provided = description.needs | provided_by(recipe.signals)
    return load_credit_for(recipe.credit, provided=provided, hints=hints(), env_id=recipe.env.id)


def _load_model(
    recipe: Recipe, credit: CreditScheme, tasks: Tasks, runner: asyncio.Runner, *, tokenizer_folder: Path | None
) -> Loaded:
    """Return the model to train, refused where it does not fit the recipe."""
    if recipe.model.name_or_path is None:
        # Demonstrations for the tokenizer are about to be played; the context is measured once there is one.
        trial = try_environment(
            make_env=recipe.env.make,
            renderer=ChatMLRenderer(make_bytes_tokenizer()),
            config=recipe.rollout.model_copy(update={"max_context_tokens": 2**31}),
            tasks=tasks,
            fork=reads_branches(credit),
        )
        runner.run(trial)
    loaded = load_model(recipe, runner, tasks=tasks, tokenizer_folder=tokenizer_folder)
    check_dropout(loaded.model.config)
    check_positions(recipe, loaded.model.config)
    return loaded


def _new_engine(
    recipe: Recipe, share: Share, model: Any, device: torch.device, runner: asyncio.Runner, stack: ExitStack
) -> Engine:
    handover = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-weights-")))
    engine = new_engine(recipe, share, model, device, handover=handover)
    stack.callback(lambda: runner.run(engine.close()))
    return engine


def _tell_fault(faults: FaultLog, engine: Engine, on_warning: Callable[[str], object], trajectory: Trajectory) -> None:
    """Tell of an episode whose environment failed, where it is the first of its kind."""
    if (words := faults.add(trajectory, step=engine.version + 1)) is not None:
        on_warning(words)


def _journal(recipe: Recipe) -> Journal | None:
    """Return this process's journal. None: what is sampled again after a kill is what was sampled before.

    A run that has one keeps it: with another engine it may hold what is not sampled again so.
    """
    if recipe.run_dir is None:
        return None
    folder = RunFolder(recipe.run_dir).journal
    if recipe.rollout.repeats_exactly and recipe.engine.is_deterministic and not folder.is_dir():
        return None
    return Journal(folder if is_main() else folder / f"process-{process_index()}")


def _new_policy(recipe: Recipe, loaded: Loaded, device: torch.device) -> tuple[Policy, str | None]:
    """Return the model as it is trained, and what to tell of the layout of its rows."""
    model, is_half = loaded.model, recipe.train.precision == "bfloat16"
    is_rounded = recipe.model.lora is not None and is_half and not recipe.train.is_sharded(num_processes())
    is_whole = not (loaded.shares or is_rounded)
    if is_whole:
        model.to(device)
    if recipe.model.lora is not None:
        add_lora(model, recipe.model.lora)
    if recipe.train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    max_tokens = recipe.rollout.max_context_tokens

    def choose() -> tuple[Layout, str | None]:  # in float32: rounding would hide differences
        probed = model if is_whole else small_like(model, device)
        check_head(probed)
        return choose_layout(probed, recipe.train.layout, max_tokens=max_tokens, half=is_half)

    layout, warning = from_rank_zero(choose)
    if is_rounded:  # before it goes to the device, which may have no room for it in float32
        round_frozen(model)
        model.to(device)
    return Policy(model, layout=layout, shares=loaded.shares), warning


def _new_reference(recipe: Recipe, credit: CreditScheme, policy: Policy) -> Policy | None:
    """Return a copy of the policy, where something reads one. It shares what is not trained; but shards have one owner."""
    if recipe.loss.kl_coefficient == 0 and Need.REFERENCE_LOGPROBS not in credit.requirements():
        return None
    is_sharded = recipe.train.is_sharded(num_processes())
    frozen = [p for p in policy.parameters() if not p.requires_grad and not is_sharded]
    return copy.deepcopy(policy, {id(p): p for p in frozen})


def _new_accelerator(recipe: Recipe) -> Accelerator:
    # Said at every checkpoint of a model whose head and embedding are one tensor, which is then written once.
    logging.getLogger("accelerate.utils.other").addFilter(lambda line: "Removed shared tensor" not in line.getMessage())
    check_trackers(recipe.report.trackers)
    timeout_s = recipe.train.process_timeout_s
    set_deadline(timeout_s)
    number, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if recipe.train.device == "auto" and 0 < num_gpus <= number:
        raise ConfigError(
            f"--processes: one for each GPU, of which this machine has {num_gpus}; or set train.device: cpu"
        )
    # Apple's GPUs have no float64. And accelerate knows of no other processes where it looks for a GPU and finds none.
    has_gpu = torch.accelerator.is_available() and not torch.backends.mps.is_available()
    return Accelerator(
        cpu=recipe.train.device == "cpu" or not has_gpu,
        mixed_precision="bf16" if recipe.train.precision == "bfloat16" else "no",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))],
    )
