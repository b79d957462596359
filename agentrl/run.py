"""A run from a recipe: build the parts, warm up, train, evaluate, leave everything in the run's folder."""

import asyncio
import copy
import json
import logging
import tempfile
from collections.abc import Callable, Coroutine
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar
from urllib.parse import urlsplit

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import InitProcessGroupKwargs, set_seed
from safetensors import SafetensorError

from agentrl.chat import ChatMLRenderer, Renderer, load_tokenizer, train_tokenizer
from agentrl.config import Recipe
from agentrl.credit import load_credit_for
from agentrl.distributed.checkpoints import checkpoint_errors, checkpoints, write_folder
from agentrl.distributed.processes import (
    all_gather,
    barrier,
    from_rank_zero,
    is_main,
    num_processes,
    process_index,
    set_deadline,
)
from agentrl.engine import Engine
from agentrl.engine.vllm_launch import Server, start_server
from agentrl.env import make_env
from agentrl.errors import ConfigError, EnvironmentFailure, TrainingError
from agentrl.files import damage
from agentrl.learn.checkpoint import load_checkpoint, save_checkpoint
from agentrl.learn.evaluate import Evaluation, evaluated, play_held_out
from agentrl.learn.health import SIGNS, Sign, cut_demonstrations, first_told, signs
from agentrl.learn.learner import Learner
from agentrl.learn.policy_state import PolicyState, load_weights
from agentrl.learn.signals import hints, provided_by
from agentrl.learn.signals.base import SignalContext
from agentrl.learn.signals.signals import Signals
from agentrl.learn.trainer import StepResult, Trainer
from agentrl.learn.warmup import warm_up
from agentrl.plain_data import line_of
from agentrl.policy.export import export_adapter, export_model
from agentrl.policy.layout import choose_layout
from agentrl.policy.lora import add_lora
from agentrl.policy.model import Policy, check_dropout, load_pretrained, make_local_model
from agentrl.report.faults import FaultLog
from agentrl.report.folder import RunFolder, Told
from agentrl.report.records import records
from agentrl.rollout import Journal, RolloutConfig, RolloutPool, check_limits, describe_env, try_environment
from agentrl.rollout.demonstrations import demonstrations, oracle_ends
from agentrl.sampling import new_engine, share_of
from agentrl.types import Need, Trajectory

T = TypeVar("T")
OnProgress = Callable[[Literal["warm-up", "training"], int, int, dict[str, float]], None]
"""Told the phase, its steps done, its steps in all, and the latest metrics."""

_TOKENIZER_EPISODES = 256
"""Demonstrations that a local tokenizer is trained on."""


