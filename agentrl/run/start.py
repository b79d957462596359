"""Begin or resume a run. Nothing is written before everything that could be refused has been checked."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from agentrl.credit import CreditScheme
from agentrl.distributed.checkpoints import checkpoints, write_folder
from agentrl.distributed.processes import barrier, from_rank_zero, is_main, process_index
from agentrl.errors import ConfigError, EnvironmentFailure
from agentrl.learn.health import cut_demonstrations
from agentrl.learn.warmup import warm_up
from agentrl.recipe.config import Recipe
from agentrl.report.folder import RunFolder
from agentrl.report.sources import note_sources
from agentrl.report.terminal import announce
from agentrl.rollout import EnvPlayer, Tasks, try_environment
from agentrl.rollout.demonstrations import Demonstration, oracle_ends
from agentrl.rollout.env_driver import MakeEnv
from agentrl.rollout.reset_checks import measure_overlap, prove_reset
from agentrl.run.build import Parts, reads_branches
from agentrl.run.checkpoint import check_hashes, finish_going_back, keep_hashes, resume, save
from agentrl.run.evaluate import evaluation_metrics
from agentrl.run.parts import demonstrate, naming_stage
from agentrl.run.record import OnProgress, RunRecord
from agentrl.types import Need

_BESIDE_REWARDS = {Need.VALUES, Need.TURN_SCORES, Need.ANSWER_LOGPROBS}
"""Signals that distinguish episodes of equal reward."""


class Preparation(NamedTuple):
    """Demonstrations, metrics and warnings from before the first step of a run."""

    examples: list[Demonstration]
    """Demonstrations to warm up on, or to imitate later."""
    metrics: dict[str, float]
    warnings: dict[str, str]
    """Warnings, by the name of the metric `health/NAME`."""


@contextmanager
def begin_or_resume(parts: Parts, folder: RunFolder | None, on_progress: OnProgress) -> Iterator[tuple[RunRecord, int]]:
    """Begin a run, or resume it from its newest checkpoint; yield its record and the number of its finished steps.

    Args:
        parts: parts of the run.
        folder: folder of the run; None: a new one, in the recipe's `run_dir`.
        on_progress: called after each step of the warm-up.

    Raises:
        ConfigError: if the run cannot be resumed with this recipe, or another process trains it.
    """
    recipe = parts.recipe
    if folder is not None and folder.path != recipe.run_dir:
        raise ConfigError(
            f"run_dir: {recipe.run_dir} is not the folder of the run that is resumed; set it to {folder.path}"
        )
    parts.pool.tasks.check_train()
    _check_pairs(recipe, parts.credit)
    config = recipe.model_dump(mode="json")
    with ExitStack() as stack:
        is_resumed = folder is not None and bool(checkpoints(folder.checkpoints))
        if folder is not None and is_main():
            stack.enter_context(folder.lock())
            _check_folder(folder, is_resumed=is_resumed, on_warning=parts.on_warning)
            finish_going_back(folder)
        barrier()  # all resume from the newest checkpoint that is left
        finished_steps = 0
        is_changed = False
        prepared = None
        if folder is not None and is_resumed:
            announce("resuming")
            check_hashes(parts.pool.tasks, folder)
            reuse_environments(parts)
            finished_steps, is_changed = resume(parts, folder)
        else:
            prepared = _prepare(parts)
        if recipe.loss.reads_demonstrations:
            parts.learner.demonstrations = prepared.examples if prepared else _demonstrations(parts)
        if folder is None:
            assert recipe.run_dir is not None, "the command line names the folder"
            folder = RunFolder(recipe.run_dir)
            if is_main():
                folder = RunFolder.create(recipe.run_dir, config)
                stack.enter_context(folder.lock())
        barrier()  # all have read the old settings, and there is a folder
        if not folder.config_file.is_file():
            raise ConfigError(f"run_dir: process {process_index()} does not see {folder.path}; use a disk that all see")
        if is_main():
            stack.enter_context(folder.marked())
            if not is_resumed:
                keep_hashes(parts.pool.tasks, folder)
                note_sources(folder, config)
            folder.write_config(config)
            folder.rewind(finished_steps if is_resumed else -1)
        if not folder.tokenizer.is_dir():
            write_folder(
                folder.tokenizer, lambda path: is_main() and parts.tokenizer.save_pretrained(path), is_sealed=True
            )
        record = RunRecord(parts, folder, next_step=finished_steps + 1 if is_resumed else 0, is_changed=is_changed)
        stack.callback(record.trackers.finish)
        if prepared is not None:
            _begin(parts, record, prepared, on_progress)
        yield record, finished_steps


def _check_pairs(recipe: Recipe, credit: CreditScheme) -> None:
    """Refuse to train if rollouts spoil the input of a scheme; such runs can still be evaluated and served."""
    reads = credit.requirements()
    name = recipe.credit["scheme"]
    rollout = recipe.rollout
    reads_rewards = all(layer.reads_rewards for layer in credit.chain())
    if rollout.dynamic_sampling and not (reads_rewards and reads.isdisjoint(_BESIDE_REWARDS)):
        raise ConfigError(
            f"rollout.dynamic_sampling: leaves out groups whose episodes earned alike, from which {name!r} learns; set it to 0"
        )
    if recipe.loss.has_kl_reward and (not reads_rewards or Need.BRANCHES in reads):
        why = "compares with what forks earned, which lose none of it" if reads_rewards else "reads no rewards"
        raise ConfigError(f"loss.kl_estimator: k1_reward is part of the rewards, and {name!r} {why}; set it to k2")
    if rollout.group_rewards and not reads_rewards:
        raise ConfigError(
            f"rollout.group_rewards: {name!r} reads no rewards; remove them, or choose another credit.scheme"
        )
    if rollout.group_rewards and Need.BRANCHES in reads:
        raise ConfigError(
            f"rollout.group_rewards: {name!r} compares with what forks earned, which get none of these; choose another "
            "credit.scheme"
        )


def _check_folder(folder: RunFolder, *, is_resumed: bool, on_warning: Callable[[str], object]) -> None:
    """Check the files that resuming depends on, before anything is written; warn if the last process was ended.

    Raises:
        ConfigError: if one of them is damaged, or there are steps and no checkpoint of them.
    """
    folder.check()
    rows = folder.metrics()
    if not is_resumed and (lost := [row["step"] for row in rows if row["step"] > 0]):
        raise ConfigError(
            f"{folder.path} has metrics up to step {lost[-1]:.0f}, but no checkpoint to resume from; begin another run: "
            f"agentrl train {folder.config_file} --run_dir ANOTHER_FOLDER"
        )
    if (words := folder.death(is_locked=True)) is not None:
        on_warning(words)


def _prepare(parts: Parts) -> Preparation:
    """Try the parts of a new run: its environment, its engine, demonstrations, the environment's own policy."""
    recipe = parts.recipe
    if parts.env_players:
        announce("trying the environment")
    for player, tasks in parts.env_players:
        _try(parts, player, tasks, fork=player is parts.env.player and reads_branches(parts.credit))
    announce("proving that engine and trainer agree")
    parts.weight_sync.verify_and_push(0)
    examples = _demonstrations(parts) if recipe.warmup.steps or recipe.loss.reads_demonstrations else []
    prepared = _check_oracle(parts, parts.env.make, examples) if parts.env.make else Preparation(examples, {}, {})
    if parts.env.make and not recipe.evaluation.env:
        _look_for_shared_tasks(parts, prepared)
    if (words := reuse_environments(parts)) is not None:
        prepared.warnings["slow_construction"] = words
    return prepared


