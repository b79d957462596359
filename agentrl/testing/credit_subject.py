"""A credit scheme under test: how it is asked, and what it answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from agentrl.credit import Credit, CreditScheme, assign_credit
from agentrl.testing.credit_layouts import LAYOUTS, Layout
from agentrl.types import Trajectory, TrajectoryGroup

Array = npt.NDArray[np.float64]
Groups = Sequence[TrajectoryGroup]
Prepare = Callable[[TrajectoryGroup], TrajectoryGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The scheme under test, and how to ask it."""

    scheme: CreditScheme
    per_turn: bool
    reads_turn_rewards: bool
    batch_wide: bool
    options: Mapping[str, Sequence[Any]]
    prepare: Prepare

    def groups(self, *layouts: Layout, **changes: Any) -> list[TrajectoryGroup]:
        """Build made-up groups, by default all of `LAYOUTS`, with one thing changed."""
        return [self.prepare(layout.build(**changes)) for layout in layouts or LAYOUTS]

    def credit(self, groups: Groups) -> dict[str, Credit]:
        """Credit of each trajectory by its id; the made-up ids are unique over all groups."""
        assigned = assign_credit(self.scheme, groups)
        pairs = zip(groups, assigned, strict=True)
        return {t.trajectory_id: c for group, row in pairs for t, c in zip(group.trajectories, row, strict=True)}

    def undiscounted(self) -> Self:
        """The same with gamma 1, where rewards of all turns weigh the same."""
        has = "gamma" in type(self.scheme).model_fields
        return replace(self, scheme=self.scheme.model_copy(update={"gamma": 1.0})) if has else self


def same(first: Mapping[str, Credit], second: Mapping[str, Credit], *, factor: float = 1.0) -> bool:
    """Tell whether `factor` times the first is the second, up to float32, for the same trajectories."""
    return first.keys() == second.keys() and all(
        np.array_equal(first[key].keep_T, second[key].keep_T)
        and first[key].advantages_T.shape == second[key].advantages_T.shape
        and np.allclose(factor * first[key].advantages_T, second[key].advantages_T, rtol=1e-5, atol=1e-6)
        for key in first
    )


def by_turn(trajectory: Trajectory, credit: Credit) -> list[npt.NDArray[np.float32]]:
    """Split the advantages of a trajectory by turn."""
    ends = np.cumsum([len(turn.action_ids) for turn in trajectory.turns])
    return np.split(credit.advantages_T, ends[:-1])


def first_of_turns(groups: Groups, credit: Mapping[str, Credit]) -> Array:
    """Concatenate the first action token's advantage of every turn of every trajectory."""
    found = [by_turn(t, credit[t.trajectory_id]) for group in groups for t in group.trajectories]
    return np.array([advantages[0] for turns in found for advantages in turns], dtype=np.float64)
