"""The turns of a batch as columns, and the way back from a column of advantages to credit.

Legend: `M` trajectories that are compared, `N` their turns, one trajectory after the other.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, ValidationInfo

from agentrl import (
    ConfigError,
    Credit,
    CreditError,
    CreditScheme,
    FinishReason,
    LoneRule,
    Need,
    Trajectory,
    TrajectoryGroup,
    Turn,
    load_credit,
)
from agentrl_credit.stages import Array, Ints, cell_means, gae, label, returns_to_go, shrink


def _field(info: ValidationInfo) -> str:
    return f"{(info.context or {}).get('section', 'credit')}.{info.field_name}"


def _checked(spec: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    if "fallback" in spec:
        raise ConfigError(
            f"{_field(info)}.fallback: it belongs to the outer scheme, whose data may be missing; remove it"
        )
    load_credit(spec, field=_field(info))
    return spec


def _of_rewards(spec: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    scheme = load_credit(spec)
    if not all(layer.reads_rewards for layer in scheme.chain()):
        raise ConfigError(f"{_field(info)}: {spec['scheme']!r} reads no rewards; choose a scheme that does")
    reads = scheme.requirements()
    for need, words in (
        (Need.VALUES, "a critic, which learns the environment's rewards and not these"),
        (Need.BRANCHES, "what forks earned, which are the environment's rewards and not these"),
    ):
        if need in reads:
            raise ConfigError(f"{_field(info)}: {spec['scheme']!r} reads {words}; choose a scheme that does not")
    return spec


Spec = Annotated[dict[str, Any], AfterValidator(_checked)]
"""Another scheme with its fields, as under `credit:` in a recipe."""
RewardSpec = Annotated[Spec, AfterValidator(_of_rewards)]
"""A scheme for other rewards than the environment's: one without a critic and without forks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """All turns of the trajectories that are compared."""

    trajectories: list[Trajectory]
    returns_M: Array
    """Undiscounted return of each trajectory."""
    group_M: Ints
    """Number of each trajectory's group."""
    lengths_M: Ints
    """Turns of each trajectory."""
    rewards_N: Array
    group_N: Ints
    """Number of each turn's group."""
    owner_N: Ints
    """Number of the trajectory that each turn belongs to."""
    index_N: Ints
    """Place of each turn within its trajectory, from 0."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[Trajectory]]) -> "Turns":
        """Lay out groups of trajectories."""
        trajectories = [trajectory for group in groups for trajectory in group]
        group_M = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        lengths_M = np.array([len(t.turns) for t in trajectories], dtype=np.int64)
        owner_N = np.repeat(np.arange(len(trajectories)), lengths_M)
        return cls(
            trajectories=trajectories,
            returns_M=np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64),
            group_M=group_M,
            lengths_M=lengths_M,
            rewards_N=np.array([turn.reward for t in trajectories for turn in t.turns], dtype=np.float64),
            group_N=group_M[owner_N],
            owner_N=owner_N,
            index_N=np.arange(owner_N.size) - (np.cumsum(lengths_M) - lengths_M)[owner_N],
        )

    def split(self, column_N: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Cut a column into one piece for each trajectory."""
        return np.split(column_N, np.cumsum(self.lengths_M)[:-1])

    def returns_to_go(self, *, gamma: float, rewards_N: Array | None = None) -> Array:
        """Return G of each turn, of the environment's rewards or of others."""
        rewards = self.split(self.rewards_N if rewards_N is None else rewards_N)
        return _joined(returns_to_go(rewards_K, gamma=gamma) for rewards_K in rewards)

    def gae(self, values_N: Array, *, gamma: float, lam: float, final_values_M: npt.ArrayLike) -> Array:
        """Return the generalised advantage estimate of each turn."""
        pieces = zip(self.split(self.rewards_N), self.split(values_N), np.asarray(final_values_M), strict=True)
        return _joined(gae(r, v, gamma=gamma, lam=lam, final_value=float(last)) for r, v, last in pieces)

    def keys(self, name: Literal["state_key", "action_key"]) -> list[str | None]:
        """Return the key of each turn; an action that was cut off was never carried out, and its key is None.

        Raises:
            CreditError: naming the trajectory and the turn that has none.
        """
        turns = [turn for t in self.trajectories for turn in t.turns]
        found: list[str | None] = [getattr(turn, name) for turn in turns]
        for n, (key, turn) in enumerate(zip(found, turns, strict=True)):
            if key is not None or (name == "action_key" and turn.finish_reason is not FinishReason.STOP):
                continue
            trajectory, words = self.trajectories[int(self.owner_N[n])], name.replace("_", " ")
            raise CreditError(
                f"trajectory {trajectory.trajectory_id}, turn {int(self.index_N[n])}: no {words}, which this scheme needs. "
                f"Let the environment's {name}() return one, or choose another scheme"
            )
        return found

    def state_values(self, *, gamma: float, leave_one_out: bool, shrinkage: float) -> tuple[Array, Array]:
        """Return the mean return-to-go of each turn's state over the group's visits to it, and that of each truncated end.

            V(s) = (n * mean of G over the n visits to s + shrinkage * pool) / (n + shrinkage)

        The pool is the mean of G over all turns of the group, and stands in for a state that no turn visited. With
        `leave_one_out`, visits and pool are those of the other trajectories. A trajectory that was truncated continues from
        the state it was left in; after one that ended there is nothing: 0.

        Shapes: (N,), (M,).
        """
        returns_N, last_M = self.returns_to_go(gamma=gamma), [t.turns[-1] for t in self.trajectories]
        # After the turns, one question for each trajectory: the value of the state that its last turn led to.
        after_M = [t.state_key if t.next_state_key is None else t.next_state_key for t in last_M]
        groups = np.concatenate([self.group_N, self.group_M])
        owners = np.concatenate([self.owner_N, np.arange(len(after_M))]) if leave_one_out else None
        is_turn = np.arange(len(groups)) < len(returns_N)
        returns = np.concatenate([returns_N, np.zeros(len(after_M))])
        states = label(zip(groups.tolist(), [*self.keys("state_key"), *after_M], strict=True))
        pool = cell_means(returns, groups, owners_N=owners, counted_N=is_turn).mean_N
        visits = cell_means(returns, states, owners_N=owners, counted_N=is_turn)
        values = shrink(visits, pool, kappa=shrinkage)
        is_truncated_M = np.array([t.truncated for t in self.trajectories])
        return values[is_turn], np.where(is_truncated_M, values[~is_turn], 0.0)

    def cells(self, *columns: Sequence[Any] | Ints) -> Ints:
        """Label turns of the same group that are alike in all columns."""
        return label(zip(self.group_N.tolist(), *map(_listed, columns), strict=True))