def _try(parts: Parts, player: EnvPlayer, tasks: Tasks, *, fork: bool) -> None:
    """Play an episode of empty messages with each way in which an environment is made."""
    renderer, config = parts.pool.context.renderer, parts.recipe.rollout
    trial = try_environment(make_env=player.make, renderer=renderer, config=config, tasks=tasks, fork=fork)
    parts.runner.run(trial)
    for place, make_env in enumerate(player.stages):
        trial = try_environment(make_env=make_env, renderer=renderer, config=config, tasks=tasks.for_stage(place + 1))
        with naming_stage(place):
            parts.runner.run(trial)


def _demonstrations(parts: Parts) -> list[Demonstration]:
    """Return the demonstrations of the warm-up, which `loss.nll` imitates too: of each run the same."""
    recipe, warmup = parts.recipe, parts.recipe.warmup
    announce(
        f"reading {warmup.dialogues}" if warmup.dialogues else f"playing {warmup.num_demonstrations} demonstrations"
    )
    return demonstrate(
        parts.env,
        parts.pool.context.renderer,
        config=warmup,
        rollout=recipe.rollout,
        count=warmup.num_demonstrations,
        runner=parts.runner,
    )


def _look_for_shared_tasks(parts: Parts, prepared: Preparation) -> None:
    """Record evaluation tasks that are training tasks too."""
    env, timeout_s = parts.recipe.env, parts.recipe.rollout.env_timeout_s
    shared = from_rank_zero(lambda: parts.runner.run(measure_overlap(env.make, parts.pool.tasks, timeout_s=timeout_s)))
    if shared is not None and (words := shared.warning()) is not None:
        prepared.warnings["shared_tasks"] = words
        prepared.metrics["health/shared_tasks"] = shared.num_shared / shared.num_evaluation


