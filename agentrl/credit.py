"""The seam of credit assignment: a scheme turns groups of trajectories into one advantage for each sampled token.

`T` sampled tokens of a trajectory (all turns' actions, in order), `K` turns.
"""

import math
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real
from traceback import extract_tb
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from agentrl.data.plain import abbreviated
from agentrl.errors import ConfigError, CreditError
from agentrl.recipe.plugin import plugin_class, with_fields
from agentrl.recipe.registry import names
from agentrl.types import Need, Trajectory, TrajectoryGroup

__all__ = ["Credit", "CreditScheme", "LoneRule", "Need", "assign_credit", "load_credit", "load_credit_for"]

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
LoneRule = Literal["error", "keep", "drop"]
"""Rule for a trajectory that has no sibling to be compared with: stop; advantage 0; out of the loss."""
_REMOVED = {
    "bilevel_gae": "turn_gae",
    "difference": "tree",
    "entropy_modulated": "turn_return",
    "hgpo": "gigpo",
    "hindsight": "distill",
    "mt_grpo": "turn_return",
    "token_residual": "turn_gae",
}
"""Schemes of earlier versions, and those that come nearest."""


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
        advantages = _floats(trajectory, advantages_T)
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
        advantages = _floats(trajectory, advantages_K)
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
        """Raise CreditError if this credit does not fit the trajectory: wrong length, wrong type, not finite."""
        where, num = f"trajectory {trajectory.trajectory_id}", trajectory.num_action_tokens
        for name, array, kind in (("advantages_T", self.advantages_T, np.float32), ("keep_T", self.keep_T, np.bool_)):
            if not isinstance(array, np.ndarray) or array.dtype != kind:
                got = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                raise CreditError(f"{where}: {name} must be a numpy array of {np.dtype(kind)}, got {got}")
            if array.shape != (num,):
                raise CreditError(f"{where} has {num} action tokens, got {name} of shape {array.shape}")
        if not np.isfinite(self.advantages_T).all():
            bad = int(np.flatnonzero(~np.isfinite(self.advantages_T))[0])
            raise CreditError(f"{where}: the advantage of action token {bad} is {self.advantages_T[bad]}")


def _floats(trajectory: Trajectory, values: npt.ArrayLike) -> FloatArray:
    try:
        # A number too large for float32 becomes infinite here, and `Credit.check` names its place.
        with np.errstate(over="ignore"):
            return np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise CreditError(
            f"trajectory {trajectory.trajectory_id}: advantages must be a flat list of numbers ({error})"
        ) from error


