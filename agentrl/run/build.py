"""A recipe becomes the parts of a run, wired together: in each of its processes."""

import asyncio
import copy
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import InitProcessGroupKwargs, set_seed

from agentrl.chat import ChatMLRenderer, Renderer
from agentrl.config import Recipe
from agentrl.credit import CreditScheme, load_credit_for
from agentrl.distributed.processes import from_rank_zero, num_processes, process_index, set_deadline
from agentrl.engine import Engine
from agentrl.env import make_env
from agentrl.errors import ConfigError
from agentrl.learn.learner import Learner
from agentrl.learn.policy_state import PolicyState
from agentrl.learn.signals import hints, provided_by
from agentrl.learn.signals.base import SignalContext
from agentrl.learn.signals.signals import Signals
from agentrl.policy.layout import choose_layout
from agentrl.policy.lora import add_lora
from agentrl.policy.model import Policy, check_dropout
from agentrl.report.faults import FaultLog, ToldFaults
from agentrl.report.folder import RunFolder
from agentrl.rollout import EpisodeContext, RolloutPool, Share, check_limits, describe_env, try_environment
from agentrl.rollout.env_calls import MakeEnv
from agentrl.run.engine_link import EngineLink
from agentrl.run.engines import new_engine, share_of
from agentrl.run.models import check_positions, load_model, load_teacher, make_bytes_tokenizer
from agentrl.types import Need, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of."""

    recipe: Recipe
    """With the name of its folder, the first process's."""
    share: Share
    """What this process collects."""
    warnings: list[str]
    """What to tell before anything begins."""
    on_warning: Callable[[str], object]
    """Told, in a few lines, what goes wrong while it trains."""
    on_fault: Callable[[Trajectory], None]
    """Told of each episode whose environment failed: each kind is told once, and kept where the recipe names a folder."""
    accelerator: Accelerator
    runner: asyncio.Runner
    """Event loop on which pool and engine live."""
    make_env: MakeEnv
    tokenizer: Any
    piece: Callable[[int], str]
    """Gives the text of one token."""
    renderer: Renderer
    engine: Engine
    """Samples, from weights that are pushed to it."""
    pool: RolloutPool
    """Plays episodes on the engine."""
    forks: bool
    """The credit scheme reads rollouts that are forked from an episode's turns."""
    credit: CreditScheme
    """Turns rewards into advantages."""
    falls_back: bool
    """`credit` is the recipe's fallback: the environment cannot serve its scheme."""
    signals: Signals
    """Measures what `credit` reads beyond rewards and keys."""
    state: PolicyState
    """The weights, their optimizer, and the policy with which the run began."""
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
    warnings = given.loss.warnings()
    accelerator = _make_accelerator(given)
    recipe = from_rank_zero(lambda: given)  # with the time of day in the name of its folder
    rollout, train = recipe.rollout, recipe.train
    share = share_of(recipe, process_index(), num_processes())
    warnings += check_limits(rollout.max_live_episodes)
    set_seed(recipe.seed)
    handover = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-weights-")))
    runner = stack.enter_context(asyncio.Runner())

    new_env = partial(make_env, recipe.env.id, recipe.env.options)
    description = runner.run(describe_env(new_env, timeout_s=rollout.env_timeout_s))
    provided = description.needs | provided_by(recipe.signals)
    credit, lack = load_credit_for(recipe.credit, provided=provided, hints=hints(), env_id=recipe.env.id)
    warnings += [lack] if lack else []
    forks = Need.BRANCHES in credit.requirements()

    if recipe.model.name_or_path is None:
        # Demonstrations for the tokenizer are about to be played; the context is measured once there is one.
        renderer: Renderer = ChatMLRenderer(make_bytes_tokenizer())
        boundless = rollout.model_copy(update={"max_context_tokens": 2**31})
        runner.run(try_environment(make_env=new_env, renderer=renderer, config=boundless, seed=recipe.seed, fork=forks))
    model, tokenizer = load_model(recipe, new_env, runner, tokenizer_folder=tokenizer_folder)
    check_dropout(model.config)
    check_positions(recipe, model.config)
    renderer = recipe.chat.build(tokenizer, name=str(recipe.model.name_or_path or "local"))
    piece = cache(lambda token: str(tokenizer.decode([token])))

    engine = new_engine(recipe, share, model, accelerator.device, handover=handover)
    stack.callback(lambda: runner.run(engine.close()))
    faults = ToldFaults() if recipe.run_dir is None else FaultLog(RunFolder(recipe.run_dir), piece=piece)

    def on_fault(trajectory: Trajectory) -> None:
        if (words := faults.add(trajectory, step=engine.version + 1)) is not None:
            on_warning(words)

    pool = RolloutPool(
        make_env=new_env,
        context=EpisodeContext(engine=engine, renderer=renderer, config=rollout),
        seed=recipe.seed,
        fork=forks,
        share=share,
        on_fault=on_fault,
    )
    stack.callback(pool.close)
    stack.callback(lambda: runner.run(pool.stop()))

    model.to(accelerator.device)
    if recipe.model.lora is not None:
        add_lora(model, recipe.model.lora)
    if train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layout, warning = from_rank_zero(lambda: choose_layout(model, train.layout, max_tokens=rollout.max_context_tokens))
    warnings += [warning] if warning else []
    policy = Policy(model, layout=layout)
    needs_reference = recipe.loss.kl_coefficient > 0 or Need.REFERENCE_LOGPROBS in credit.requirements()
    reference = _copy(policy, is_sharded=train.sharding == "full") if needs_reference else None
    signals = Signals(
        SignalContext(
            scheme=credit,
            config=recipe.signals,
            policy=policy,
            reference=reference,
            load_teacher=partial(load_teacher, recipe, tokenizer),
            renderer=renderer,
            tools=description.tools,
            temperature=rollout.temperature,
            max_tokens=train.max_tokens_per_micro_batch,
            is_sharded=train.sharding == "full",
            seed=recipe.seed,
            autocast=accelerator.autocast,
        )
    )
    state = PolicyState(policy, accelerator=accelerator, config=train, reference=reference)
    learner = Learner(state, loss=recipe.loss, config=train, temperature=rollout.temperature, seed=recipe.seed)
    link = EngineLink(engine, pool, learner, recipe=recipe, share=share, runner=runner)
    return Parts(
        recipe=recipe,
        share=share,
        warnings=warnings,
        on_warning=on_warning,
        on_fault=on_fault,
        accelerator=accelerator,
        runner=runner,
        make_env=new_env,
        tokenizer=tokenizer,
        piece=piece,
        renderer=renderer,
        engine=engine,
        pool=pool,
        forks=forks,
        credit=credit,
        falls_back=lack is not None,
        signals=signals,
        state=state,
        learner=learner,
        link=link,
    )