def reuse_environments(parts: Parts) -> str | None:
    """Let environments play one episode after the other if `reset` is proven to forget; return a warning if it is slow."""
    rollout, words = parts.recipe.rollout, None
    for player, tasks in parts.env_players:
        timeout_s = rollout.env_timeout_s
        proof = parts.runner.run(prove_reset(player.make, tasks, timeout_s=timeout_s))
        flaws = [proof.flaw]
        for stage, make_env in enumerate(player.stages, 1):
            found = parts.runner.run(prove_reset(make_env, tasks.for_stage(stage), timeout_s=timeout_s))
            flaws.append(found.flaw)
        player.is_reused = not any(flaws)
        if player is parts.env.player:
            words = proof.warning(live=rollout.live_episodes(parts.pool.shard.num_groups))
    return words


def _check_oracle(parts: Parts, make: MakeEnv, examples: list[Demonstration]) -> Preparation:
    """Check whether the environment's own policy can play within the limits."""
    rollout, tasks = parts.recipe.rollout, parts.pool.tasks
    trial = partial(oracle_ends, max_turns=rollout.max_turns, timeout_s=rollout.env_timeout_s, tasks=tasks)

    def ends_and_words() -> tuple[bool | None, str | None]:
        try:
            ends = parts.runner.run(trial(make))
        except EnvironmentFailure as error:  # demonstrations, if needed, would have raised it before
            return None, str(error)
        words = f"the environment's oracle() ends no episode within rollout.max_turns: {rollout.max_turns}; raise it"
        return ends, words if ends is False else None

    metrics: dict[str, float] = {}
    warnings: dict[str, str] = {}
    ends, words = from_rank_zero(ends_and_words)
    if ends is not None:
        metrics["health/oracle_ends"] = float(ends)
    if words is not None:
        warnings["oracle_ends"] = words
    if examples:
        share, words = cut_demonstrations(examples, rollout)
        metrics["health/demonstrations_cut_off"] = share
        if words is not None and ends is not False:
            warnings["demonstrations_cut_off"] = words
    return Preparation(examples, metrics, warnings)


def _begin(parts: Parts, record: RunRecord, prepared: Preparation, on_progress: OnProgress) -> None:
    """Warm up; the result is the policy to train, and the KL target."""
    recipe, state = parts.recipe, parts.learner.state
    if recipe.warmup.steps:
        warm_up(
            parts.policy,
            prepared.examples,
            recipe.warmup,
            seed=recipe.seed,
            max_tokens=recipe.train.max_tokens_per_micro_batch,
            on_step=lambda step, loss: on_progress("warm-up", step, recipe.warmup.steps, {"loss": loss}),
        )
        state.broadcast_weights()
    parts.signals.begin()
    if state.reference is not None:
        state.keep_reference()
        write_folder(record.folder.reference, state.save_reference, is_sealed=True)
    parts.weight_sync.verify_and_push(0)
    for name, words in prepared.warnings.items():
        record.warn(0, name, words)
    announce("evaluating before the first step")
    metrics = evaluation_metrics(parts)
    record.add_row({"step": 0, **prepared.metrics, **metrics})
    on_progress("evaluation", 1, 1, metrics)
    save(parts, record.folder, 0)
