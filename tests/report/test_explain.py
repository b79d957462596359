import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from agentrl import Credit, StopReason, TrajectoryGroup, assign_credit, load_credit
from agentrl.credit import installed_credit
from agentrl.errors import CreditError
from agentrl.report.advise import explain
from agentrl.report.folder import RunFolder
from agentrl.report.records import TrajectoryRecord, groups_of, read_records, records
from agentrl.testing.check_credit import LAYOUTS
from tests.support.each import each

GROUPS = [layout.build() for layout in LAYOUTS]


def recorded(groups: list[TrajectoryGroup], folder: Path) -> list[TrajectoryRecord]:
    """Write the groups down and read them back; in training every advantage was .125."""
    credits = [[Credit.uniform(t, 0.125) for t in group.trajectories] for group in groups]
    run = RunFolder.create(folder, {})
    run.add_rollouts(1, records(groups, credits, step=1, piece=lambda token: f"<{token}>"))
    return list(read_records(run.rollouts()[0]))


def printed(
    found: list[TrajectoryRecord], shown: list[TrajectoryRecord], scheme: str, *, colour: bool = False, **fields: float
) -> str:
    console = Console(
        file=io.StringIO(), width=160, force_terminal=colour, color_system="truecolor" if colour else None
    )
    for table in explain(load_credit({"scheme": scheme, **fields}), found, shown=shown):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@each("scheme", [name for name, needs in installed_credit().items() if needs is not None])
def test_recorded_groups_are_credited_as_those_that_were_played(scheme: str, tmp_path: Path) -> None:
    read_back = groups_of(recorded(GROUPS, tmp_path))
    expected, found = (assign_credit(load_credit({"scheme": scheme}), groups) for groups in (GROUPS, read_back))
    for row, other in zip(expected, found, strict=True):
        for a, b in zip(row, other, strict=True):
            assert a.advantages_T.tolist() == b.advantages_T.tolist()


def test_what_comes_back_is_what_was_written(tmp_path: Path) -> None:
    assert groups_of(recorded(GROUPS, tmp_path)) == GROUPS


def test_each_turn_shows_its_state_action_reward_and_both_advantages(tmp_path: Path) -> None:
    found = recorded(GROUPS, tmp_path)
    text = printed(found, found[:1], "gigpo")
    # The first trajectory of fixture F1 under gigpo: .75 and .875.
    rows = [[cell.strip() for cell in line.strip("│\n").split("│")] for line in text.splitlines() if "│" in line]
    assert rows[:2] == [
        ["1", "A", "<32><33>", "0", "+0.750", "+0.125"],
        ["2", "B", "<35><36><37>", "1", "+0.875", "+0.125"],
    ]
    assert "oak/0  return 1  terminated" in text


def test_an_episode_that_failed_before_its_first_turn_is_an_empty_table(tmp_path: Path) -> None:
    first, *others = GROUPS[0].trajectories
    lost = replace(first, trajectory_id="oak/9", turns=(), stop_reason=StopReason.ENV_ERROR, error="no licence")
    found = recorded([replace(GROUPS[0], trajectories=(first, lost, *others))], tmp_path)
    text = printed(found, found[:2], "gigpo")
    assert "oak/9  return 0  env_error" in text
    assert "+0.750" in text


def test_tokens_that_differ_are_shown_with_their_range(tmp_path: Path) -> None:
    found = recorded(GROUPS, tmp_path)
    assert "+0.738 (+0.650 .. +0.825)" not in printed(found, found[:1], "turn_gae")
    assert " .. " in printed(found, found[:1], "distill", discount=0.5)


def test_actions_are_coloured_by_the_scheme_not_by_what_training_used(tmp_path: Path) -> None:
    found = recorded(GROUPS, tmp_path)
    # Uniform gives the first +.78 and the third -1.31; the largest that is shown has the full colour.
    good, bad = (printed(found, [found[i]], "uniform", colour=True) for i in (0, 2))
    assert "48;2;0;190;0" in good
    assert "48;2;190;0;0" not in good
    assert "48;2;190;0;0" in bad


def test_rollouts_that_lack_what_the_scheme_reads_are_refused(tmp_path: Path) -> None:
    [group] = [layout.build() for layout in LAYOUTS[:1]]
    credits = [[Credit.uniform(t, 0.0) for t in group.trajectories]]
    found = [
        record.model_copy(update={"turns": [turn.model_copy(update={"signals": {}}) for turn in record.turns]})
        for record in records([group], credits, step=1, piece=str)
    ]
    with pytest.raises(CreditError, match="trajectory oak/0, turn 0: no values"):
        printed(found, found[:1], "turn_gae")
