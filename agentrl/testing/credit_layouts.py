"""The made-up groups that `check_credit` asks schemes about."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.testing.groups import make_group
from agentrl.types import TrajectoryGroup


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
        state_keys: bool = True,
        scale: float = 1.0,
    ) -> TrajectoryGroup:
        """Build the group: `observation` tokens before each turn but the first, rewards and values times `scale`."""
        rewards = self.rewards if rewards is None else rewards
        shape = [range(len(row)) for row in self.rewards]
        return make_group(
            [[scale * reward for reward in row] for row in rewards],
            state_keys=[list(row) for row in self.states] if state_keys else None,
            action_keys=[["ab"[(i + k) % 2] for k in row] for i, row in enumerate(shape)],
            action_lengths=lengths or self.lengths or None,
            observation_lengths=[[observation if k else 3 for k in row] for row in shape],
            values=[[scale * (0.25 + 0.125 * ((2 * i + k) % 5)) for k in row] for i, row in enumerate(shape)],
            group_id=self.group_id,
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
