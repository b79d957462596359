"""Advice on the credit scheme for a run: its rollouts beside tasks on which schemes were compared.

The tasks are those of `benchmarks/credit_tabular.py`, which writes `credit_map.json`. `agentrl credit show` prints the
advantages that a scheme gives recorded rollouts.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import hypot, log2
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter
from rich.console import RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from agentrl.credit import Credit, CreditScheme, assign_credit
from agentrl.data.files import read_json
from agentrl.report.records import TrajectoryRecord, TurnRecord, groups_of
from agentrl.report.terminal import advantage_style
from agentrl.types import TrajectoryGroup, Turn, valid_trajectories


def credits_of(scheme: CreditScheme, groups: Sequence[TrajectoryGroup]) -> dict[tuple[str, str], Credit]:
    """Return what a scheme makes of recorded rollouts, by the ids of group and trajectory.

    Raises:
        CreditError: when they lack what the scheme reads.
    """
    return {
        (trajectory.group_id, trajectory.trajectory_id): credit
        for group, row in zip(groups, assign_credit(scheme, groups), strict=True)
        for trajectory, credit in zip(group.trajectories, row, strict=True)
    }


def explain(
    scheme: CreditScheme, records: Sequence[TrajectoryRecord], *, shown: Sequence[TrajectoryRecord]
) -> Iterator[RenderableType]:
    """Yield a table for each of the `shown` records, credited among all `records`.

    Actions are coloured token by token, from red (the largest |advantage| of what is shown, negative) to green.

    Raises:
        CreditError: when the records lack what the scheme reads.
    """
    credits = credits_of(scheme, groups_of(records))
    chosen = [credits[record.group_id, record.trajectory_id] for record in shown]
    scale = max((float(np.abs(credit.advantages_T).max(initial=0.0)) for credit in chosen), default=0.0)
    for record, credit in zip(shown, chosen, strict=True):
        yield _table(record, credit, scale)


def _table(record: TrajectoryRecord, credit: Credit, scale: float) -> Table:
    title = f"{record.trajectory_id}  return {record.reward:g}  {record.stop_reason}"
    table = Table(title=Text(title), title_justify="left")
    table.add_column("turn", justify="right")
    table.add_column("state", overflow="fold", max_width=24)
    table.add_column("action", overflow="fold")
    table.add_column("reward", justify="right")
    table.add_column("advantage", justify="right")
    table.add_column("in training", justify="right")
    ends = np.cumsum([len(turn.action_ids) for turn in record.turns])
    advantages, keeps = np.split(credit.advantages_T, ends)[:-1], np.split(credit.keep_T, ends)[:-1]
    pieces = zip(advantages, keeps, strict=True)
    for number, (turn, (advantages_T, keep_T)) in enumerate(zip(record.turns, pieces, strict=True), 1):
        table.add_row(
            str(number),
            Text(turn.state_key or "-"),
            _action(turn, advantages_T.tolist(), keep_T.tolist(), scale),
            f"{turn.reward:g}",
            _number(advantages_T.tolist(), keep_T.tolist(), scale),
            _number(turn.advantages, turn.keep, 0.0),
        )
    return table


def _action(turn: TurnRecord, advantages: Sequence[float], keep: Sequence[bool], scale: float) -> Text:
    text = Text()
    for piece, advantage, is_kept in zip(turn.action_pieces, advantages, keep, strict=True):
        text.append(piece, advantage_style(advantage, scale) if is_kept else Style(strike=True, dim=True))
    return text


def _number(advantages: Sequence[float], keep: Sequence[bool], scale: float) -> Text:
    """Return the turn's advantage, with its range where tokens differ."""
    if not any(keep):
        return Text("left out", "dim")
    low = min(advantages)
    high = max(advantages)
    mean = sum(advantages) / len(advantages)
    words = f"{mean:+.3f}" if high - low < 1e-6 else f"{mean:+.3f} ({low:+.3f} .. {high:+.3f})"
    return Text(words, advantage_style(mean, scale))


