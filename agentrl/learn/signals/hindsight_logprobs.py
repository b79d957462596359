"""Log-probability of each action token under the policy itself, told beforehand how the episode will end."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from agentrl.chat import Renderer
from agentrl.learn.signals.base import Sample, Signal
from agentrl.types import Message, Trajectory


class HindsightLogprobs(Signal):
    """One forward pass of the weights that sampled, over contexts whose first message has a hint."""

    sample: ClassVar = Sample(start=-0.1, step=-0.4, by_trajectory=3, by_turn=1, period=4)

    def measure(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with the log-probabilities in hindsight."""
        from agentrl.learn.signals.scoring import logprobs, with_tokens

        told = [with_hindsight(t, self.context.renderer, self.context.tools) for t in trajectories]
        self.context.check_lengths(told)
        return with_tokens(trajectories, "hindsight_logprobs", logprobs(self.context, told))


def with_hindsight(trajectory: Trajectory, renderer: Renderer, tools: Sequence[dict[str, Any]]) -> Trajectory:
    """Return the trajectory as if its first message had said how it ends, and the answer where there is a known one.

    Every action stays as it was sampled; each context that was restarted is rendered with the hint in it.
    """
    answer = "" if trajectory.gold_answer is None else f" The right answer is: {trajectory.gold_answer}"
    hint = f"(In hindsight: the total reward was {trajectory.reward:.3g}.{answer})"
    history: list[Message] = []
    turns = []
    for k, turn in enumerate(trajectory.turns):
        observation = list(turn.observation)
        if k == 0 and not observation:
            observation = [{"role": "user", "content": hint}]
        elif k == 0:
            observation[-1] = {**observation[-1], "content": f"{observation[-1].get('content') or ''}\n{hint}"}
        history += observation
        if k == 0 or not turn.extends:
            turn = replace(turn, observation_ids=renderer.start(history, tools))
        turns.append(turn)
        history.append(turn.message)
    return replace(trajectory, turns=tuple(turns))
