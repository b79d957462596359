"""What a credit scheme makes of recorded rollouts: a table for each trajectory, in colour."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from agentrl.credit import Credit, CreditScheme, assign_credit
from agentrl.report.records import TrajectoryRecord, TurnRecord, groups_of
from agentrl.report.show import advantage_style
from agentrl.types import TrajectoryGroup


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
    low, high, mean = min(advantages), max(advantages), sum(advantages) / len(advantages)
    words = f"{mean:+.3f}" if high - low < 1e-6 else f"{mean:+.3f} ({low:+.3f} .. {high:+.3f})"
    return Text(words, advantage_style(mean, scale))