MAP = Path(__file__).with_name("credit_map.json")
COMPARED: Mapping[str, Mapping[str, Any]] = {
    "uniform": {"scheme": "uniform"},
    "turn_return": {"scheme": "turn_return", "gamma": 1.0},
    "turn_return, by turn": {
        "scheme": "turn_return",
        "baseline": "turn",
        "leave_one_out": False,
        "gamma": 0.8,
        "normalize": "std",
    },
    "gigpo": {"scheme": "gigpo", "gamma": 1.0},
    "group_gae": {"scheme": "group_gae", "gamma": 1.0, "lam": 0.5},
    "action_values": {"scheme": "action_values", "gamma": 1.0, "lam": 0.5},
    "action_values, gamma .8": {"scheme": "action_values", "gamma": 0.8, "lam": 0.5},
}
"""Schemes that were compared, as under `credit:` in a recipe. `turn_return, by turn` is that of the recipes that come along."""
BY_KEYS = ("gigpo", "group_gae", "action_values")
"""Schemes that compare turns with the same state key."""
BY_TURN = ("turn_return",)
"""Schemes for environments that pay within an episode; others may be unable to, and are refused."""
_FAR = 2.0
"""Distance beyond which no task is like another."""
_ALIKE = 0.25
"""Distance within which tasks cannot be told apart by what rollouts show."""
_FEW = 0.1
"""Share of turns below which too few keys repeat for those schemes."""


class RunProfile(BaseModel):
    """Traits of a task that rollouts show."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    turns: float
    """Mean of an episode."""
    group_size: float
    """Mean of usable episodes."""
    repeated: float
    """Share of turns whose state key another episode of the group has too."""
    explained: float
    """Share of the spread of what turns with one state key earn from there on that goes with their action, 0 to 1."""
    by_turn: float
    """Share of episodes that earn something before their last turn."""

    def distance(self, other: "RunProfile") -> float:
        """Return how far two tasks are apart, in steps of the map: twice the turns, twice the group, a fifth of the noise.

        Where no key repeats, nothing is known of the noise, and no scheme that reads keys is asked for.
        """
        of_keys = (self.explained - other.explained) / 0.2, (self.repeated - other.repeated) / 0.3
        return hypot(
            log2(self.turns / other.turns),
            log2(self.group_size / other.group_size),
            (self.by_turn - other.by_turn) / 0.5,
            *(of_keys if self.has_keys else ()),
        )

    @property
    def has_keys(self) -> bool:
        """Whether keys repeat often enough for schemes that compare turns by them."""
        return self.repeated >= _FEW


class Task(BaseModel):
    """A task on which schemes were compared over seeds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    seeds: int
    profile: RunProfile
    gains: Mapping[str, tuple[float, float]]
    """Area under the curve of success, less that of `uniform`: mean and standard error of paired seeds."""


class Advice(NamedTuple):
    """A scheme with its fields, and why."""

    section: Mapping[str, Any]
    """Section `credit` of a recipe."""
    why: str

    @property
    def line(self) -> str:
        """The line of a recipe that asks for the scheme."""
        return in_one_line(self.section)


def show(groups: Sequence[TrajectoryGroup]) -> RunProfile | None:
    """Measure rollouts. None: they hold no usable episode."""
    if not (trajectories := valid_trajectories(groups)):
        return None
    sizes = [len(valid_trajectories([group])) for group in groups]
    num_repeated = within = between = 0.0
    num_keys = num_within = num_between = 0
    for returns in chosen_at_keys(groups):
        num = sum(map(len, returns.values()))
        num_repeated += num
        num_keys += 1
        mean = fmean(value for values in returns.values() for value in values)
        within += sum((value - fmean(values)) ** 2 for values in returns.values() for value in values)
        between += sum(len(values) * (fmean(values) - mean) ** 2 for values in returns.values())
        num_within += num - len(returns)
        num_between += len(returns) - 1
    return RunProfile(
        turns=fmean(len(t.turns) for t in trajectories),
        group_size=fmean(size for size in sizes if size),
        repeated=num_repeated / sum(len(t.turns) for t in trajectories),
        explained=_share_between(within, num_within, between, num_between, num_keys),
        by_turn=fmean(any(turn.reward for turn in t.turns[:-1]) for t in trajectories),
    )


