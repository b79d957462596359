"""Rows are those of real runs, shortened: key_door that learned, and that collapsed at a learning rate of 1e-3."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from agentrl.chat import TurnTokens
from agentrl.learn.health import SIGNS, Row, Sign, collapsed_since, cut_demonstrations, newly_detected, signs
from agentrl.rollout import RolloutConfig
from agentrl.rollout.demonstrations import Demonstration
from tests.support.each import each

LEARNS = [
    0.25,
    0.09,
    0.25,
    0.34,
    0.25,
    0.62,
    0.28,
    0.41,
    0.59,
    0.47,
    0.59,
    0.53,
    0.38,
    0.47,
    0.69,
    0.47,
    0.19,
    0.72,
    0.81,
]
COLLAPSES = [0.25, 0.09, 0.19, 0.31, 0.31, 0.38, 0.25, 0.16, *[0.0] * 12]

# key_door whose turns pay by chance: the policy has lost all success after step 5, and the rewards' spread stays.
NOISY_SUCCESS = [0.19, 0.38, 0.28, 0.28, 0.56, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
NOISY_REWARD = [0.17, 0.28, 0.12, 0.31, 0.59, -0.12, -0.02, 0.05, -0.01, -0.08, -0.12, -0.06, 0.15, 0.16]
NOISY_SPREAD = [0.66, 0.9, 0.84, 1.04, 0.75, 0.77, 0.59, 0.54, 0.65, 0.86, 0.57, 0.7, 0.64, 0.68]


def row(success: float = 0.5, *, entropy: float = 0.15, **changes: float) -> dict[str, float]:
    is_alike = float(success in (0, 1))
    return {
        "reward/mean": success,
        "reward/spread": (success * (1 - success)) ** 0.5,
        "credit/zero_advantage": is_alike,
        "entropy": entropy,
        "stop/terminated": 1.0,
        **{name.replace("__", "/"): value for name, value in changes.items()},
    }


def told(rows: Sequence[dict[str, float]]) -> list[tuple[int, str]]:
    """Return step and sign of what a run tells."""
    seen: list[Row] = []
    found: list[tuple[int, str]] = []
    for step, of_step in enumerate(rows, start=1):
        now = signs([*seen, of_step])
        found += [(step, sign) for sign in newly_detected(now, seen)]
        seen.append(of_step | {f"health/{sign}": float(sign in now) for sign in SIGNS})
    return found


def test_a_run_that_learns_is_left_alone() -> None:
    assert told([row(success) for success in LEARNS]) == []
    solved = [row(success, entropy=entropy) for success, entropy in ((0.3, 0.3), (0.5, 0.2), (0.9, 0.1), (0.97, 0.02))]
    assert told([row for row in solved for _ in range(5)]) == []


@each("offset", [0.0, -10.0, 100.0])
def test_a_reward_that_falls_and_stays_down_is_told_once_and_what_follows_is_not(offset: float) -> None:
    rows = [row(success) for success in COLLAPSES]
    for of_step in rows:
        of_step["reward/mean"] += offset
    ((step, sign),) = told(rows)
    assert sign == "collapse"
    assert step in (11, 12)  # it fell at step 9


def test_updates_that_a_bound_always_shortens_are_told_with_the_rate() -> None:
    rows = [row() | {"shortened_updates": n, "updates": 4.0, "learning_rate": 9e-3} for n in (4, 1, 3, 4, 4, 3)]
    assert told(rows) == [(6, "shortened")]
    assert signs(rows)["shortened"].startswith("train.target_kl shortened 14 of 16 updates in 4 steps")
    assert "now 0.009" in signs(rows)["shortened"]
    assert "shortened" not in signs([of_step | {"staleness/max": 1.0} for of_step in rows])
    assert "shortened" not in signs([row() | {"shortened_updates": 0.0, "updates": 0.0}] * 5)


def test_a_step_that_moves_the_policy_far_is_told_and_what_follows_is_not() -> None:
    still = [row(0.0) for _ in range(12)]
    assert told([row(0.0) | {"kl/step": 0.2}, *still[1:]]) == [(8, "zero_spread")]
    assert told([row(0.0) | {"kl/step": 1.2, "learning_rate": 9e-3}, *still]) == [(1, "moved")]


def test_success_that_was_there_and_is_gone_is_told() -> None:
    few = [row() | {"episode/success": share} for share in (0.04, 0.06)]
    none = [row() | {"episode/success": 0.0} for _ in range(8)]
    assert told([*few, *none]) == [(10, "gone")]
    assert signs([*few, *none])["gone"].startswith("success is gone: 5% of the episodes succeeded before")
    assert told([*few, *none[:7], few[0], *none[:7]]) == []
    assert told([row() | {"episode/success": 0.02}, *none]) == []


def test_what_fell_is_told_by_its_best_four_steps_in_a_row() -> None:
    rows = [row(success) for success in (0.0, 0.8, 0.8, 0.8, 0.0, 0.0, 0.0, 0.0)]
    assert signs(rows)["collapse"] == "the policy has collapsed: its mean reward fell from 0.6 to 0 for 4 steps"


def test_where_a_policy_collapsed_what_follows_is_not_told() -> None:
    follows: dict[Sign, str] = {"zero_spread": "a", "cut_off": "b", "runaway": "c", "gone": "e"}
    assert newly_detected({"collapse": "d", **follows}, [row()]) == {"collapse": "d"}
    assert newly_detected(follows, [row(health__collapse=1.0), row()]) == {}
    assert newly_detected(follows, [row(health__zero_spread=1.0), row()]) == {"runaway": "c", "gone": "e"}
    assert newly_detected({"zero_spread": "a", "cut_off": "b"}, [row(health__zero_spread=1.0)]) == {"cut_off": "b"}


def noisy(success: Sequence[float]) -> list[dict[str, float]]:
    """Rows of a run whose rewards are noisy; where no episode came to its end, success is not told."""
    shown = zip(success, NOISY_REWARD, NOISY_SPREAD, strict=True)
    return [
        row(reward__mean=reward, reward__spread=spread, credit__zero_advantage=0.1)
        | ({"episode/success": share} if share else {})
        for share, reward, spread in shown
    ]


def test_success_that_is_gone_under_noisy_rewards_is_a_collapse() -> None:
    rows = noisy(NOISY_SUCCESS)
    assert told(rows) == [(8, "collapse")]
    assert signs(rows[:9])["collapse"].endswith("its mean success fell from 0.375 to 0 for 4 steps")
    assert told([{"episode/success": 0.0} | of_step for of_step in rows]) == [(8, "collapse")]


def test_noisy_rewards_alone_are_none_while_success_stays() -> None:
    assert told(noisy([0.2, 0.1, 0.25, 0.1, 0.15, 0.05, 0.1, 0.2, 0.05, 0.15, 0.1, 0.05, 0.1, 0.2])) == []


def test_rewards_may_fall_where_no_episode_ever_succeeds() -> None:
    rows = [row(success) | {"episode/success": 0.0} for success in COLLAPSES]
    assert [sign for _, sign in told(rows)] == ["collapse"]


def test_a_collapse_at_the_first_update_is_told() -> None:
    assert told([row(0.25), *[row(0.0)] * 12]) == [(5, "collapse")]


def test_a_harder_stage_is_no_collapse_and_a_collapse_within_it_is() -> None:
    def played(success: Sequence[float], **stage: float) -> list[dict[str, float]]:
        return [row(share, **stage) | {"episode/success": share} for share in success]

    easy = played([0.5 + 0.04 * step for step in range(12)])
    mixed = played([0.5], episode__stage=0.6)  # `mode: async`: groups of both stages
    hard = played([0.02, 0.02, 0.02, 0.02, 0.04, 0.3, 0.5, 0.4, 0.6, 0.5], episode__stage=1.0)
    assert told(easy + mixed + hard) == []
    assert told(easy + mixed + hard + played([0.0] * 4, episode__stage=1.0)) == [(26, "collapse")]
    assert told(easy + played([0.02] * 4)) == [(15, "collapse")]


def test_what_is_too_old_to_be_trained_on_is_told_as_that() -> None:
    rows = [row(0.5, credit__zero_advantage=1.0, groups__zero_spread=0.2)] * 9
    assert "groups earned differently, but no token that is trained on has an advantage" in signs(rows)["zero_spread"]


def test_another_recipe_is_no_collapse() -> None:
    before = [row(0.6)] * 9
    assert told([*before, *[row(0.02)] * 9]) == [(13, "collapse")]
    assert told([*before, *[row(0.02, recipe_changes=1.0)] * 9]) == []
    assert told([*before, *[row(0.6, recipe_changes=1.0)] * 9, *[row(0.02, recipe_changes=1.0)] * 9]) == [
        (22, "collapse")
    ]


def test_entropy_that_vanishes_without_a_gain_is_a_collapse() -> None:
    falling = [row(0.2, entropy=0.2)] * 4 + [row(0.2, entropy=0.01)] * 4
    assert told(falling) == [(8, "collapse")]
    assert signs(falling)["collapse"].endswith("fell from 0.2 to 0.01 nats a token, and its reward did not rise")
    gained = [row(0.2, entropy=0.2)] * 4 + [row(0.6, entropy=0.01)] * 4
    assert told(gained) == []


@pytest.mark.parametrize(("first", "between", "last"), [(0.2, 0.8, 0.2), (0.02, 0.5, 0.1)])
def test_a_gain_is_that_of_the_last_steps_beside_the_largest_spread_before_them(
    first: float, between: float, last: float
) -> None:
    rows = [row(first, entropy=0.2)] * 4 + [row(between, entropy=0.2)] * 4 + [row(last, entropy=0.01)] * 4
    assert told(rows) == [(12, "collapse")]


def test_entropy_of_steps_in_which_nothing_was_computed_is_not_known() -> None:
    assert told([row(0.2, entropy=0.2)] * 4 + [row(1.0, entropy=0.0)] * 6) == []
    assert told([row(0.2, entropy=0.2)] * 4 + [row(0.2, entropy=0.0, credit__zero_advantage=1.0)] * 6) == []


@each("name", row())
def test_steps_of_which_a_file_has_lost_a_metric_end_no_run(name: str) -> None:
    damaged = [{key: value for key, value in row(1 - n / 10).items() if key != name} for n in range(5)]
    told([*damaged, *(row(0.5, entropy=0.001) for _ in range(9))])
    one = {key: value for key, value in row(COLLAPSES[0]).items() if key != name}
    assert [sign for _, sign in told([one, *map(row, COLLAPSES[1:])])] == ["collapse"]


def test_groups_that_earn_alike_for_long_are_told_with_the_field() -> None:
    never = [row(0.0)] * 8
    assert told(never) == [(8, "zero_spread")]
    assert told([*never[:7], row(0.1), *never[:7]]) == []
    lost = {name: value for name, value in never[3].items() if name != "credit/zero_advantage"}
    assert told([*never[:3], lost, *never[4:]]) == []
    words = signs([row(reward__mean=step, credit__zero_advantage=1.0) for step in range(8)])["zero_spread"]
    assert "mean reward 7)" in words
    assert "env.options" in words


@each(
    ("reason", "field"),
    [
        ("max_turns", "rollout.max_turns"),
        ("max_tokens", "rollout.max_turn_tokens"),
        ("context_overflow", "rollout.max_context_tokens"),
    ],
)
def test_limits_that_cut_every_episode_off_are_named(reason: str, field: str) -> None:
    changes = {"stop/terminated": 0.0, f"stop/{reason}": 0.75, "stop/env_error": 0.25}
    rows = [row() | changes] * 4
    assert told(rows) == [(4, "cut_off")]
    assert field in signs(rows)["cut_off"]
    assert told([*rows[:3], row(), *rows[:3]]) == []


def test_steps_in_which_every_episode_failed_tell_of_no_limit() -> None:
    assert told([row(stop__terminated=0.0, stop__env_error=0.75, stop__engine_error=0.25)] * 4) == []


def test_a_sign_is_told_once_in_a_run_also_when_it_comes_back() -> None:
    never = [row(0.0)] * 8
    assert told([*never, row(0.5), *never]) == [(8, "zero_spread"), (13, "collapse")]


def test_demonstrations_that_no_policy_could_play_are_told_with_the_limit() -> None:
    turn = TurnTokens(observation_ids=(1,) * 8, extends=True, action_ids=(2,) * 4)
    played = [Demonstration(turns=(turn, turn), is_over=True)] * 4
    wide = RolloutConfig(max_turn_tokens=4, max_episode_tokens=8, max_context_tokens=24)
    assert cut_demonstrations(played, wide) == (0.0, None)
    for field, limit in (("max_turn_tokens", 3), ("max_episode_tokens", 7), ("max_context_tokens", 23)):
        share, words = cut_demonstrations(played, wide.model_copy(update={field: limit}))
        assert share == 1.0
        assert words is not None
        assert f"100% by rollout.{field}" in words
    longer = replace(played[0], turns=(replace(turn, action_ids=(2,) * 5), turn))
    assert cut_demonstrations([longer, *played[:3]], wide) == (
        0.25,
        "demonstrations are cut off, 25% by rollout.max_turn_tokens, 25% by rollout.max_episode_tokens, "
        "25% by rollout.max_context_tokens: the policy is shown what it cannot play; raise it",
    )
    cut = [replace(demonstration, is_over=False) for demonstration in played]
    share, words = cut_demonstrations(cut, wide)
    assert share == 1.0
    assert words is not None
    assert "100% by rollout.max_turns" in words
    assert cut_demonstrations([*cut[:2], *played[:2]], wide) == (0.5, None)  # a poor oracle


@each(
    ("samples", "far", "staleness", "is_told"),
    [(0.38, 0.6, 0, True), (0.8, 0.6, 0, False), (0.38, 0.01, 0, False), (0.38, 0.6, 1, False)],
)
def test_a_step_that_moves_the_policy_very_far_is_told(
    samples: float, far: float, staleness: float, is_told: bool
) -> None:
    shown = {"ratio/effective_samples": samples, "kl/behavior": far, "staleness/max": staleness}
    rows = [row(0.5) for _ in range(3)] + [row(0.5) | shown]
    assert told(rows) == ([(4, "runaway")] if is_told else [])
    without = {name: value for name, value in rows[-1].items() if name != "staleness/max"}  # a file may have lost it
    assert told([*rows[:3], without]) == ([(4, "runaway")] if is_told or staleness else [])
    fallen = [*rows, *[row(0.0)] * 12]
    assert [sign for _, sign in told(fallen)] == (["runaway"] if is_told else []) + ["collapse"]


def test_the_first_step_of_a_collapse_is_that_of_the_first_that_shows_it() -> None:
    rows = [{"step": step, **row(success)} for step, success in enumerate(COLLAPSES, start=1)]
    end = next(end for end in range(1, len(rows)) if "collapse" in signs(rows[:end]))
    assert collapsed_since(rows[:end]) == end - 3
    # Of a policy that is sure of itself, most steps tell nothing of its entropy.
    sure = [row(entropy=0.01, credit__zero_advantage=float(k % 4 > 0)) for k in range(13)]
    steps = [{"step": step, **of_step} for step, of_step in enumerate([row(entropy=0.2)] * 8 + sure, start=1)]
    assert "entropy" in signs(steps)["collapse"]
    assert collapsed_since(steps) == 9
