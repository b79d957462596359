"""Log-probability of each action token under the policy itself, told beforehand how the episode will end."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

from agentrl.chat import Dialogue, Renderer
from agentrl.learn.signals.base import Sample, Signal
from agentrl.learn.tokens import TokenBatch, rows_of
from agentrl.types import Message, Trajectory


class HindsightLogprobs(Signal):
    """One forward pass of the weights that sampled, over contexts whose first message has a hint."""

    sample: ClassVar = Sample(start=-0.1, step=-0.4, by_trajectory=3, by_turn=1, period=4)

    def measure(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with the log-probabilities in hindsight."""
        from agentrl.learn.signals.scoring import logprobs, with_tokens

        told = [with_hindsight(t, self.context.renderer, self.context.tools) for t in trajectories]
        self.context.check_lengths(told, [rows_of(t.turns) for t in told])
        return with_tokens(trajectories, "hindsight_logprobs", logprobs(self.context, TokenBatch.of(told)))


def with_hindsight(trajectory: Trajectory, renderer: Renderer, tools: Sequence[dict[str, Any]]) -> Trajectory:
    """Return the trajectory as if its first message had said how it ends, and the answer where there is a known one.

    Every action stays as it was sampled; each context that was restarted is rendered with the hint in it.
    """
    answer = "" if trajectory.gold_answer is None else f" The right answer is: {trajectory.gold_answer}"
    hint = f"(In hindsight: the total reward was {trajectory.reward:.3g}.{answer})"
    first = trajectory.turns[0]
    dialogue = Dialogue.begin(_with_hint(first.observation, hint), tools, renderer)
    turns = [replace(first, observation_ids=dialogue.observation_ids)]
    for before, turn in pairwise(trajectory.turns):
        ids = turn.observation_ids
        if not turn.extends:
            ids = renderer.start((*dialogue.history, before.message, *turn.observation), tools)
        dialogue = dialogue.after_record(before.action_ids, before.message, turn.observation, ids, extends=turn.extends)
        turns.append(replace(turn, observation_ids=dialogue.observation_ids))
    return replace(trajectory, turns=tuple(turns))


def _with_hint(messages: Sequence[Message], hint: str) -> list[Message]:
    if not messages:
        return [{"role": "user", "content": hint}]
    *others, last = messages
    return [*others, {**last, "content": f"{last.get('content') or ''}\n{hint}"}]
