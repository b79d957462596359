"""Promises of every credit scheme, as one call: `check_credit(MyScheme())`.

Schemes are asked about made-up groups, and each of their options is changed to see whether it does anything.
"""

import enum
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from agentrl.credit import Credit, CreditScheme, Need, assign_credit, load_credit
from agentrl.errors import CheckError, CreditError
from agentrl.learn.signals import signal_classes
from agentrl.learn.signals.base import Sample
from agentrl.testing.groups import make_group
from agentrl.types import FinishReason, StopReason, Trajectory, TrajectoryGroup


def is_closed(annotation: Any) -> bool:
    """Return whether a type has few values: bool, Literal, Enum, and what is composed of them."""
    annotation = _plain(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return all(is_closed(part) for part in get_args(annotation))
    is_enum = isinstance(annotation, type) and issubclass(annotation, enum.Enum)
    return annotation in (bool, types.NoneType) or get_origin(annotation) is Literal or is_enum


def other_values(annotation: Any, given: Any) -> Iterator[Any]:
    """Yield values of a type that are not the given one; nothing for types that have none."""
    annotation = _plain(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from other_values(part, given)
        return
    found: list[Any] = []
    if get_origin(annotation) is Literal:
        found = list(get_args(annotation))
    elif annotation is bool:
        found = [False, True]
    elif annotation is types.NoneType:
        found = [None]
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        found = list(annotation)
    elif annotation in (int, float):
        start = given if isinstance(given, annotation) else annotation()
        steps = (start / 2, 2 * start, start + 0.25, start - 0.25) if annotation is float else (start + 1, start - 1)
        found = [*steps, *map(annotation, (0, 1, 2, 10))]
    yield from (value for value in found if value != given)


def _plain(annotation: Any) -> Any:
    """Return a type without what is said of it: the bounds of a number, which the field checks."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


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
    """Return whether `factor` times the first is the second, up to float32, for the same trajectories."""
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


MAX_BASES = 400
"""Most combinations of a scheme's other options under which an option is tried before it is called idle."""


def idle_options(subject: Subject) -> Iterator[str]:
    """Each option, changed by itself, changes the outcome of some batch under some setting of the others."""
    cls, given = type(subject.scheme), dict(subject.scheme)
    tries = {
        name: list(subject.options.get(name, other_values(info.annotation, given[name])))
        for name, info in cls.model_fields.items()
    }
    discrete = {name: values for name, values in tries.items() if is_closed(cls.model_fields[name].annotation)}
    batches = [subject.groups(), subject.groups(LONE)]
    for name, values in tries.items():
        if not values:
            if not is_closed(cls.model_fields[name].annotation):
                yield f"option {name}: its type has no other value to try; give some in options={{{name!r}: [...]}}"
            continue
        others = {other: choices for other, choices in discrete.items() if other != name}
        bases = (given | chosen for chosen in itertools.islice(_combinations(others), MAX_BASES))
        if not any(_matters(subject, base, name, values, batches) for base in bases):
            yield f"option {name} changes nothing"


def _combinations(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield all ways to choose for some of the names, those that choose for few names first."""
    for size in range(len(choices) + 1):
        for chosen in itertools.combinations(choices, size):
            for values in itertools.product(*(choices[name] for name in chosen)):
                yield dict(zip(chosen, values, strict=True))


def _matters(
    subject: Subject, base: Mapping[str, Any], name: str, values: Sequence[Any], batches: Sequence[Groups]
) -> bool:
    outcomes = [_outcomes(subject, {**base, name: value}, batches) for value in (base[name], *values)]
    valid = [outcome for outcome in outcomes if outcome is not None]
    return any(
        (a is None) != (b is None) or (a is not None and b is not None and not same(a, b))
        for other in valid[1:]
        for a, b in zip(valid[0], other, strict=True)
    )


def _outcomes(
    subject: Subject, fields: Mapping[str, Any], batches: Sequence[Groups]
) -> list[dict[str, Credit] | None] | None:
    """Credit each batch, None if it is refused; None for all where the fields make no valid scheme."""
    try:
        scheme = type(subject.scheme).model_validate(fields)
    except ValidationError:
        return None
    asked = replace(subject, scheme=scheme)
    found: list[dict[str, Credit] | None] = []
    for batch in batches:
        try:
            found.append(asked.credit(batch))
        except CreditError:
            found.append(None)
    return found


_TURN_DATA = frozenset({Need.TURN_REWARDS, Need.STATE_KEYS, Need.VALUES, Need.BRANCHES})
"""Signals that differ between the turns of a trajectory by what they earned or led to."""
_FIELDS = {
    Need.STATE_KEYS: ("state_key", "next_state_key"),
    Need.ACTION_KEYS: ("action_key",),
    Need.BRANCHES: ("branch_rewards",),
}
"""The fields of a turn that hold what the environment provides; `Turn.signals` holds the rest."""


def check_credit(
    scheme: CreditScheme | type[CreditScheme] | Mapping[str, Any] | str,
    *,
    relative: bool = True,
    outcome_level: bool | None = None,
    reads_turn_rewards: bool | None = None,
    scale_equivariant: bool | None = None,
    leave_one_out: bool | None = None,
    batch_wide: bool | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    prepare: Prepare | None = None,
) -> None:
    """Raise with all that is wrong with a credit scheme; return if nothing is.

    Every scheme is held to: one finite credit for each action token, the same at each call; following its trajectories
    when they are put in another order or renamed; blindness to observation tokens, the action's length and failed
    siblings; reading turn rewards and state keys only where `requirements()` says so, and then each turn at its own
    place; and options that each change something. The rest depends on the kind of scheme:

    Args:
        scheme: the scheme as configured, its class (with its defaults), a recipe's mapping, or the name alone.
        relative: it compares siblings by what they earned: equal returns give 0, and a constant on all returns changes
            nothing. False for critics and teachers.
        outcome_level: with one turn each, the advantage is a multiple of return less mean. None: where `relative`.
        reads_turn_rewards: a reward counts at its own turn. None: where `requirements()` names what tells turns apart
            (turn rewards, state keys, values or branches).
        scale_equivariant: twice the rewards give twice the advantages. None: where its field `normalize` is "none" or
            "leave_one_out".
        leave_one_out: its baseline does not read the trajectory's own return, and nothing is divided by a statistic.
            None: where `normalize` is "leave_one_out", or `leave_one_out` is true and `normalize` is "none" or absent.
        batch_wide: groups influence each other. None: where `normalize` is "batch".
        options: values to try for options whose type does not give any (text, nested models, callables).
        prepare: adds to the made-up groups what the scheme reads beyond them; it is called on each.

    Raises:
        CheckError: one line for each thing that is wrong.
        ConfigError: when the scheme cannot be built from the name or mapping.
    """
    scheme = _build(scheme)
    normalize, has_loo = getattr(scheme, "normalize", None), getattr(scheme, "leave_one_out", None) is True
    if scale_equivariant is None:
        scale_equivariant = normalize in ("none", "leave_one_out")
    if leave_one_out is None:
        leave_one_out = normalize == "leave_one_out" or (has_loo and normalize in ("none", None))
    subject = Subject(
        scheme=scheme,
        per_turn=scheme.finest() != "token",
        reads_turn_rewards=(
            bool(scheme.requirements() & _TURN_DATA) if reads_turn_rewards is None else reads_turn_rewards
        ),
        batch_wide=normalize == "batch" if batch_wide is None else batch_wide,
        options=options or {},
        prepare=prepare or (lambda group: group),
    )
    checks = [_fits, _order, _names, _observations, _tokens, _needs, _discount, _places, _cut_off, _failures, _lone]
    checks += [idle_options]
    checks += [_equal_returns, _shift] if relative else []
    checks += [_one_turn] if (relative if outcome_level is None else outcome_level) else []
    checks += [_scale] if scale_equivariant else []
    checks += [_own_return] if leave_one_out else []
    problems: list[str] = []
    for check in checks:
        try:
            problems.extend(check(subject))
        except Exception as error:  # noqa: BLE001 - whatever a stranger's scheme raises belongs in the list
            problems.append(f"{type(error).__name__} where credit was expected: {error}")
            if check is _fits:  # it credits nothing, so that the other checks would only say the same again
                break
    if problems:
        lines = "".join(f"\n- {problem}" for problem in dict.fromkeys(problems))
        raise CheckError(f"credit scheme {scheme!r}:{lines}")


def _build(scheme: CreditScheme | type[CreditScheme] | Mapping[str, Any] | str) -> CreditScheme:
    if isinstance(scheme, CreditScheme):
        return scheme
    if isinstance(scheme, type):
        return scheme()
    return load_credit({"scheme": scheme} if isinstance(scheme, str) else scheme)


def _fits(subject: Subject) -> Iterator[str]:
    groups = subject.groups()
    if not same(subject.credit(groups), subject.credit(groups)):
        yield "the same groups, credited twice, get different credit"
    if not subject.batch_wide:
        apart = {key: credit for group in groups for key, credit in subject.credit([group]).items()}
        if not same(subject.credit(groups), apart):
            yield "a group's credit depends on the other groups in the batch (batch_wide=True where that is meant)"


def _order(subject: Subject) -> Iterator[str]:
    groups = subject.groups()
    expected = subject.credit(groups)
    for what, first, step in (("reversed", 0, -1), ("rotated", 1, 1)):
        moved = [
            replace(group, trajectories=(group.trajectories[first:] + group.trajectories[:first])[::step])
            for group in groups
        ]
        if not same(expected, subject.credit(moved)):
            yield f"trajectories {what} within their group do not take their credit along"
    if not same(expected, subject.credit(groups[::-1])):
        yield "groups in another order do not take their credit along"


def _names(subject: Subject) -> Iterator[str]:
    groups = subject.groups()
    names = {t.trajectory_id: f"{99 - n}" for n, t in enumerate(t for group in groups for t in group.trajectories)}
    renamed = [
        replace(
            group,
            group_id=f"{99 - g}",
            trajectories=tuple(
                replace(t, group_id=f"{99 - g}", trajectory_id=names[t.trajectory_id]) for t in group.trajectories
            ),
        )
        for g, group in enumerate(groups)
    ]
    expected = {names[key]: credit for key, credit in subject.credit(groups).items()}
    if not same(expected, subject.credit(renamed)):
        yield "the names of groups and trajectories change the credit, not only which belong together"


def _observations(subject: Subject) -> Iterator[str]:
    expected = subject.credit(subject.groups())
    for length in (0, 7):
        if not same(expected, subject.credit(subject.groups(observation=length))):
            yield f"the number of observation tokens changes the credit ({length} before each turn but the first)"
    other = [
        replace(
            group,
            trajectories=tuple(
                replace(t, turns=tuple(replace(turn, observation_ids=(1, *turn.observation_ids)) for turn in t.turns))
                for t in group.trajectories
            ),
        )
        for group in subject.groups()
    ]
    if not same(expected, subject.credit(other)):
        yield "the observation tokens change the credit"


def _tokens(subject: Subject) -> Iterator[str]:
    if not subject.per_turn:
        return
    groups = subject.groups()
    credit = subject.credit(groups)
    split = [by_turn(t, credit[t.trajectory_id]) for group in groups for t in group.trajectories]
    if any(np.ptp(advantages) > 1e-6 for turns in split for advantages in turns):
        yield 'the tokens of one action differ in advantage (granularity = "token" where that is meant)'
    for lengths in (lambda k: 1 + k % 3, lambda k: 6 - k % 4):
        other = [
            subject.prepare(
                x.build(lengths=[[lengths(i + k) for k in range(len(row))] for i, row in enumerate(x.rewards)])
            )
            for x in LAYOUTS
        ]
        if not np.allclose(
            first_of_turns(groups, credit), first_of_turns(other, subject.credit(other)), rtol=1e-5, atol=1e-6
        ):
            yield "the number of tokens of the actions changes the advantages of the turns"
            return


def _needs(subject: Subject) -> Iterator[str]:
    needs = subject.scheme.requirements()
    if extra := sorted(type(subject.scheme).needs - needs):
        yield f"requirements() leaves out {', '.join(extra)}, which the class's needs name"
    for need in (*_FIELDS, *signal_classes()):
        words, groups = need.replace("_", " "), [_without(group, need) for group in subject.groups()]
        if need in needs:
            try:
                subject.credit(groups)
            except CreditError as error:
                if not any(t.trajectory_id in str(error) for group in groups for t in group.trajectories):
                    yield f"turns without {words} are refused without naming the trajectory: {error}"
            else:
                yield f"turns without {words} are credited all the same: raise CreditError naming trajectory and turn"
        elif not same(subject.credit(subject.groups()), subject.credit(groups)):
            yield f"{words} change the credit: requirements() must name Need.{need.name}"
    if not subject.reads_turn_rewards:
        moved = [x.build(rewards=[row[::-1] for row in x.rewards]) for x in LAYOUTS]
        if not same(subject.credit(subject.groups()), subject.credit([subject.prepare(group) for group in moved])):
            yield "which turn was rewarded changes the credit: requirements() must name Need.TURN_REWARDS"


def _discount(subject: Subject) -> Iterator[str]:
    """A critic learns returns under the discount that the scheme declares; one that is kept to itself would be 1 there."""
    scheme = subject.scheme
    if Need.VALUES in scheme.needs and "gamma" in type(scheme).model_fields and scheme.critic_discount() is None:
        yield "the critic does not learn returns under gamma: let critic_discount() return it"


def _without(group: TrajectoryGroup, need: Need) -> TrajectoryGroup:
    """Return the group without what a need names."""
    blank: dict[str, Any] = dict.fromkeys(_FIELDS.get(need, ()))

    def others(signals: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in signals.items() if name != need}

    def bare(trajectory: Trajectory) -> Trajectory:
        turns = tuple(replace(turn, **blank, signals=others(turn.signals)) for turn in trajectory.turns)
        return replace(trajectory, turns=turns, signals=others(trajectory.signals))

    return replace(group, trajectories=tuple(map(bare, group.trajectories)))


def _places(subject: Subject) -> Iterator[str]:
    """One more reward at each of twelve turns in its turn, with no observation in between: twelve different answers."""
    if not subject.reads_turn_rewards:
        return
    answers = []
    for place in [None, *range(12)]:
        first = [float(k == place) for k in range(12)]
        groups = subject.groups(LONG, rewards=[first, *LONG.rewards[1:]], observation=0)
        answers.append(subject.credit(groups))
    if idle := [str(k) for k in range(12) if same(answers[0], answers[k + 1])]:
        yield f"a reward at turn {', '.join(idle)} of twelve changes no credit"
    pairs = itertools.combinations(range(12), 2)
    if merged := [f"{a} and {b}" for a, b in pairs if same(answers[a + 1], answers[b + 1])]:
        yield f"a reward is credited alike at turns {merged[0]} of twelve: turns do not keep their own place"


def _cut_off(subject: Subject) -> Iterator[str]:
    """An action that met a token limit was never carried out: it has no key, and its trajectory is truncated."""
    groups = []
    for group in subject.groups():
        *others, last = group.trajectories
        turn = replace(last.turns[-1], action_key=None, next_state_key=None, finish_reason=FinishReason.LENGTH)
        last = replace(last, turns=(*last.turns[:-1], turn), truncated=True, stop_reason=StopReason.MAX_TOKENS)
        groups.append(replace(group, trajectories=(*others, last)))
    try:
        subject.credit(groups)
    except CreditError as error:
        yield f"an action that was cut off, and so has no action key, is refused: {error}"


def _failures(subject: Subject) -> Iterator[str]:
    groups = subject.groups()
    expected = subject.credit(groups)
    for stop in (stop for stop in StopReason if stop.failed):
        mixed, lost = [], set()
        for group in groups:
            first = group.trajectories[0]
            turns = tuple(replace(turn, reward=turn.reward + 50.0) for turn in first.turns)
            bad = replace(first, trajectory_id=f"{group.group_id}/failed", turns=turns, stop_reason=stop)
            lost.add(bad.trajectory_id)
            mixed.append(replace(group, trajectories=(group.trajectories[0], bad, *group.trajectories[1:])))
        # Not through assign_credit, which hides the failed: a scheme may be called by another scheme.
        rows = subject.scheme.assign(mixed)
        if [len(row) for row in rows] != [len(group.trajectories) for group in mixed]:
            yield "a failed trajectory has no entry in what assign() returns: give it Credit.excluded(trajectory)"
            return
        found = {
            t.trajectory_id: c
            for g, row in zip(mixed, rows, strict=True)
            for t, c in zip(g.trajectories, row, strict=True)
        }
        if any(found[key].keep_T.any() for key in lost):
            yield "a failed trajectory stays in the loss: give it Credit.excluded(trajectory)"
        if not same(expected, {key: credit for key, credit in found.items() if key not in lost}):
            yield "a failed trajectory changes its siblings' credit: take statistics over group.valid"


def _lone(subject: Subject) -> Iterator[str]:
    """A lone trajectory is credited or refused, in so many words; anything else that is raised is reported as such."""
    try:
        subject.credit(subject.groups(LONE))
    except CreditError as error:
        if LONE.group_id not in str(error):
            yield f"a lone trajectory is refused without naming its group: {error}"


def _equal_returns(subject: Subject) -> Iterator[str]:
    groups = subject.groups(ONE_TURN, rewards=[[0.1 + 0.2], [0.3], [0.3], [0.3]])
    if np.abs(first_of_turns(groups, subject.credit(groups))).max() > 1e-6:
        yield "siblings with equal returns do not get advantage 0 (.1 + .2 and .3 are equal but for rounding)"


def _shift(subject: Subject) -> Iterator[str]:
    subject = subject.undiscounted()
    for layout in (ONE_TURN, EVEN):
        shifted = [[*row[:-1], row[-1] + 2.5] for row in layout.rewards]
        if not same(subject.credit(subject.groups(layout)), subject.credit(subject.groups(layout, rewards=shifted))):
            yield "adding a constant to every return changes the credit"
            return


def _one_turn(subject: Subject) -> Iterator[str]:
    groups = subject.groups(ONE_TURN)
    advantages_G = first_of_turns(groups, subject.credit(groups))
    deviations_G = np.array(ONE_TURN.rewards)[:, 0] - np.mean(ONE_TURN.rewards)
    factor = float(advantages_G @ deviations_G / (deviations_G @ deviations_G))
    if factor <= 0 or not np.allclose(advantages_G, factor * deviations_G, rtol=1e-5, atol=1e-6):
        yield "with one turn each, the advantages are no positive multiple of return less the group's mean"


def _scale(subject: Subject) -> Iterator[str]:
    expected, doubled = subject.credit(subject.groups()), subject.credit(subject.groups(scale=2.0))
    if not same(expected, doubled, factor=2.0):
        yield "twice the rewards do not give twice the advantages"


def _own_return(subject: Subject) -> Iterator[str]:
    raised = [[row[0] + 3.0 * (i == 0)] for i, row in enumerate(ONE_TURN.rewards)]
    first, second = subject.groups(ONE_TURN), subject.groups(ONE_TURN, rewards=raised)
    gain = first_of_turns(second, subject.credit(second))[0] - first_of_turns(first, subject.credit(first))[0]
    if abs(gain - 3.0) > 1e-4:
        yield f"the baseline moves with the trajectory's own return: 3 more reward gives {gain:.4g} more advantage"
