"""The seam of credit assignment: a scheme turns groups of trajectories into one advantage for each sampled token.

`T` sampled tokens of a trajectory (all turns' actions, in order), `K` turns.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.errors import ConfigError, CreditError
from agentrl.registry import resolve, suggest
from agentrl.types import Need, Trajectory, TrajectoryGroup

__all__ = ["Credit", "CreditScheme", "Need", "assign_credit", "load_credit"]

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """The credit of one trajectory."""

    advantages_T: FloatArray
    """One advantage for each action token, float32."""
    keep_T: BoolArray
    """False leaves the loss and its denominators: not the same as an advantage of 0."""

    @classmethod
    def from_tokens(
        cls, trajectory: Trajectory, advantages_T: npt.ArrayLike, *, keep_T: npt.ArrayLike | None = None
    ) -> Self:
        """Credit each action token by itself.

        Raises:
            CreditError: when there is not exactly one finite advantage for each action token.
        """
        advantages = np.asarray(advantages_T, dtype=np.float32)
        keep = np.ones(advantages.shape, dtype=np.bool_) if keep_T is None else np.asarray(keep_T, dtype=np.bool_)
        credit = cls(advantages_T=advantages, keep_T=keep)
        credit.check(trajectory)
        return credit

    @classmethod
    def from_turns(cls, trajectory: Trajectory, advantages_K: npt.ArrayLike) -> Self:
        """Give each turn's advantage to every token of its action.

        Raises:
            CreditError: when there is not exactly one finite advantage for each turn.
        """
        advantages = np.asarray(advantages_K, dtype=np.float32)
        if advantages.shape != (len(trajectory.turns),):
            raise CreditError(
                f"trajectory {trajectory.trajectory_id} has {len(trajectory.turns)} turns, "
                f"got turn advantages of shape {advantages.shape}"
            )
        lengths = [len(turn.action_ids) for turn in trajectory.turns]
        return cls.from_tokens(trajectory, np.repeat(advantages, lengths))

    @classmethod
    def uniform(cls, trajectory: Trajectory, advantage: float) -> Self:
        """Give one advantage to every action token."""
        return cls.from_tokens(trajectory, np.full(trajectory.num_action_tokens, advantage, dtype=np.float32))

    @classmethod
    def excluded(cls, trajectory: Trajectory) -> Self:
        """Leave the whole trajectory out of the loss."""
        num = trajectory.num_action_tokens
        return cls(advantages_T=np.zeros(num, dtype=np.float32), keep_T=np.zeros(num, dtype=np.bool_))

    def check(self, trajectory: Trajectory) -> None:
        """Raise CreditError where this credit does not fit the trajectory: wrong length, wrong type, not finite."""
        where, num = f"trajectory {trajectory.trajectory_id}", trajectory.num_action_tokens
        for name, array, kind in (("advantages_T", self.advantages_T, "f"), ("keep_T", self.keep_T, "b")):
            if not isinstance(array, np.ndarray) or array.dtype.kind != kind:
                raise CreditError(f"{where}: {name} must be a numpy array of {'floats' if kind == 'f' else 'bools'}")
            if array.shape != (num,):
                raise CreditError(f"{where} has {num} action tokens, got {name} of shape {array.shape}")
        if not np.isfinite(self.advantages_T).all():
            bad = int(np.flatnonzero(~np.isfinite(self.advantages_T))[0])
            raise CreditError(f"{where}: the advantage of action token {bad} is {self.advantages_T[bad]}")


class CreditScheme(BaseModel):
    """Base of all credit schemes: its pydantic fields are its hyper-parameters, so a recipe is validated.

    A scheme computes statistics over trajectories found by id, never by position, and leaves failed ones out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    needs: ClassVar[frozenset[Need]] = frozenset()
    """What the scheme reads beyond returns; a recipe whose environment lacks one of these is refused."""

    def requirements(self) -> frozenset[Need]:
        """Return what this instance reads: `needs`, and what its options add."""
        return self.needs

    @abstractmethod
    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Return one `Credit` for each trajectory of each group, in the order given."""
        raise TypeError(f"{type(self).__name__} must define assign(groups)")


def load_credit(spec: Mapping[str, Any], *, field: str = "credit") -> CreditScheme:
    """Build the scheme that a recipe's mapping describes: `{"scheme": "turn_return", "gamma": 0.5}`.

    `scheme` is an entry point's name (`agentrl credit` lists them) or `module:Class`; the rest are its fields.

    Raises:
        ConfigError: for an unknown scheme, an unknown field (with the nearest name) or an impossible value.
    """
    options = {key: value for key, value in spec.items() if key != "scheme"}
    name = spec.get("scheme")
    if not isinstance(name, str):
        raise ConfigError(f"{field}.scheme: expected the name of a credit scheme, got {name!r}")
    cls = resolve(name, group="agentrl.credit", field=f"{field}.scheme")
    if not (isinstance(cls, type) and issubclass(cls, CreditScheme)):
        raise ConfigError(f"{field}.scheme: {name!r} is {cls!r}, not a subclass of agentrl.CreditScheme")
    for key in options:
        if key not in cls.model_fields:
            raise ConfigError(f"{field}.{key}: {name!r} has no such option.{suggest(key, cls.model_fields)}")
    try:
        return cls.model_validate(options)
    except ValidationError as error:
        lines = [f"{'.'.join([field, *map(str, e['loc'])])}: {e['msg']} (got {e['input']!r})" for e in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def assign_credit(scheme: CreditScheme, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
    """Credit all groups; failed trajectories are hidden from the scheme and come back excluded.

    Raises:
        CreditError: naming the scheme and the trajectory, when what it returned does not fit.
    """
    name = type(scheme).__name__
    valid = [replace(group, trajectories=group.valid) for group in groups]
    present = [group for group in valid if group.trajectories]
    try:
        assigned = scheme.assign(present)
        if len(assigned) != len(present):
            raise CreditError(f"{len(present)} groups, got credit for {len(assigned)}")
        found: dict[tuple[str, str], Credit] = {}
        for group, credits in zip(present, assigned, strict=True):
            if len(credits) != len(group.trajectories):
                raise CreditError(
                    f"group {group.group_id} has {len(group.trajectories)} trajectories, got {len(credits)} credits"
                )
            for trajectory, credit in zip(group.trajectories, credits, strict=True):
                credit.check(trajectory)
                found[group.group_id, trajectory.trajectory_id] = credit
    except CreditError as error:
        raise CreditError(f"credit scheme {name}: {error}") from error
    return [
        [found.get((group.group_id, t.trajectory_id)) or Credit.excluded(t) for t in group.trajectories]
        for group in groups
    ]