def needed(trajectory: Trajectory, name: str) -> list[Any]:
    """Return a field or a signal of every turn of a trajectory.

    Raises:
        CreditError: naming the trajectory and the turn where it was not measured, or is not finite.
    """
    found = [turn.signals.get(name, getattr(turn, name, None)) for turn in trajectory.turns]
    for k, value in enumerate(found):
        where = f"trajectory {trajectory.trajectory_id}, turn {k}"
        if value is None:
            raise CreditError(f"{where}: no {name}, which this scheme needs")
        if isinstance(value, float) and not math.isfinite(value):
            raise CreditError(f"{where}: {name} is not finite")
    return found


def token_column(trajectory: Trajectory, name: str) -> Array:
    """Return a field or a signal that holds one number for each action token, all turns in a row: (T,).

    Raises:
        CreditError: naming the trajectory where it was not measured, or is not finite.
    """
    column_T = np.fromiter(chain.from_iterable(needed(trajectory, name)), dtype=np.float64)
    if not np.isfinite(column_T).all():
        raise CreditError(f"trajectory {trajectory.trajectory_id}: {name} are not all finite")
    return column_T


def turn_means(column_T: Array, lengths_K: Sequence[int]) -> Array:
    """Average a column of tokens over each turn: (K,)."""
    sums_K: Array = np.add.reduceat(column_T, np.cumsum([0, *lengths_K[:-1]]))
    means_K: Array = sums_K / np.asarray(lengths_K)
    return means_K


