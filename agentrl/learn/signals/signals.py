"""Everything that the credit scheme of a run reads, and nothing else."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from agentrl.chat import Renderer
from agentrl.credit import CreditScheme
from agentrl.distributed.processes import all_gather, num_processes, process_index
from agentrl.errors import ConfigError
from agentrl.learn.batch import FloatArray
from agentrl.learn.plan import MicroBatch
from agentrl.learn.signals.config import SignalsConfig
from agentrl.learn.signals.critic import Critic
from agentrl.learn.signals.judge import load_judge, score_turns
from agentrl.learn.signals.scoring import answered_at_each_turn, score_tokens, with_hindsight, with_tokens
from agentrl.policy.model import Policy
from agentrl.types import Need, Trajectory, TrajectoryGroup


class Signals:
    """Measures trajectories before they are credited, and trains the critic where there is one."""

    def __init__(
        self,
        scheme: CreditScheme,
        config: SignalsConfig,
        *,
        policy: Policy,
        load_teacher: Callable[[], Policy],
        renderer: Renderer,
        tools: Sequence[dict[str, Any]],
        temperature: float,
        max_tokens: int,
        seed: int,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Make what the scheme asks for.

        Args:
            scheme: whose `requirements()` are measured.
            config: where the numbers come from.
            policy: the weights in training.
            load_teacher: called where the scheme reads a teacher's log-probabilities.
            autocast: context in which the policy's forward pass runs, and every other one here.
            renderer: of the rollouts.
            tools: of the environment, for contexts that are rendered anew.
            temperature: the rollouts'; all log-probabilities and entropies are at it.
            max_tokens: budget of a micro-batch.
            seed: of the critic.

        Raises:
            ConfigError: for no such judge.
        """
        self._needs, self._config, self._policy = scheme.requirements(), config, policy
        self._renderer, self._tools = renderer, tools
        self._temperature, self._max_tokens = temperature, max_tokens
        self._autocast = autocast
        self._device = next(policy.parameters()).device
        self.reference: Policy | None = None
        self._teacher = self._frozen(load_teacher()) if Need.TEACHER_LOGPROBS in self._needs else None
        self._judge = load_judge(config.judge) if Need.TURN_SCORES in self._needs and config.judge else None
        self.critic: Critic | None = None
        if Need.VALUES in self._needs:
            gamma = next((layer.gamma for layer in scheme.chain() if hasattr(layer, "gamma")), 1.0)
            self.critic = Critic(
                policy, config.critic, gamma=gamma, max_tokens=max_tokens, seed=seed, autocast=self._autocast
            )

    @property
    def needs_reference(self) -> bool:
        """True where the policy with which the run began must be kept, and set as `reference`."""
        return Need.REFERENCE_LOGPROBS in self._needs

    def begin(self) -> None:
        """Start from the policy as it is: called once it is warmed up, and not where a run goes on."""
        if self.critic is not None:
            self.critic.begin()

    def measure(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Return the groups with what the scheme reads in the turns of every trajectory that did not fail."""
        trajectories = [t for group in groups for t in group.valid]
        if trajectories:
            trajectories = self._measure(trajectories)
        found = iter(trajectories)
        return [
            replace(group, trajectories=tuple(t if t.failed else next(found) for t in group.trajectories))
            for group in groups
        ]

    def learn(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Train the critic on what `measure` returned; return its metrics."""
        trajectories = [t for group in groups for t in group.valid]
        return self.critic.learn(trajectories) if self.critic and trajectories else {}

    def _measure(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Go through the needs; the policy's own passes see the weights that sampled."""
        needs, policy = self._needs, self._policy
        if Need.HINDSIGHT_LOGPROBS in needs:
            told = [with_hindsight(t, self._renderer, self._tools) for t in trajectories]
            self._check_lengths(told)
            trajectories = self._with(trajectories, "hindsight_logprobs", policy, read=told)
        if Need.ENTROPIES in needs:
            trajectories = self._with(trajectories, "entropies", policy)
        if Need.REFERENCE_LOGPROBS in needs:
            assert self.reference is not None, "set when the run begins"
            trajectories = self._with(trajectories, "reference_logprobs", self.reference)
        if self._teacher is not None:
            trajectories = self._with(trajectories, "teacher_logprobs", self._teacher)
        if Need.ANSWER_LOGPROBS in needs:
            trajectories = self._with_answers(trajectories)
        if self._judge is not None:
            timeout_s, num_threads = self._config.judge_timeout_s, self._config.judge_threads
            scoring = score_turns(
                self._judge,
                trajectories[process_index() :: num_processes()],
                timeout_s=timeout_s,
                num_threads=num_threads,
                max_retries=self._config.judge_retries,
            )
            scored = {t.trajectory_id: t for t in all_gather(asyncio.run(scoring))}
            trajectories = [scored[t.trajectory_id] for t in trajectories]
        if self.critic is not None:
            trajectories = self.critic.measure(trajectories)
        return trajectories

    def _with(
        self, trajectories: list[Trajectory], name: str, policy: Policy, *, read: list[Trajectory] | None = None
    ) -> list[Trajectory]:
        """Return the trajectories with a column of tokens, scored in their own contexts or in those of `read`."""
        columns = self._score(policy, read or trajectories, entropies=name == "entropies")
        return [with_tokens(t, name, column_T) for t, column_T in zip(trajectories, columns, strict=True)]

    def _with_answers(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        for trajectory in trajectories:
            if not trajectory.gold_answer:
                raise ConfigError(
                    f"credit.scheme: trajectory {trajectory.trajectory_id}: gold_answer() of {trajectory.env_id} returned "
                    f"{trajectory.gold_answer!r}, and the scheme scores it after each turn; return the task's answer, or "
                    "choose another scheme"
                )
        answered = [attempt for t in trajectories for attempt in answered_at_each_turn(t, self._renderer)]
        self._check_lengths(answered)
        columns = self._score(self._policy, answered)
        means = iter([float(np.mean(column_T)) for column_T in columns])
        return [
            replace(t, turns=tuple(replace(turn, answer_logprob=next(means)) for turn in t.turns)) for t in trajectories
        ]

    def _score(
        self, policy: Policy, trajectories: Sequence[Trajectory], *, entropies: bool = False
    ) -> list[FloatArray]:
        """Return the log-probability, or the entropy, of every action token of each trajectory."""

        def score(micro: MicroBatch) -> Tensor:
            with self._autocast():
                found: tuple[Tensor, Tensor] = policy(micro.inputs, micro.slot_T, micro.target_T, self._temperature)
            return found[entropies]

        layout, max_tokens, device = policy.layout, self._max_tokens, self._device
        return score_tokens(score, trajectories, layout=layout, max_tokens=max_tokens, device=device)

    def _check_lengths(self, trajectories: Sequence[Trajectory]) -> None:
        """Stop where what was put into a context makes it longer than the model has positions."""
        limit = getattr(self._policy.model.config, "max_position_embeddings", None)
        for trajectory in trajectories:
            longest = max(sum(len(t.observation_ids) + len(t.action_ids) for t in s) for s in trajectory.segments())
            if limit is not None and longest > limit:
                raise ConfigError(
                    f"credit.scheme: trajectory {trajectory.trajectory_id}: what the scheme tells the policy makes a context "
                    f"of {longest} tokens, beyond the model's {limit} positions; lower rollout.max_context_tokens"
                )

    def _frozen(self, teacher: Policy) -> Policy:
        return teacher.to(self._device).eval().requires_grad_(False)
