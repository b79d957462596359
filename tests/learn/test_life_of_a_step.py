"""The worked trajectory of docs/life-of-a-step.md, through the functions that a step calls."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from agentrl import Trajectory, TrajectoryGroup, Turn, assign_credit, load_credit
from agentrl.learn.batch import Batch, make_batch
from agentrl.learn.config import LossConfig
from agentrl.learn.loss import PolicyLoss, policy_loss
from agentrl.learn.trust import fixed
from agentrl.types import StopReason
from tests.support.packages import PACKAGES

PAGE = Path(__file__).parents[2] / "docs" / "life-of-a-step.md"
POLICY_LOGPROBS = (-0.997, -0.501, -1.999, -0.688, -0.4)
CONFIG = LossConfig(unit="version", trust="fixed")


def trajectory(number: int, *turns: Turn) -> Trajectory:
    return Trajectory(
        group_id="g",
        trajectory_id=f"g/{number}",
        env_id="Example",
        seed=0,
        turns=turns,
        stop_reason=StopReason.TERMINATED,
    )


FIRST = Turn(
    observation_ids=(1, 2, 3, 4),
    action_ids=(50, 51, 9),
    behavior_logprobs=(-1.0, -0.5, -2.0),
    versions=(7, 7, 7),
    reward=0.25,
)
SECOND = Turn(
    observation_ids=(5, 6, 7),
    action_ids=(52, 9),
    behavior_logprobs=(-0.7, -0.4),
    versions=(7, 8),
    reward=1.0,
)
SIBLING = Turn(
    observation_ids=(1, 2, 3, 4), action_ids=(53, 9), behavior_logprobs=(-1.5, -0.3), versions=(7, 7), reward=0.5
)
GROUP = TrajectoryGroup(group_id="g", trajectories=(trajectory(0, FIRST, SECOND), trajectory(1, SIBLING)))


def batch() -> Batch:
    [credits] = assign_credit(load_credit({"scheme": "turn_return"}), [GROUP])
    return make_batch(GROUP.trajectories, credits, unit=CONFIG.unit, aggregation=CONFIG.aggregation)


def loss(found: Batch) -> PolicyLoss:
    low, high = CONFIG.clip_range()
    columns = found.columns
    sibling = columns.behavior_T[len(POLICY_LOGPROBS) :]  # unchanged
    return policy_loss(
        torch.cat([torch.tensor(POLICY_LOGPROBS, dtype=torch.float64), sibling]),
        anchor_logprobs_T=columns.behavior_T,
        advantages_T=columns.advantage_T.double(),
        unit_T=columns.unit_T,
        weight_T=columns.weight_T,
        trust=partial(fixed, low=low, high=high),
    )


def expected() -> dict[str, list[float]]:
    """Return every row of the page's table; NaN stands where a token is not trained."""
    found = batch()
    result = loss(found)
    trained = found.tokens.trajectory_T == 0
    slots = (found.tokens.position_T[trained] + 1).tolist()
    ids = found.tokens.rows[0].tolist()
    columns = {
        "version": found.columns.version_T,
        "behavior log-probability": found.columns.behavior_T,
        "policy log-probability": torch.tensor(POLICY_LOGPROBS, dtype=torch.float64),
        "advantage": found.columns.advantage_T,
        "unit": found.columns.unit_T,
        "ratio": result.ratio_U[found.columns.unit_T],
        "clipped": result.clipped_T,
        "weight": found.columns.weight_T,
    }
    table: dict[str, list[float]] = {"id": ids}
    for name, column_T in columns.items():
        row = [float("nan")] * len(ids)
        for slot, value in zip(slots, column_T.tolist(), strict=False):
            row[slot] = float(value)
        table[name] = row
    return table


def test_the_page_shows_these_numbers() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w -]+?) +\|((?:[^|\n]*\|){12})$", text, re.MULTILINE))
    shown = {
        name: [float(cell or "nan") for cell in map(str.strip, row.rstrip("|").split("|"))]
        for name, row in rows.items()
        if name not in ("slot", "part")
    }
    assert shown.keys() == expected().keys()
    for name, row in expected().items():
        assert shown[name] == pytest.approx(row, abs=5e-5, nan_ok=True), name


def test_the_page_shows_the_loss() -> None:
    [shown] = re.findall(r"loss = (-?\d+\.\d+)", PAGE.read_text(encoding="utf-8"))
    assert float(shown) == pytest.approx(float(loss(batch()).loss), abs=5e-5)


def test_a_slot_is_named_after_the_part_that_it_stands_in() -> None:
    [line] = re.findall(r"^\| part \| (P0 .*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    turns = (
        ("P0", FIRST.observation_ids),
        ("A0", FIRST.action_ids),
        ("E0", SECOND.observation_ids),
        ("A1", SECOND.action_ids),
    )
    assert line.split(" | ") == [name for name, ids in turns for _ in ids]


def test_every_file_that_the_page_names_is_there() -> None:
    pattern = r"`(?:credit/|envs/)?((agentrl\w*)/[\w/]*(?:\.py)?)`"
    named = re.findall(pattern, PAGE.read_text(encoding="utf-8"))
    assert len(named) > 15
    assert [name for name, package in named if not (PACKAGES[package].parent / name).exists()] == []