class Run:
    """The parts of a run, wired together: in each of its processes."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        tokenizer_folder: Path | None = None,
        on_warning: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Build everything, and touch no file.

        Args:
            recipe: what to run.
            tokenizer_folder: the tokenizer of a run that goes on; None: the model's own, or one is trained.
            on_warning: told, in a few lines, what goes wrong while it trains.

        Raises:
            UserError: for whatever in the recipe cannot be carried out.
        """
        self.warnings, self._on_warning = recipe.loss.warnings(), on_warning
        self._accelerator = _accelerator(recipe)
        given = recipe
        recipe = from_rank_zero(lambda: given)  # with the time of day in the name of its folder
        self.recipe = recipe
        self._share = share_of(recipe, process_index(), num_processes())
        self.warnings += check_limits(recipe.rollout.max_live_episodes)
        set_seed(recipe.seed)
        self._runner = asyncio.Runner()
        self._lock: TextIO | None = None
        self._faults: FaultLog | None = None
        self._told_kinds: set[str] = set()
        self._rows: list[dict[str, float]] = []
        """Metrics of the finished steps, in the first process."""
        self._health_before: dict[str, float] = {}
        self._found_before: dict[str, str] = {}
        """What was found before the first step: metrics, and what to tell."""
        self._make_env = partial(make_env, recipe.env.id, recipe.env.options)
        offered = self._runner.run(describe_env(self._make_env, timeout_s=recipe.rollout.env_timeout_s))
        provided = offered.needs | provided_by(recipe.signals)
        credit, warning = load_credit_for(recipe.credit, provided=provided, hints=hints(), env_id=recipe.env.id)
        self.warnings += [warning] if warning else []
        self._falls_back = warning is not None
        self._forks = Need.BRANCHES in credit.requirements()
        if recipe.model.name_or_path is None:
            # Demonstrations for the tokenizer are about to be played; the context is measured once there is one.
            self._try_environment(ChatMLRenderer(train_tokenizer([], vocab_size=261)), 2**31)
        model, self.tokenizer = self._load_model(tokenizer_folder)
        check_dropout(model.config)
        _check_positions(recipe, model.config)
        self._renderer = recipe.chat.build(self.tokenizer, name=str(recipe.model.name_or_path or "local"))
        self._piece = cache(lambda token: str(self.tokenizer.decode([token])))
        self._handover = tempfile.TemporaryDirectory(prefix="agentrl-weights-")
        self._engine = new_engine(
            recipe, self._share, model, self._accelerator.device, handover=Path(self._handover.name)
        )
        self._pool = self._new_pool(recipe.rollout.temperature, fork=self._forks)
        model.to(self._accelerator.device)
        if recipe.model.lora is not None:
            add_lora(model, recipe.model.lora)
        if recipe.train.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        layout, warning = from_rank_zero(
            lambda: choose_layout(model, recipe.train.layout, max_tokens=recipe.rollout.max_context_tokens)
        )
        self.warnings += [warning] if warning else []
        self._policy = Policy(model, layout=layout)
        self._reads_reference = Need.REFERENCE_LOGPROBS in credit.requirements()
        needs_reference = recipe.loss.kl_coefficient > 0 or self._reads_reference
        # It shares what is not trained; but shards have one owner.
        frozen = [p for p in model.parameters() if not p.requires_grad and recipe.train.sharding == "none"]
        reference = copy.deepcopy(self._policy, {id(p): p for p in frozen}) if needs_reference else None
        self._signals = Signals(
            SignalContext(
                scheme=credit,
                config=recipe.signals,
                policy=self._policy,
                reference=reference,
                load_teacher=partial(_load_teacher, recipe, self.tokenizer),
                renderer=self._renderer,
                tools=offered.tools,
                temperature=recipe.rollout.temperature,
                max_tokens=recipe.train.max_tokens_per_micro_batch,
                seed=recipe.seed,
                autocast=self._accelerator.autocast,
            )
        )
        if self._signals.critic is not None and recipe.train.sharding == "full":
            raise ConfigError("train.sharding: full leaves the critic no whole policy to read; set it to none")
        self._state = PolicyState(self._policy, accelerator=self._accelerator, config=recipe.train, reference=reference)
        self._trainer = Trainer(
            learner=Learner(
                self._state,
                loss=recipe.loss,
                config=recipe.train,
                temperature=recipe.rollout.temperature,
                seed=recipe.seed,
            ),
            engine=self._engine,
            pool=self._pool,
            credit=credit,
            signals=self._signals,
            agreement=recipe.train.agreement_bound(),
            rollout=self._rollout,
            seed=recipe.seed,
            runner=self._runner,
        )

    def train(self, folder: RunFolder | None, *, on_progress: OnProgress) -> tuple[RunFolder, list[dict[str, float]]]:
        """Train to the last step; return the folder and the metrics of every step.

        Args:
            folder: of a run to go on with; None: begin a new one in the recipe's `run_dir`.
            on_progress: called after each step.
        """
        recipe, trainer = self.recipe, self._trainer
        config = recipe.model_dump(mode="json")
        is_resumed = folder is not None and bool(checkpoints(folder.checkpoints))
        examples: list[Trajectory] = []
        if folder is not None and is_main():
            self._lock = folder.lock()
            folder.check()
            rows = folder.metrics()
            if not is_resumed and (lost := [row["step"] for row in rows if row["step"] > 0]):
                raise ConfigError(
                    f"{folder.path} has metrics up to step {lost[-1]:.0f}, but no checkpoint to go on from; begin anew: "
                    f"agentrl train {folder.config_file} --run_dir ANOTHER_FOLDER"
                )
        if folder is not None and is_resumed:
            self.load(folder)
            journal = None if self._repeats else self._journal(folder)
            self._pool.recover(journal, ignore=self.has_changed(folder))
        else:
            self._try_environment(self._renderer, recipe.rollout.max_context_tokens)
            trainer.start_engine()
            examples = self._examples()
            self._check_oracle(examples)
        if folder is None:
            assert recipe.run_dir is not None, "the command line names the folder"
            folder = RunFolder(recipe.run_dir)
            if is_main():
                folder = RunFolder.create(recipe.run_dir, config)
                self._lock = folder.lock()
        self._faults = FaultLog(folder, piece=self._piece)
        barrier()  # all have read the old settings, and there is a folder
        if not folder.config_file.is_file():
            raise ConfigError(f"run_dir: process {process_index()} does not see {folder.path}; use a disk that all see")
        if not (is_resumed or self._repeats):
            self._pool.record(self._journal(folder))
        if is_main():
            folder.write_config(config)
            folder.rewind(trainer.finished_steps if is_resumed else -1)
            self._rows = [row for row in folder.metrics() if row["step"] > 0]
        if not folder.tokenizer.is_dir():
            write_folder(
                folder.tokenizer, lambda path: is_main() and self.tokenizer.save_pretrained(path), is_sealed=True
            )
        if recipe.report.trackers:
            self._accelerator.init_trackers("agentrl", config={"run": str(folder.path), "recipe": json.dumps(config)})
        try:
            if not is_resumed:
                self._begin(folder, examples, on_progress)
            while trainer.finished_steps < recipe.train.steps:
                self._after_step(folder, trainer.step(), on_progress)
        finally:
            if recipe.report.trackers:
                self._accelerator.end_training()
        return folder, folder.metrics()

    def load(self, folder: RunFolder) -> None:
        """Bring the policy and the engine to the newest checkpoint of a run.

        Raises:
            ConfigError: when it has none, or none that fits the recipe.
        """
        newest = _newest(folder)
        if self._state.reference is not None:
            if not folder.reference.is_dir():
                asking = f"loss.kl_coefficient: {self.recipe.loss.kl_coefficient:g}"
                if self._reads_reference:
                    asking = f"credit.scheme: {self.recipe.credit['scheme']!r}"
                raise ConfigError(
                    f"{asking} needs the policy with which {folder.path} began, and that run kept none; begin a new run with "
                    "it"
                )
            self._load_reference(folder.reference)
        load_checkpoint(self._trainer, newest)
        self._trainer.start_engine()

    def _load_reference(self, folder: Path) -> None:
        what = damage(folder)
        if what is None:
            try:
                self._state.load_reference(folder)
            except ConfigError:
                raise
            except (
                SafetensorError,
                RuntimeError,
                KeyError,
                ValueError,
            ) as error:  # weights are sealed by their size alone
                what = line_of(error)
        if what is not None:
            raise ConfigError(f"the policy with which this run began is damaged ({what}); begin a new run")

    def load_weights(self, folder: RunFolder) -> None:
        """Bring the policy alone to the newest checkpoint of a run.

        Raises:
            ConfigError: when it has none, or none that fits the recipe.
        """
        newest = _newest(folder)
        with checkpoint_errors(newest):
            self._state.load_weights(newest)

    def evaluate(self) -> Evaluation:
        """Play the held-out tasks with the weights in the engine; nothing of the training state is touched."""
        config, share = self.recipe.evaluation, self._share
        pool = self._new_pool(config.temperature)
        self._runner.run(self._pool.resume())  # episodes that a step interrupted go on meanwhile
        try:
            groups = (
                self._runner.run(play_held_out(pool, config, seed=self.recipe.seed, share=share))
                if share.num_groups
                else []
            )
        finally:
            pool.close()
            is_async = self.recipe.rollout.samples_during_update
            if not is_async or num_processes() > 1:  # no deadline shall pass while others are waited for
                self._runner.run(self._pool.pause())
        groups = all_gather(groups)
        if is_async and num_processes() > 1:
            self._runner.run(self._pool.resume())
        return evaluated(groups, config)

    def start_engine(self) -> float:
        """Hand the model as it is to the engine; return by how much their log-probabilities differ, in nats."""
        return self._trainer.start_engine()

    def on_loop(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine where the engine lives."""
        return self._runner.run(main)

    def serve(self, folder: Path, *, timeout_s: float) -> Server:
        """Start a vLLM server for this recipe at `engine.server.url`; the model and the server's log go into `folder`."""
        recipe, url = self.recipe, urlsplit(self.recipe.engine.server.urls[0])
        folder.mkdir(parents=True, exist_ok=True)
        export_model(self._policy.model, self.tokenizer, folder / "model")
        options: dict[str, Any] = {
            "host": url.hostname,
            "dtype": recipe.train.precision,
            "max_model_len": recipe.rollout.max_context_tokens,
            "max_num_seqs": recipe.engine.max_batch_size,
            "max_num_batched_tokens": max(recipe.engine.max_prefill_tokens, recipe.rollout.max_context_tokens),
        }
        return start_server(
            folder / "model",
            port=url.port or 80,
            log=folder / "server.log",
            options=options | recipe.engine.vllm,
            timeout_s=timeout_s,
        )

    @property
    def engine(self) -> Engine:
        """What samples."""
        return self._engine

    def close(self) -> None:
        """Release threads, the engine and the event loop."""
        self._runner.run(self._pool.stop())
        self._pool.close()
        self._runner.run(self._engine.close())
        self._runner.close()
        self._handover.cleanup()
        if self._lock is not None:
            self._lock.close()

    def _try_environment(self, renderer: Renderer, max_context_tokens: int) -> None:
        config = self.recipe.rollout.model_copy(update={"max_context_tokens": max_context_tokens})
        seed = self.recipe.seed
        self._runner.run(
            try_environment(make_env=self._make_env, renderer=renderer, config=config, seed=seed, fork=self._forks)
        )

    def _load_model(self, tokenizer_folder: Path | None) -> tuple[Any, Any]:
        settings = self.recipe.model
        if settings.name_or_path is not None:
            return load_pretrained(settings.name_or_path, attention=settings.attention)
        tokenizer = self._train_tokenizer() if tokenizer_folder is None else load_tokenizer(tokenizer_folder)
        return make_local_model(settings.local, tokenizer, attention=settings.attention), tokenizer

    def _train_tokenizer(self) -> Any:
        """Train a tokenizer on demonstrated dialogues, written out by one that knows bytes only; without warm-up, that one."""
        as_bytes = train_tokenizer([], vocab_size=261)
        if self.recipe.warmup.steps == 0:
            return as_bytes
        texts = [
            as_bytes.decode([token for turn in segment for token in (*turn.observation_ids, *turn.action_ids)])
            for trajectory in self._demonstrations(ChatMLRenderer(as_bytes), count=_TOKENIZER_EPISODES)
            for segment in trajectory.segments()
        ]
        return train_tokenizer(texts, vocab_size=self.recipe.model.local.vocab_size)

    def _demonstrations(self, renderer: Renderer, *, count: int) -> list[Trajectory]:
        recipe = self.recipe
        return from_rank_zero(
            lambda: self._runner.run(
                demonstrations(
                    self._make_env,
                    renderer,
                    count=count,
                    skill=recipe.warmup.skill,
                    max_turns=recipe.rollout.max_turns,
                    timeout_s=recipe.rollout.env_timeout_s,
                    seed=recipe.seed,
                )
            )
        )

    def _examples(self) -> list[Trajectory]:
        warmup = self.recipe.warmup
        return self._demonstrations(self._renderer, count=warmup.num_demonstrations) if warmup.steps else []

    def _new_pool(self, temperature: float, *, fork: bool = False) -> RolloutPool:
        return RolloutPool(
            make_env=self._make_env,
            engine=self._engine,
            renderer=self._renderer,
            config=self.recipe.rollout.model_copy(update={"temperature": temperature}),
            seed=self.recipe.seed,
            fork=fork,
            share=self._share,
            on_fault=self._note_fault,
        )

    def _note_fault(self, trajectory: Trajectory) -> None:
        """Keep what an environment did wrong, and tell each kind once; outside of `train`, where nothing is kept, tell it."""
        fault, words = trajectory.fault, None
        if self._faults is not None:
            words = self._faults.add(trajectory, step=self._trainer.finished_steps + 1)
        elif fault is not None and fault.kind not in self._told_kinds:
            self._told_kinds.add(fault.kind)
            words = "\n".join(filter(None, [f"{trajectory.error}; task seed {trajectory.seed}", fault.traceback]))
        if words is not None:
            self._on_warning(words)

    @property
    def _rollout(self) -> RolloutConfig:
        """What this process collects."""
        return self.recipe.rollout.model_copy(update={"num_groups": self._share.num_groups})

    def _journal(self, folder: RunFolder) -> Journal:
        """Return the journal of this process."""
        return Journal(folder.journal if is_main() else folder.journal / f"process-{process_index()}")

    def _begin(self, folder: RunFolder, examples: list[Trajectory], on_progress: OnProgress) -> None:
        """Warm up; what comes out of it is the policy to train, and the KL target."""
        recipe = self.recipe
        if examples:
            warm_up(
                self._policy,
                examples,
                recipe.warmup,
                seed=recipe.seed,
                max_tokens=recipe.train.max_tokens_per_micro_batch,
                on_step=lambda step, loss: on_progress("warm-up", step, recipe.warmup.steps, {"loss": loss}),
            )
            self._state.broadcast_weights()
        self._signals.begin()
        if self._state.reference is not None:
            self._state.keep_reference()
            write_folder(folder.reference, self._state.save_reference, is_sealed=True)
        self._trainer.start_engine()
        for name, words in self._found_before.items():
            self._tell(folder, 0, name, words)
        self._write(folder, {"step": 0, **self._health_before, **self._evaluation_metrics()})
        self._save(folder)

    def _save(self, folder: RunFolder) -> None:
        self._runner.run(self._pool.pause())  # no deadline shall pass while the loop stands still
        save_checkpoint(self._trainer, folder.checkpoints, keep_last=self.recipe.train.keep_last)
        self._pool.forget()

    def has_changed(self, folder: RunFolder) -> bool:
        """Tell whether the recipe samples or trains otherwise than the one that a run went by until now."""
        return _fixed(self.recipe) != _fixed(Recipe.model_validate(folder.config()))

    @property
    def _repeats(self) -> bool:
        """True where what is sampled again after a kill is what was sampled before, so that nothing need be written down."""
        engine = self.recipe.engine
        return self.recipe.rollout.repeats_exactly and engine.lockstep is not False and engine.name != "vllm_server"

    def _after_step(self, folder: RunFolder, result: StepResult, on_progress: OnProgress) -> None:
        """Write down what a step did, then checkpoint: a checkpoint never promises what is not on disk."""
        recipe, step = self.recipe, result.step
        is_last = step == recipe.train.steps
        row: dict[str, float] = {"step": step, **result.metrics}
        if self._falls_back:
            row["credit/fallback"] = 1.0
        every = recipe.evaluation.every
        if is_last or (every and step % every == 0):
            row |= self._evaluation_metrics()
        every = recipe.report.rollouts_every
        if is_main() and every and (step == 1 or step % every == 0):
            trajectories = records(result.groups, result.credits, step=step, piece=self._piece)
            folder.add_rollouts(step, trajectories, keep=recipe.report.keep_rollouts)
        found, told = from_rank_zero(lambda: self._examine(row))
        row |= {f"health/{sign}": float(sign in found) for sign in SIGNS}
        self._rows.append(row)
        self._write(folder, row)
        stopping = [sign for sign in recipe.train.stop_on if sign in found and not is_last]
        for sign, words in told.items():
            self._tell(folder, step, sign, words, is_said=sign not in stopping)  # the run's last words say it then
        if stopping:  # before a checkpoint, so that earlier ones stay
            raise TrainingError(
                f"step {step}, train.stop_on: {stopping[0]}: {found[stopping[0]]}. The newest checkpoint is "
                f"{_newest(folder).name}; go on from there nevertheless: agentrl train {folder.path} --train.stop_on '[]'"
            )
        if is_last or step % recipe.train.checkpoint_every == 0:
            self._save(folder)
        on_progress("training", step, recipe.train.steps, row)

    def _examine(self, row: dict[str, float]) -> tuple[dict[Sign, str], dict[Sign, str]]:
        """Return the signs that a step shows of a run that does not learn, and those to tell."""
        found = signs([*self._rows, row])
        return found, first_told(found, self._rows)

    def _check_oracle(self, examples: list[Trajectory]) -> None:
        """Tell where even the environment's own policy cannot play within the limits."""
        rollout, seed = self.recipe.rollout, self.recipe.seed
        trial = partial(oracle_ends, max_turns=rollout.max_turns, timeout_s=rollout.env_timeout_s, seed=seed)

        def ends_and_words() -> tuple[bool | None, str | None]:
            try:
                ends = self._runner.run(trial(self._make_env))
            except EnvironmentFailure as error:  # demonstrations, where they are needed, would have raised it before
                return None, str(error)
            words = (
                f"the environment's oracle() ends no episode within rollout.max_turns: {rollout.max_turns}; raise it"
            )
            return ends, words if ends is False else None

        ends, words = from_rank_zero(ends_and_words)
        if ends is not None:
            self._health_before["health/oracle_ends"] = float(ends)
        if words is not None:
            self._found_before["oracle_ends"] = words
        if examples:
            share, words = cut_demonstrations(examples, rollout)
            self._health_before["health/demonstrations_cut_off"] = share
            if words is not None and ends is not False:
                self._found_before["demonstrations_cut_off"] = words

    def _tell(self, folder: RunFolder, step: int, name: str, words: str, *, is_said: bool = True) -> None:
        """Write a warning into the folder, and say it."""
        if is_main():
            folder.add_warning(Told(step=step, name=name, words=words))
            if is_said:
                self._on_warning(words)

    def _write(self, folder: RunFolder, row: dict[str, float]) -> None:
        if is_main():
            folder.add_metrics(row)
        if self.recipe.report.trackers:
            self._accelerator.log(row, step=int(row["step"]))

    def _evaluation_metrics(self) -> dict[str, float]:
        return {f"eval/{name}": value for name, value in self.evaluate().metrics.items()}


def export(
    recipe: Recipe, run: RunFolder, folder: Path, *, dtype: torch.dtype | None = None, only_adapter: bool = False
) -> None:
    """Write a run's newest policy as a Hugging Face folder, or its adapters as a folder of peft's.

    Neither environment nor engine is built.

    Raises:
        ConfigError: when the run has no checkpoint, or none that fits the recipe, or trains no adapter to write.
    """
    newest = _newest(run)
    if recipe.model.name_or_path is not None:
        model, tokenizer = load_pretrained(recipe.model.name_or_path, attention=recipe.model.attention)
    else:
        tokenizer = load_tokenizer(run.tokenizer)
        model = make_local_model(recipe.model.local, tokenizer, attention=recipe.model.attention)
    if recipe.model.lora is not None:
        add_lora(model, recipe.model.lora)
    elif only_adapter:
        raise ConfigError("this run trains no adapter (model.lora)")
    with checkpoint_errors(newest):
        load_weights(Policy(model), newest)
    if only_adapter:
        export_adapter(model, folder)
    else:
        export_model(model, tokenizer, folder, dtype=dtype)


def _newest(folder: RunFolder) -> Path:
    if not (found := checkpoints(folder.checkpoints)):
        raise ConfigError(f"{folder.path} has no checkpoint yet; go on with the run: agentrl train {folder.path}")
    return found[-1]


def _accelerator(recipe: Recipe) -> Accelerator:
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


_OPERATIONAL = {
    "rollout": {"max_live_episodes", "env_timeout_s", "engine_timeout_s", "max_retries", "max_consecutive_failures"},
    "signals": {"judge_timeout_s", "judge_retries", "judge_threads"},
    "train": {
        "checkpoint_every",
        "keep_last",
        "agreement",
        "stop_on",
        "max_tokens_per_micro_batch",
        "layout",
        "process_timeout_s",
        "gradient_checkpointing",
    },
}
"""What one changes to get over a fault: deadlines, bounds and budgets, by which nothing but rounding comes out otherwise."""


def _fixed(recipe: Recipe) -> dict[str, Any]:
    """Return what decides which weights come out of recorded episodes, and which episodes are recorded."""
    fixed = recipe.model_dump(mode="json", exclude={"run_dir", "engine", "evaluation", "report"})
    steps = {"steps"} if recipe.train.schedule == "constant" else set()
    for section, names in (*_OPERATIONAL.items(), ("train", steps)):
        for name in names:
            del fixed[section][name]
    return fixed


def _load_teacher(recipe: Recipe, tokenizer: Any) -> Policy:
    field, name = "signals.teacher", recipe.signals.teacher
    assert name is not None, "a scheme that reads a teacher is refused without one"
    model, other = load_pretrained(name, field=field, attention=recipe.model.attention)
    if other.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"{field}: the tokenizer of {name!r} is not the policy's, so its tokens mean something else")
    _check_positions(recipe, model.config, whose=f"{field}: the teacher's")
    layout, _ = from_rank_zero(lambda: choose_layout(model, "auto", max_tokens=recipe.rollout.max_context_tokens))
    if recipe.train.precision == "bfloat16":
        model = model.to(torch.bfloat16)
    return Policy(model, layout=layout, field=field)


def _check_positions(recipe: Recipe, config: Any, *, whose: str = "the model's") -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and recipe.rollout.max_context_tokens > limit:
        raise ConfigError(
            f"rollout.max_context_tokens: {recipe.rollout.max_context_tokens} exceeds {whose} {limit} positions; lower it"
        )