def _copy(policy: Policy, *, is_sharded: bool) -> Policy:
    """Copy a policy. The copy shares what is not trained; but shards have one owner."""
    frozen = [p for p in policy.parameters() if not p.requires_grad and not is_sharded]
    return copy.deepcopy(policy, {id(p): p for p in frozen})


def _make_accelerator(recipe: Recipe) -> Accelerator:
    # Said at every checkpoint of a model whose head and embedding are one tensor, which is then written once.
    logging.getLogger("accelerate.utils.other").addFilter(lambda line: "Removed shared tensor" not in line.getMessage())
    trackers = list(recipe.report.trackers)
    available = [str(name) for name in get_available_trackers()]
    for name in trackers:
        if name not in available:
            known = ", ".join(sorted(map(str, LOGGER_TYPE_TO_CLASS)))
            raise ConfigError(
                f"report.trackers: {name!r} is not installed (pip install {name}), or none of accelerate's: {known}"
            )
    timeout_s = recipe.train.process_timeout_s
    set_deadline(timeout_s)
    return Accelerator(
        cpu=recipe.train.device == "cpu",
        mixed_precision="bf16" if recipe.train.precision == "bfloat16" else "no",
        log_with=trackers or None,
        project_dir=None if recipe.run_dir is None else str(recipe.run_dir),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))],
    )
