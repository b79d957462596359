"""What every credit scheme must keep to, as one call: `check_credit(MyScheme())`."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl.credit import CreditScheme, Need, load_credit
from agentrl.errors import CheckError, CreditError
from agentrl.learn.signals import signal_classes
from agentrl.testing.credit_layouts import EVEN, LAYOUTS, LONE, LONG, ONE_TURN
from agentrl.testing.credit_options import idle_options
from agentrl.testing.credit_subject import Prepare, Subject, by_turn, first_of_turns, same
from agentrl.types import FinishReason, StopReason, Trajectory, TrajectoryGroup

_TURN_DATA = frozenset({Need.TURN_REWARDS, Need.STATE_KEYS, Need.VALUES, Need.BRANCHES})
"""What tells the turns of a trajectory apart by what they earned or led to."""
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
    """Raise with all that is wrong with a credit scheme; return where nothing is.

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
        options: values to try for options whose type does not tell any (text, nested models, callables).
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
    """A critic learns returns under the discount that the scheme tells; one that is kept to itself would be 1 there."""
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