def requirements_after(then: CreditScheme) -> frozenset[Need]:
    """Return what a scheme reads once turns have been given rewards that distinguish them."""
    return then.requirements() - {Need.TURN_REWARDS}


def turn_lengths(trajectory: Trajectory) -> list[int]:
    """Return the number of action tokens of each turn."""
    return [len(turn.action_ids) for turn in trajectory.turns]


def final_value(trajectory: Trajectory) -> float:
    """Return what a truncated trajectory still had ahead of it by the critic's word; 0 if the task ended.

    Raises:
        CreditError: if a truncated trajectory has no such value.
    """
    if not trajectory.truncated:
        return 0.0
    if (value := trajectory.signals.get("values")) is None:
        raise CreditError(
            f"trajectory {trajectory.trajectory_id} was truncated and has no value after its end to continue from"
        )
    return value


class Comparison(CreditScheme):
    """Base of schemes that compare the turns of siblings: `advantages` says how, for the whole batch at once.

    Failed trajectories are excluded from the loss and enter no statistic, and a lone one is treated as `lone` says.
    """

    lone: LoneRule = "error"
    """The only trajectory of its group that did not fail: "error" stops, "keep" gives it advantage 0 (it still counts
    in the loss's denominators), "drop" takes it out of the loss. Either way it enters no statistic."""

    def lone_rule(self) -> LoneRule:
        """Return `lone`."""
        return self.lone

    @abstractmethod
    def advantages(self, turns: Turns) -> Array:
        """Return the advantage of each turn: (N,)."""
        raise NotImplementedError

    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Return one `Credit` for each trajectory of each group, in the order given.

        Raises:
            CreditError: for a lone trajectory where `lone` is "error", and for a turn that lacks what the scheme reads.
        """
        valid = [group.valid for group in groups]
        turns = Turns.of([trajectories for trajectories in valid if len(trajectories) > 1])
        pieces = iter(turns.split(self.advantages(turns)) if turns.trajectories else [])

        def credit(trajectory: Trajectory, num_valid: int) -> Credit:
            if trajectory.failed:
                return Credit.excluded(trajectory)
            if num_valid > 1:
                return Credit.from_turns(trajectory, next(pieces))
            return _lone_credit(trajectory, lone=self.lone)

        return [
            [credit(trajectory, len(siblings)) for trajectory in group.trajectories]
            for group, siblings in zip(groups, valid, strict=True)
        ]


def credit_each(groups: Sequence[TrajectoryGroup], credit: Callable[[Trajectory], Credit]) -> list[list[Credit]]:
    """Credit each trajectory by itself; failed ones are excluded from the loss."""
    return [[Credit.excluded(t) if t.failed else credit(t) for t in group.trajectories] for group in groups]


def map_turns(
    groups: Sequence[TrajectoryGroup], transform: Callable[[Trajectory], Sequence[Turn]]
) -> list[TrajectoryGroup]:
    """Return the groups with other turns in the trajectories that did not fail: a reward transform."""
    return [
        replace(
            group,
            trajectories=tuple(t if t.failed else replace(t, turns=tuple(transform(t))) for t in group.trajectories),
        )
        for group in groups
    ]


def _lone_credit(trajectory: Trajectory, *, lone: LoneRule) -> Credit:
    if lone == "error":
        raise CreditError(
            f"group {trajectory.group_id} has one valid trajectory, {trajectory.trajectory_id}, and nothing to compare it "
            "with: make groups larger, or set lone: keep (advantage 0) or lone: drop (out of the loss)"
        )
    return Credit.uniform(trajectory, 0.0) if lone == "keep" else Credit.excluded(trajectory)


def _joined(pieces: Any) -> Array:
    return np.concatenate([np.empty(0), *pieces])


def _listed(column: Sequence[Any] | Ints) -> Sequence[Any]:
    return column.tolist() if isinstance(column, np.ndarray) else column