class CreditScheme(BaseModel):
    """Base of all credit schemes: its pydantic fields are its hyper-parameters, so a recipe is validated.

    A scheme computes statistics over trajectories found by id, never by position, and leaves failed ones out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    needs: ClassVar[frozenset[Need]] = frozenset()
    """Data that the scheme reads beyond returns; a recipe whose environment lacks one of these is refused."""

    granularity: ClassVar[Literal["trajectory", "turn", "token"]] = "turn"
    """The smallest part of a trajectory whose advantage may differ from the next one's."""
    paper: ClassVar[str] = ""
    """Source of the method: a name and an arXiv number."""
    reads_rewards: ClassVar[bool] = True
    """False if rewards play no part."""
    is_control: ClassVar[bool] = False
    """True if it is there to be compared with, and not to learn by."""

    def requirements(self) -> frozenset[Need]:
        """Return what this instance reads: `needs`, and what its options add."""
        return self.needs

    def finest(self) -> Literal["trajectory", "turn", "token"]:
        """Return the `granularity` of this instance: what another scheme in it adds or takes away is counted."""
        return self.granularity

    def critic_discount(self) -> float | None:
        """Return the discount from turn to turn of the returns that a critic learns. None: this scheme has none."""
        return None

    def lone_rule(self) -> LoneRule | None:
        """Return what becomes of a trajectory that has no sibling to be compared with. None: it compares none."""
        return None

    def inner(self) -> "CreditScheme | None":
        """Return the scheme that this one is built around, if there is one."""
        return None

    def chain(self) -> "Iterator[CreditScheme]":
        """Yield this scheme, the one within it, and so on."""
        scheme: CreditScheme | None = self
        while scheme is not None:
            yield scheme
            scheme = scheme.inner()

    @abstractmethod
    def assign(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        """Return one `Credit` for each trajectory of each group, in the order given."""
        raise NotImplementedError


def load_credit(spec: Mapping[str, Any], *, field: str = "credit", elsewhere: Iterable[str] = ()) -> CreditScheme:
    """Build the scheme that a recipe's mapping describes: `{"scheme": "turn_return", "gamma": 0.5}`.

    Args:
        spec: `scheme` is an entry point's name (`agentrl credit` lists them) or `module:Class`; the rest are its fields.
        field: of the recipe, for error messages.
        elsewhere: other fields of the recipe, one of which may have been meant.

    Raises:
        ConfigError: for an unknown scheme, an unknown field (with the nearest name) or an impossible value.
    """
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{field}: {abbreviated(spec)} is no section; give {{'scheme': NAME}}, and its fields")
    options = {key: value for key, value in spec.items() if key not in ("scheme", "fallback")}
    name = spec.get("scheme")
    if spec.get("fallback", "uniform") != "uniform":
        raise ConfigError(f"{field}.fallback: the only fallback is 'uniform', got {spec['fallback']!r}")
    if not isinstance(name, str):
        raise ConfigError(f"{field}.scheme: expected the name of a credit scheme, got {name!r}")
    cls = credit_class(name, field=field)
    if name == "ecpo" and (former := [key for key in ("lam", "shrinkage", "gate") if key in options]):
        raise ConfigError(
            f"{field}.{former[0]}: 'ecpo' has no such option: it is its paper's formula now. Did you mean what had the name "
            f"before, scheme: action_values, gamma: {options.get('gamma', 1)}, lam: {options.get('lam', 1)}?"
        )
    for option in (key for key in options if key not in cls.model_fields):
        if others := [repr(other) for other, fields in _installed_fields().items() if option in fields]:
            raise ConfigError(
                f"{field}.{option}: {name!r} has no such option; remove it, or set {field}.scheme to one that has it: "
                f"{', '.join(others)}"
            )
    return with_fields(cls, options, name=name, section=field, elsewhere=elsewhere)


def credit_class(name: str, *, field: str = "credit") -> type[CreditScheme]:
    """Return the class of a scheme by its entry point's name or `module:Class`.

    Raises:
        ConfigError: when there is none, or it is no credit scheme.
    """
    if name in _REMOVED and name not in names("agentrl.credit"):
        raise ConfigError(
            f"{field}.scheme: {name!r} was removed: no benchmark favoured it. Nearest to it is {_REMOVED[name]!r}, or name a "
            "class of your own as 'module:Class' (docs/credit.md)"
        )
    base: Any = CreditScheme  # mypy takes no abstract class for a type
    cls: type[CreditScheme] = plugin_class(name, base=base, group="agentrl.credit", field=f"{field}.scheme")
    return cls


def _installed_fields() -> dict[str, Collection[str]]:
    """Return the fields of each installed scheme that can be loaded."""
    found: dict[str, Collection[str]] = {}
    for name in names("agentrl.credit"):
        with suppress(ConfigError):
            found[name] = credit_class(name).model_fields.keys()
    return found


def installed_credit() -> dict[str, frozenset[Need] | None]:
    """Return what each installed scheme reads under its defaults; None if it has no defaults for all its fields."""
    found: dict[str, frozenset[Need] | None] = {}
    for name in names("agentrl.credit"):
        try:
            found[name] = load_credit({"scheme": name}).requirements()
        except ConfigError:
            found[name] = None
    return found


def load_credit_for(
    spec: Mapping[str, Any], *, provided: frozenset[Need], hints: Mapping[Need, str], env_id: str
) -> tuple[CreditScheme, str | None]:
    """Build the scheme of a recipe for what its environment and its signals provide.

    `hints` says what the recipe must set for a need that no environment provides.

    Returns:
        the scheme and None; or, if the environment cannot serve it and the recipe has `fallback: uniform`, uniform
        advantages (plain GSPO) and a warning.

    Raises:
        ConfigError: naming the scheme, what it needs and the installed schemes that would work.
    """
    scheme = load_credit(spec)
    missing = sorted(scheme.requirements() - provided)
    if not missing:
        return scheme, None
    unset = [f"{need} (set {hints[need]})" for need in missing if need in hints]
    lacking = (
        [f"{', '.join(found)}, which the environment {env_id!r} lacks"]
        if (found := [need for need in missing if need not in hints])
        else []
    )
    problem = f"credit.scheme: {spec['scheme']!r} needs {'; and '.join([*unset, *lacking])}"
    if spec.get("fallback") == "uniform":
        return load_fallback(scheme), f"{problem}; falling back to uniform"
    working = [
        name
        for name, needs in installed_credit().items()
        if needs is not None and needs <= provided and not credit_class(name).is_control
    ]
    raise ConfigError(f"{problem}. These would work: {', '.join(working)}. Or set credit.fallback: uniform")


def load_fallback(scheme: CreditScheme) -> CreditScheme:
    """Return the scheme of uniform advantages in place of another, with its rule for a lone trajectory."""
    rules = (layer.lone_rule() for layer in scheme.chain())
    rule = next((rule for rule in rules if rule is not None), None)
    return load_credit({"scheme": "uniform"} | ({} if rule is None else {"lone": rule}))


def assign_credit(scheme: CreditScheme, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
    """Credit all groups; failed trajectories are hidden from the scheme and come back excluded.

    Raises:
        CreditError: naming the trajectory, for a reward that is not finite, a turn without a token, or an id that is
            there twice; naming the scheme and the trajectory, when what the scheme returned does not fit; naming the
            scheme and the line, for whatever else it raised.
    """
    _check_groups(groups)
    valid = [replace(group, trajectories=group.valid) for group in groups]
    present = [group for group in valid if group.trajectories]
    name = type(scheme).__name__
    try:
        found = _match(scheme.assign(present), present)
    except CreditError as error:
        raise CreditError(f"credit scheme {name}: {error}") from error
    except Exception as error:  # a stranger's scheme may raise anything
        places = extract_tb(error.__traceback__)
        modules = [sys.modules.get(type(layer).__module__) for layer in scheme.chain()]
        files = {getattr(module, "__file__", None) for module in modules}  # None of what a notebook defines
        place = next((place for place in reversed(places) if place.filename in files), places[-1])
        words = f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        raise CreditError(f"credit scheme {name} raised {words}") from error
    return [
        [found.get((group.group_id, t.trajectory_id)) or Credit.excluded(t) for t in group.trajectories]
        for group in groups
    ]


def _check_groups(groups: Sequence[TrajectoryGroup]) -> None:
    """Stop what would spoil a whole group's statistics, or let one trajectory take another's credit."""
    if twice := [group_id for group_id, num in Counter(group.group_id for group in groups).items() if num > 1]:
        raise CreditError(f"group {twice[0]} is there twice: its trajectories belong together")
    seen = set()
    for group in groups:
        for trajectory in group.trajectories:
            key = group.group_id, trajectory.trajectory_id
            where = f"trajectory {trajectory.trajectory_id} of group {group.group_id}"
            if trajectory.group_id != group.group_id:
                raise CreditError(f"{where} has group_id {trajectory.group_id!r}")
            if key in seen:
                raise CreditError(f"{where} is there twice: ids must be unique within a batch")
            seen.add(key)
            if trajectory.failed:
                continue
            for k, turn in enumerate(trajectory.turns):
                if not turn.action_ids:
                    raise CreditError(f"{where}, turn {k}: no token was sampled")
                if not isinstance(turn.reward, Real) or not math.isfinite(turn.reward):
                    raise CreditError(f"{where}, turn {k}: the reward is {turn.reward}, not a finite number")


def _match(assigned: object, groups: Sequence[TrajectoryGroup]) -> dict[tuple[str, str], Credit]:
    """Give each trajectory, by its ids, the credit that stands at its place, after checking that it fits."""
    found: dict[tuple[str, str], Credit] = {}
    if not isinstance(assigned, Sequence) or len(assigned) != len(groups):
        raise CreditError(
            f"assign() must return one list for each of the {len(groups)} groups, got {_describe(assigned)}"
        )
    for group, row in zip(groups, assigned, strict=True):
        num = len(group.trajectories)
        if not isinstance(row, Sequence) or len(row) != num:
            raise CreditError(f"group {group.group_id} has {num} trajectories, got {_describe(row)} for their credits")
        for trajectory, credit in zip(group.trajectories, row, strict=True):
            if not isinstance(credit, Credit):
                raise CreditError(f"trajectory {trajectory.trajectory_id}: expected a Credit, got {_describe(credit)}")
            credit.check(trajectory)
            found[group.group_id, trajectory.trajectory_id] = credit
    return found


def _describe(value: object) -> str:
    return f"{type(value).__name__} of length {len(value)}" if isinstance(value, Sequence) else type(value).__name__