def chosen_at_keys(groups: Sequence[TrajectoryGroup]) -> Iterator[dict[str, list[float]]]:
    """Yield, for each state key that two episodes of a group or more have, what was earned from there on, by action key."""
    for group in groups:
        at: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        owners: dict[str, set[str]] = defaultdict(set)
        for trajectory in valid_trajectories([group]):
            rest = sum(turn.reward for turn in trajectory.turns)
            for turn in trajectory.turns:
                if turn.state_key is not None:
                    at[turn.state_key][_action_of(turn)].append(rest)
                    owners[turn.state_key].add(trajectory.trajectory_id)
                rest -= turn.reward
        yield from (returns for key, returns in at.items() if len(owners[key]) > 1)


def advise(shown: RunProfile, tasks: Sequence[Task], *, shipped: Mapping[str, Any] | None = None) -> Advice:
    """Return the scheme that was best on the tasks that are most alike, on average, of those that can be used.

    Where none was ahead of `uniform`, that of the environment's own recipe.

    Args:
        shown: by a run's rollouts.
        tasks: on which schemes were compared.
        shipped: section `credit` of the recipe that comes along for the run's environment.
    """
    if shown.group_size <= 1:
        return Advice(
            COMPARED["uniform"], "groups have one usable episode, which is compared with nothing: make them larger"
        )
    best = _best(shown, tasks)
    if shipped is None or dict(best.section) == dict(shipped):
        return best
    if best.section["scheme"] == "uniform":
        return Advice(shipped, f"the recipe that comes along for this environment has it; {best.why}")
    return best._replace(why=f"{best.why} The recipe that comes along for this environment has {in_one_line(shipped)}.")


def _best(shown: RunProfile, tasks: Sequence[Task]) -> Advice:
    nearest = min(tasks, key=lambda task: shown.distance(task.profile))
    least = shown.distance(nearest.profile)
    if least > _FAR:
        return Advice(
            COMPARED["uniform"], f"no task on which schemes were compared is like it (the nearest: {nearest.name})"
        )
    alike = [task for task in tasks if shown.distance(task.profile) <= least + _ALIKE]
    where = f"on {'the task' if len(alike) == 1 else 'average over the tasks'} most alike ({', '.join(t.name for t in alike)})"
    schemes = set.intersection(*(set(task.gains) for task in alike))
    lacking = (
        ""
        if shown.has_keys
        else " Schemes that compare turns with the same key are left out: give the environment a state_key() that repeats."
    )
    gains = {
        scheme: (
            fmean(task.gains[scheme][0] for task in alike),
            hypot(*(task.gains[scheme][1] for task in alike)) / len(alike),
        )
        for scheme in sorted(schemes)
        if (shown.has_keys or COMPARED[scheme]["scheme"] not in BY_KEYS)
        and (shown.by_turn > 0 or COMPARED[scheme]["scheme"] not in BY_TURN)
    }
    best = max(gains, key=lambda name: gains[name][0], default=None)
    if best is None or gains[best][0] <= 2 * gains[best][1]:
        return Advice(COMPARED["uniform"], f"{where} no scheme was ahead of uniform.{lacking}")
    mean, error = gains[best]
    return Advice(
        COMPARED[best],
        f"{where} it was ahead of uniform by {mean:.3f} ± {error:.3f} of area under the curve of success, over "
        f"{min(task.seeds for task in alike)} seeds each.{lacking}",
    )


def in_one_line(section: Mapping[str, Any]) -> str:
    """Return the line of a recipe that holds its section `credit`."""
    return f"credit: {yaml.safe_dump(dict(section), default_flow_style=True, sort_keys=False, width=1000).strip()}"


def read_map(path: Path = MAP) -> list[Task]:
    """Return the tasks on which schemes were compared."""
    return read_json(path, TypeAdapter(list[Task]), fix="install agentrl again")


def _share_between(within: float, num_within: int, between: float, num_between: int, num_keys: int) -> float:
    """Return the share of variance between actions, without what chance alone puts there (omega squared, over all keys)."""
    if not num_within or not num_between or within + between == 0:
        return 0.0
    noise = within / num_within
    return max(0.0, (between - num_between * noise) / (between + within + num_keys * noise))


def _action_of(turn: Turn) -> str:
    return turn.action_key if turn.action_key is not None else repr(turn.action_ids)
