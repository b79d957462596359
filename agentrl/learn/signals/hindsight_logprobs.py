"""Log-probability of each action token under the policy itself, given in advance the end of the episode."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from agentrl.chat import Dialogue, HistoryConfig, Renderer
from agentrl.learn.signals.base import Sample, Signal
from agentrl.learn.tokens import Row, TokenBatch, rows_of
from agentrl.types import Message, Trajectory, parent_of


class HindsightLogprobs(Signal):
    """One forward pass of the weights that sampled, over contexts whose first message has a hint."""

    sample: ClassVar = Sample(start=-0.1, step=-0.4, by_trajectory=3, by_turn=1, period=4)

    def measure(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with the log-probabilities in hindsight."""
        from agentrl.learn.signals.scoring import logprobs, with_tokens

        context = self.context
        rows = [rows_in_hindsight(t, context.renderer, context.tools, view=context.history) for t in trajectories]
        self.context.check_lengths(trajectories, rows)
        tokens = TokenBatch.from_rows(rows, group_ids=[t.group_id for t in trajectories])
        return with_tokens(trajectories, "hindsight_logprobs", logprobs(self.context, tokens))


def rows_in_hindsight(
    trajectory: Trajectory, renderer: Renderer, tools: Sequence[dict[str, Any]], *, view: HistoryConfig
) -> list[Row]:
    """Return the rows as if the first message contained the end of the episode, and the answer if there is a known one.

    Every action stays as it was sampled, and so does what was added after it; each context that was restarted is rendered
    with the hint in it.
    """
    answer = "" if trajectory.gold_answer is None else f" The right answer is: {trajectory.gold_answer}"
    hint = f"(In hindsight: the total reward was {trajectory.reward:.3g}.{answer})"
    first = trajectory.turns[0]
    dialogues = [Dialogue.begin(_with_hint(first.observation, hint), tools, renderer, view=view)]
    for number, turn in enumerate(trajectory.turns[1:], start=1):
        parent = parent_of(turn, number)
        before = trajectory.turns[parent]
        acted, replies = (before.action_ids, before.message), turn.observation
        if turn.extends:
            dialogue = dialogues[parent].after_record(*acted, replies, turn.observation_ids)
        else:
            dialogue = dialogues[parent].after(*acted, replies, renderer)
        dialogues.append(dialogue)
    pairs = zip(dialogues, trajectory.turns, strict=True)
    return rows_of([replace(dialogue.turn(turn.action_ids), parent=turn.parent) for dialogue, turn in pairs])


def _with_hint(messages: Sequence[Message], hint: str) -> list[Message]:
    if not messages:
        return [{"role": "user", "content": hint}]
    *others, last = messages
    return [*others, {**last, "content": f"{last.get('content') or ''}\n{hint}"}]
