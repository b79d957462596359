"""What the tests of the schemes share: groups, credit read turn by turn, and the plain loops of their slow references."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from agentrl import CreditScheme, FinishReason, Trajectory, TrajectoryGroup, assign_credit
from agentrl.learn.signals import signal_classes
from agentrl.testing.groups import make_group

PER_TOKEN = {"behavior_logprobs", *(need.value for need, signal in signal_classes().items() if signal.is_per_token)}
"""What holds one number for each action token."""
Rows = list[list[float]]
"""One list for each trajectory of a group: a number for each of its turns, or of its action tokens."""

F1 = make_group(
    [[0, 1], [0.5, 0, 0], [0, 0], [1]],
    state_keys=[["A", "B"], ["A", "C", "B"], ["A", "C"], ["A"]],
    action_lengths=[[2, 3], [1, 2, 2], [3, 1], [4]],
    group_id="f1",
)


def by_token(scheme: CreditScheme, *groups: TrajectoryGroup) -> list[Rows]:
    """Return the advantage of each action token."""
    return [[credit.advantages_T.tolist() for credit in row] for row in assign_credit(scheme, groups)]


def by_turn(scheme: CreditScheme, *groups: TrajectoryGroup) -> list[Rows]:
    """Return the one advantage of each turn, after checking that all tokens of its action have it."""
    found = []
    for group, rows in zip(groups, by_token(scheme, *groups), strict=True):
        split = [cut(trajectory, tokens) for trajectory, tokens in zip(group.trajectories, rows, strict=True)]
        assert all(len(set(turn)) == 1 for turns in split for turn in turns)
        found.append([[turn[0] for turn in turns] for turns in split])
    return found


def cut(trajectory: Trajectory, tokens: Sequence[float]) -> Rows:
    """Split what belongs to the tokens of a trajectory by turn."""
    ends = itertools.accumulate((len(turn.action_ids) for turn in trajectory.turns), initial=0)
    return [list(tokens[start:end]) for start, end in itertools.pairwise(ends)]


def assert_close(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> None:
    """Compare the rows of a group; advantages are float32."""
    assert [len(row) for row in found] == [len(row) for row in expected]
    np.testing.assert_allclose(list(itertools.chain(*found)), list(itertools.chain(*expected)), rtol=1e-6, atol=1e-6)


def changed(group: TrajectoryGroup, index: int, **fields: Any) -> TrajectoryGroup:
    """Replace fields of one trajectory."""
    trajectories = list(group.trajectories)
    trajectories[index] = replace(trajectories[index], **fields)
    return replace(group, trajectories=tuple(trajectories))


def without(group: TrajectoryGroup, index: int, turn: int, field: str) -> TrajectoryGroup:
    """Set a field of one turn to None, or leave out a signal."""
    turns = list(group.trajectories[index].turns)
    signals = {name: value for name, value in turns[turn].signals.items() if name != field}
    blank: dict[str, Any] = {} if field in turns[turn].signals else {field: None}
    turns[turn] = replace(turns[turn], signals=signals, **blank)
    return changed(group, index, turns=tuple(turns))


# The plain loops.


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def spread(values: Sequence[float], ddof: int) -> float:
    """Return the standard deviation; 0 where there are too few values for one."""
    if len(values) <= ddof:
        return 0.0
    return math.sqrt(math.fsum((x - mean(values)) ** 2 for x in values) / (len(values) - ddof))


def norms(cells: Sequence[Any], values: Sequence[float], fields: Any, *, divide: bool = True) -> list[float]:
    """Compare each value with those of its cell: less the mean, and divided by the standard deviation plus eps.

    Values that differ by rounding alone are equal.
    """
    members: dict[Any, list[float]] = {}
    for cell, value in zip(cells, values, strict=True):
        members.setdefault(cell, []).append(value)
    means, scales = {}, {}
    for cell, among in members.items():
        is_flat = max(among) - min(among) <= 1e-12 * max(abs(x) for x in among)
        means[cell] = math.nan if is_flat else mean(among)
        scales[cell] = spread(among, fields.ddof) + fields.eps if divide else 1.0
    return [
        0.0 if math.isnan(means[cell]) else (value - means[cell]) / scales[cell]
        for cell, value in zip(cells, values, strict=True)
    ]


def to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return G of each turn."""
    return [sum(gamma**n * reward for n, reward in enumerate(rewards[k:])) for k in range(len(rewards))]


def slow_gae(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float, final_value: float
) -> list[float]:
    """Return the discounted sum of temporal differences from each step on."""
    after = [*values[1:], final_value]
    deltas = [reward + gamma * b - a for reward, a, b in zip(rewards, values, after, strict=True)]
    return to_go(deltas, gamma * lam)


def rewards_of(trajectory: Trajectory) -> list[float]:
    return [turn.reward for turn in trajectory.turns]


def unflatten(group: TrajectoryGroup, numbers: Sequence[float]) -> Rows:
    """Cut one number for each turn of the group into one list for each trajectory."""
    ends = itertools.accumulate((len(t.turns) for t in group.trajectories), initial=0)
    return [list(numbers[start:end]) for start, end in itertools.pairwise(ends)]


