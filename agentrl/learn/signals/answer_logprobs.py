"""Mean log-probability of the tokens of the task's known answer, had it been given in place of a turn's action.

`L` tokens of a context with the answer, `T` tokens of the answer.
"""

from typing import ClassVar

import numpy as np

from agentrl.chat import Renderer
from agentrl.errors import ConfigError
from agentrl.learn.signals.base import Sample, Signal, SignalsConfig
from agentrl.learn.tokens import Row, TokenBatch
from agentrl.types import Trajectory, context_of


class AnswerLogprobs(Signal):
    """One forward pass of the weights that sampled, over each turn's context with the answer after it."""

    sample: ClassVar = Sample(start=-2.0, step=0.3, by_trajectory=1, by_turn=3, period=5)
    is_per_token: ClassVar = False

    @classmethod
    def is_provided(cls, config: SignalsConfig) -> bool:
        """Whether the recipe provides it: never, for the environment's `gold_answer` does."""
        return False

    def measure(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with the answer's mean log-probability at every turn.

        Raises:
            ConfigError: for a task without a known answer.
        """
        from agentrl.learn.signals.scoring import logprobs, with_turns

        for trajectory in trajectories:
            if not trajectory.gold_answer:
                raise ConfigError(
                    f"credit.scheme: trajectory {trajectory.trajectory_id}: gold_answer() of {trajectory.env_id} returned "
                    f"{trajectory.gold_answer!r}, and the scheme scores it after each turn; return the task's answer, or "
                    "choose another scheme"
                )
        answers = [answers_at_each_turn(t, self.context.renderer) for t in trajectories]
        self.context.check_lengths(trajectories, answers)
        # Each by itself, as trajectories of one turn: what is never split must not be as long as all turns together.
        rows = [[row] for of_trajectory in answers for row in of_trajectory]
        group_ids = [t.group_id for t in trajectories for _ in t.turns]
        columns = iter(logprobs(self.context, TokenBatch.from_rows(rows, group_ids=group_ids)))
        return [
            with_turns(t, "answer_logprobs", [float(np.mean(next(columns))) for _ in t.turns]) for t in trajectories
        ]


def answers_at_each_turn(trajectory: Trajectory, renderer: Renderer) -> list[Row]:
    """Return one row for each turn: its context, then the task's known answer, whose tokens are those in question.

    The stop token after the answer is left out: it is no knowledge of the policy.
    """
    assert trajectory.gold_answer is not None
    answer_ids = renderer.encode({"role": "assistant", "content": trajectory.gold_answer})
    while answer_ids and answer_ids[-1] in renderer.stop_token_ids:
        answer_ids = answer_ids[:-1]
    rows = []
    for number in range(len(trajectory.turns)):
        context_ids = context_of(trajectory.turns, number)
        rows.append(
            Row(
                ids_L=np.array([*context_ids, *answer_ids], dtype=np.int64),
                positions_T=np.arange(len(answer_ids)) + len(context_ids),
                turn_T=np.full(len(answer_ids), number),
            )
        )
    return rows
