"""The made-up groups that `check_credit` asks schemes about."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.learn.signals import signal_classes
from agentrl.learn.signals.base import Sample
from agentrl.testing.groups import make_group
from agentrl.types import TrajectoryGroup

BEHAVIOR = Sample(start=-0.25, step=-0.25, by_trajectory=1, by_turn=1, period=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The nested lists of one made-up group, so that a check can change one of them."""

    group_id: str
    rewards: list[list[float]]
    states: list[str]
    lengths: list[list[int]] = field(default_factory=list)

    def build(
        self,
        *,
        rewards: Sequence[Sequence[float]] | None = None,
        lengths: list[list[int]] | None = None,
        observation: int = 2,
        scale: float = 1.0,
    ) -> TrajectoryGroup:
        """Build the group with all that a scheme may read: values rise within a turn, the rest is the same all along it.

        Args:
            rewards: other rewards.
            lengths: other numbers of action tokens.
            observation: number of observation tokens before each turn but the first.
            scale: factor of what is in units of reward.
        """
        rewards = self.rewards if rewards is None else rewards
        lengths = lengths or self.lengths or [[1] * len(row) for row in self.rewards]
        slots = [[(i, k) for k in range(len(row))] for i, row in enumerate(self.rewards)]

        def numbers(sample: Sample, *, per_token: bool) -> list[list[Any]]:
            factor = scale if sample.in_rewards else 1.0
            return [
                [
                    [factor * sample.at(i, k, t) for t in range(lengths[i][k])]
                    if per_token
                    else factor * sample.at(i, k)
                    for i, k in row
                ]
                for row in slots
            ]

        group = make_group(
            [[scale * reward for reward in row] for row in rewards],
            state_keys=[list(row) for row in self.states],
            action_keys=[["ab"[(i + k) % 2] for i, k in row] for row in slots],
            action_lengths=lengths,
            observation_lengths=[[observation if k else 3 for _, k in row] for row in slots],
            group_id=self.group_id,
            behavior_logprobs=numbers(BEHAVIOR, per_token=True),
            branch_rewards=[
                [((scale * 0.5 * ((i + k) % 3),), (scale * 0.25, scale * 0.5 * (k % 2))) for i, k in row]
                for row in slots
            ],
            **{need: numbers(s.sample, per_token=s.is_per_token) for need, s in signal_classes().items()},
        )
        of_whole = {
            need.value: s.trajectory_sample * (scale if s.sample.in_rewards else 1.0)
            for need, s in signal_classes().items()
            if s.trajectory_sample is not None
        }
        return replace(
            group, trajectories=tuple(replace(t, gold_answer="42", signals=of_whole) for t in group.trajectories)
        )


LAYOUTS = (
    Layout(
        group_id="oak",
        rewards=[[0, 1], [0.5, 0, 0], [0, 0], [1]],
        states=["AB", "ACB", "AC", "A"],
        lengths=[[2, 3], [1, 2, 2], [3, 1], [4]],
    ),
    Layout(group_id="elm", rewards=[[0, 0, 2], [1, 0.25, 0]], states=["ADA", "AAE"], lengths=[[1, 1, 1], [2, 4, 3]]),
    Layout(
        group_id="ash",
        rewards=[[0.25], [0, -1, 0, 0.5], [0.75, 0]],
        states=["F", "FGFG", "FG"],
        lengths=[[1], [2, 1, 2, 1], [5, 2]],
    ),
)
"""Groups of different sizes and lengths, with repeated states, zero rewards and a state that is met once."""
LONE = Layout(group_id="fir", rewards=[[0.5, 1]], states=["AB"], lengths=[[2, 2]])
ONE_TURN = Layout(group_id="yew", rewards=[[1], [0.25], [0], [0.5]], states=list("AAAA"))
EVEN = Layout(group_id="box", rewards=[[0, 1, 0], [0.5, 0, 0.25], [0, 0, 0]], states=["ABC", "ACB", "ABB"])
LONG = Layout(group_id="sea", rewards=[[0.0] * 12, [0.5] + [0.0] * 11, [0.0] * 11 + [1.0]], states=["ABCDEFGHIJKL"] * 3)