def scaled_by_batch(found: list[Rows], fields: Any, *, alone: bool = True) -> list[Rows]:
    """Divide by the standard deviation over all groups, or over all that are larger than one trajectory."""
    compared = [a for rows in found if alone or len(rows) > 1 for row in rows for a in row]
    scale = spread(compared, fields.ddof) + fields.eps
    return [[[a / scale for a in row] for row in rows] for rows in found]


# Random groups. All numbers are multiples of 1/8: sums of them are exact, and equal where they are equal.

eighths = st.integers(-16, 16).map(lambda n: n / 8)
logprobs = st.integers(-24, 0).map(lambda n: n / 8)
discounts = st.sampled_from([0.0, 0.5, 1.0])


def tokens(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[float, ...]]:
    """Numbers for the tokens of an action; no action is longer than three tokens."""
    return st.tuples(numbers, numbers, numbers)


@st.composite
def batches(draw: st.DrawFn, /, **columns: st.SearchStrategy[Any]) -> list[TrajectoryGroup]:
    """One or two groups of 1 to 16 trajectories of 1 to 15 turns; `columns` are further fields of each turn."""
    groups = []
    for g in range(draw(st.integers(1, 2))):
        lengths = draw(st.lists(st.integers(1, 15), min_size=1, max_size=16))
        fields = {
            "rewards": eighths,
            "state_keys": st.sampled_from("ABCD"),
            "action_keys": st.sampled_from("xyz"),
            "action_lengths": st.integers(1, 3),
            **columns,
        }
        flat = draw(st.lists(st.tuples(*fields.values()), min_size=sum(lengths), max_size=sum(lengths)))
        ends = itertools.pairwise(itertools.accumulate(lengths, initial=0))
        rows = [flat[start:end] for start, end in ends]
        nested = {name: [[turn[i] for turn in row] for row in rows] for i, name in enumerate(fields)}
        for name in nested.keys() & PER_TOKEN:
            nested[name] = [
                [numbers[:length] for numbers, length in zip(*pair, strict=True)]
                for pair in zip(nested[name], nested["action_lengths"], strict=True)
            ]
        groups.append(make_group(group_id=f"g{g}", **nested))
    return groups


@st.composite
def truncated_batches(draw: st.DrawFn, /, **columns: st.SearchStrategy[Any]) -> list[TrajectoryGroup]:
    """The same, with some trajectories that a limit ended: in a state that others met or not, or within an action."""
    return [
        replace(group, trajectories=tuple(draw(_cut_off(trajectory)) for trajectory in group.trajectories))
        for group in draw(batches(**columns))
    ]


@st.composite
def _cut_off(draw: st.DrawFn, trajectory: Trajectory) -> Trajectory:
    # Where the task ended, neither the value nor the state after the last turn is read.
    last = replace(trajectory.turns[-1], next_state_key=draw(st.sampled_from(["A", "B", "unseen", None])))
    is_unfinished = last.next_state_key is None  # an action that was cut off was never carried out
    if is_unfinished:
        last = replace(last, action_key=None, finish_reason=FinishReason.LENGTH)
    return replace(
        trajectory,
        turns=(*trajectory.turns[:-1], last),
        truncated=is_unfinished or draw(st.booleans()),
        signals={"values": draw(eighths)},
    )


# A stopping problem, small enough to enumerate. At turns 0, 1 and 2 the policy stops with probability sigmoid(logit_k) or
# continues; after turn 2 it is over either way. Four trajectories are possible.
STOP_REWARDS, GO_REWARDS, LOGITS = (1.0, 0.25, 3.0), (-0.5, 0.75, 0.0), (0.4, -0.3, 0.8)


class Path(NamedTuple):
    probability: float
    rewards: list[float]
    scores: list[float]
    """d log pi(a_k) / d logit_k at each turn."""


def stopping_paths(first: int = 0) -> list[Path]:
    """List all ways to continue from a turn."""
    paths: list[Path] = []
    rewards: list[float] = []
    scores: list[float] = []
    alive = 1.0
    for k in range(first, 3):
        stop = 1 / (1 + math.exp(-LOGITS[k]))
        paths.append(Path(alive * stop, [*rewards, STOP_REWARDS[k]], [*scores, 1 - stop]))
        alive *= 1 - stop
        rewards, scores = [*rewards, GO_REWARDS[k]], [*scores, -stop]
    return [*paths, Path(alive, rewards, scores)]


def exact_gradient() -> npt.NDArray[np.float64]:
    """Differentiate sum over paths of p(path) R(path): the gradient of p is p times the sum of the scores."""
    return sum((weighted(path.probability * sum(path.rewards), path.scores) for path in stopping_paths()), np.zeros(3))


def weighted(weight: float, scores: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return a path's scores times a weight, 0 for turns that it does not have."""
    return weight * np.array([*scores, 0.0, 0.0])[:3]
