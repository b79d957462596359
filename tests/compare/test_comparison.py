from pathlib import Path
from typing import Any

import pytest

from agentrl.compare.comparison import Comparison, compare
from agentrl.compare.curves import Curve
from agentrl.compare.page import levels_rows, verdict
from agentrl.errors import ConfigError
from agentrl.report.terminal import Panel
from tests.support.each import each

PANEL = Panel(tasks=("a", "b"), temperature=1.0, samples=1)


def curve(recipe: str, seed: int, values: list[float], **fields: Any) -> Curve:
    """A run that was evaluated every ten steps."""
    given: dict[str, Any] = {"panel": PANEL, "episodes": 8, "path": Path(f"{recipe}-{seed}")}
    steps = {10 * place: value for place, value in enumerate(values)}
    return Curve(recipe=recipe, seed=seed, values=steps, **{**given, **fields})


def compared(*curves: Curve, **options: Any) -> Comparison:
    return compare(curves, metric="eval/success", **options)


BASE = [curve("base", seed, [0.0, 0.2, 0.4 + 0.1 * seed]) for seed in range(4)]
BETTER = [curve("better", seed, [0.0, 0.4, 0.7 + 0.1 * seed + (0.02 if seed % 2 else 0.0)]) for seed in range(4)]


def test_differences_are_those_of_pairs() -> None:
    [difference] = compared(*BASE, *BETTER[::-1]).differences
    # 0.30 0.32 0.30 0.32: mean 0.31, sd 0.011547, error 0.0057735; t_{.975, 3} = 3.182446
    assert difference.final.mean == pytest.approx(0.31)
    assert difference.final.low == pytest.approx(0.31 - 3.182446 * 0.0057735, abs=1e-6)
    assert difference.differs
    assert difference.sd == pytest.approx(0.0115470, abs=1e-6)
    assert (difference.name, difference.against) == ("better", "base")


def test_intervals_of_shares_end_where_shares_do() -> None:
    high = [curve("high", seed, [0.0, 0.9, 1.0 if seed else 0.7]) for seed in range(3)]
    low = [curve("low", seed, [0.0, 0.0, 0.0 if seed else 0.3]) for seed in range(3)]
    comparison = compared(*high, *low)
    assert comparison.arms[0].final.high == 1
    assert comparison.arms[1].final.low == 0
    assert comparison.arms[1].mean[-1].low == 0
    rewards = compare([*high, *low], metric="eval/reward")
    assert rewards.arms[0].final.high is not None
    assert rewards.arms[0].final.high > 1
    difference = comparison.differences[0].final.low
    assert difference is not None
    assert difference < -1  # may well be below 0, and where seeds say little below -1


def test_areas_are_mean_heights() -> None:
    comparison = compared(*BASE, *BETTER)
    # base: (0 + .2) / 2 and (.2 + .4 + .1 s) / 2, over two equal widths: .2 + .025 s, mean .2375
    assert comparison.arms[0].area is not None
    assert comparison.arms[0].area.mean == pytest.approx(0.2375)
    # the step between is .2 higher and weighs a half, the last one .31 and a quarter
    assert comparison.differences[0].area is not None
    assert comparison.differences[0].area.mean == pytest.approx(0.2 / 2 + 0.31 / 4)


def test_a_run_that_never_reached_the_threshold_counts_with_the_last_step_and_is_counted() -> None:
    slow = [curve("slow", 0, [0.0, 0.1, 0.2]), curve("slow", 1, [0.0, 0.1, 0.6])]
    quick = [curve("quick", 0, [0.0, 0.5, 0.2]), curve("quick", 1, [0.0, 0.9, 0.9])]
    comparison = compared(*slow, *quick, threshold=0.5)
    assert [arm.reached for arm in comparison.arms] == [1, 2]
    assert [arm.steps and arm.steps.mean for arm in comparison.arms] == [20, 10]
    [difference] = comparison.differences
    assert difference.steps is not None
    assert difference.steps.mean == -10
    assert levels_rows(comparison)[1][0][-1] == "over 20; 1 of 2 never"
    nobody = compared(*slow, *quick, threshold=0.95)
    assert [arm.steps for arm in nobody.arms] == [None, None]
    assert nobody.differences[0].steps is None


def test_the_threshold_lies_halfway_for_all_alike() -> None:
    assert compared(*BASE, *BETTER).threshold == pytest.approx((0.0 + (0.55 + 0.86) / 2) / 2)


def test_other_tasks_in_a_pair_are_refused_and_across_seeds_are_told() -> None:
    other = PANEL.model_copy(update={"tasks": ("a", "x")})
    with pytest.raises(ConfigError, match=r"base-0 and better-0 were not evaluated alike \(2 tasks"):
        compared(*BASE, curve("better", 0, [0.0, 0.4, 0.7], panel=other), *BETTER[1:])
    pair = [curve(recipe, 9, [0.0, 0.4, 0.7], panel=other) for recipe in ("base", "better")]
    comparison = compared(*BASE, *BETTER, *pair)
    assert comparison.panel is None
    assert any("tasks of its own" in note for note in comparison.notes)
    assert compared(*BASE, *BETTER).panel == PANEL.name
    old = [curve("base", 9, [0.0, 0.4, 0.7], panel=None), curve("better", 9, [0.0, 0.4, 0.7])]
    assert any("not known" in note for note in compared(*BASE, *BETTER, *old).notes)


@each("other", [{"temperature": 0.0}, {"samples": 4}])
def test_another_way_to_evaluate_in_a_pair_is_refused_and_across_seeds_is_told(other: dict[str, float]) -> None:
    greedy = PANEL.model_copy(update=other)
    base, better = ([curve(name, seed, [0.0, 0.4], panel=PANEL) for seed in (0, 1)] for name in ("base", "better"))
    assert not any("mixes" in note for note in compared(*base, *better).notes)
    with pytest.raises(
        ConfigError, match=r"base-1 and better-1 were not evaluated alike .*\(seed.*temperature, samples\)"
    ):
        compared(*base, better[0], curve("better", 1, [0.0, 0.4], panel=greedy))
    pair = [curve(recipe, 9, [0.0, 0.4], panel=greedy) for recipe in ("base", "better")]
    comparison = compared(*base, *better, *pair)
    assert comparison.panel is None
    assert any("a mean over seeds mixes them" in note for note in comparison.notes)


def test_unequal_steps_are_compared_at_the_last_that_all_have() -> None:
    longer = [curve("longer", seed, [0.0, 0.3, 0.5 + 0.01 * seed, 0.9]) for seed in range(4)]
    comparison = compared(*BASE, *longer)
    assert comparison.steps == [0, 10, 20]
    assert comparison.arms[1].final.mean == pytest.approx(0.515)
    assert any("all are compared at 20" in note for note in comparison.notes)
    with pytest.raises(ConfigError, match="no evaluated step in common"):
        compared(*BASE, Curve(recipe="x", seed=0, path=Path("x"), values={0: 0.1, 7: 0.2}, panel=PANEL, episodes=8))


def test_one_seed_is_said_to_say_nothing() -> None:
    comparison = compared(BASE[0], BETTER[0])
    [difference] = comparison.differences
    assert (difference.final.low, difference.p_holm, difference.differs) == (None, None, False)
    assert any("one seed" in note for note in comparison.notes)
    assert "nothing is shown" in verdict(difference, comparison)


@each(
    ("curves", "words"),
    [
        (BASE, "all runs are of one recipe"),
        ([*BASE, *BETTER, curve("base", 1, [0.0, 0.1, 0.2])], "same recipe and the same seed 1"),
        ([*BASE[:2], *BETTER[2:]], "no seed in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(curves: list[Curve], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compared(*curves)


def test_several_differences_are_adjusted_together_and_controls_stand_against_their_own() -> None:
    third = [curve("third", seed, [0.0, 0.2, 0.5 + 0.13 * seed]) for seed in range(4)]
    control = [curve("control", seed, [0.0, 0.1, 0.3 + 0.02 * seed]) for seed in range(4)]
    comparison = compared(*BASE, *BETTER, *third, *control, controls={"better": "control"})
    pairs = [(d.name, d.against) for d in comparison.differences]
    assert pairs == [("better", "base"), ("third", "base"), ("better", "control")]
    adjusted = [difference.p_holm for difference in comparison.differences]
    raw = [difference.final.p for difference in comparison.differences]
    assert all(a is not None and p is not None and a >= p for a, p in zip(adjusted, raw, strict=True))
    assert adjusted[0] == pytest.approx(3 * (raw[0] or 0.0)), "the smallest of three"
    assert any("Holm" in note for note in comparison.notes)


def test_a_pair_of_which_nothing_is_there_leaves_the_others() -> None:
    control = [curve("control", seed, [0.0, 0.1, 0.3 + 0.02 * seed]) for seed in range(4)]
    late = [curve("late", seed, [0.0, 0.1, 0.3 + 0.02 * seed]) for seed in (8, 9)]
    comparison = compared(*BASE, *late, *BETTER, *control, controls={"failed": "control", "late": "control"})
    assert [(d.name, d.against) for d in comparison.differences] == [("better", "base")]
    assert [note for note in comparison.notes if "no seed in common" in note] == [
        f"late and {other} have no seed in common ([8, 9]; [0, 1, 2, 3]): runs are compared seed by seed, because those of "
        "one seed begin alike"
        for other in ("base", "control")
    ]
    with pytest.raises(ConfigError, match="nothing to compare: base, control"):
        compared(*BASE, *control, controls={"failed": "control"})


def test_missing_seeds_and_other_budgets_are_told() -> None:
    notes = compared(*BASE, *BETTER[:3]).notes
    assert any("better: 3" in note for note in notes)
    dearer = [curve("better", seed, [0.0, 0.2, 0.6 + 0.1 * seed**2], episodes=16) for seed in range(4)]
    assert any("8 or 16 episodes" in note for note in compared(*BASE, *dearer).notes)


def test_differences_that_trail_off_are_doubted() -> None:
    base = [curve("base", seed, [0.0, 0.5]) for seed in range(8)]
    lucky = [curve("lucky", seed, [0.0, 0.9 if seed == 3 else 0.5 + 0.001 * seed]) for seed in range(8)]
    assert any("trail off" in note for note in compared(*base, *lucky).notes)
    even = [curve("even", seed, [0.0, 0.5 + 0.01 * seed]) for seed in range(8)]
    assert not any("trail off" in note for note in compared(*base, *even).notes)


@each(("metric", "side"), [("eval/pass@2", "better"), ("eval/reward/exact", "better"), ("eval/failed", "higher")])
def test_more_is_called_better_of_what_is_a_gain(metric: str, side: str) -> None:
    comparison = compare([*BASE, *BETTER], metric=metric)
    assert f": {side} by" in verdict(comparison.differences[0], comparison)


def test_intervals_of_counts_are_no_shares() -> None:
    counts = [
        curve(name, seed, [0.0, level + seed]) for name, level in (("base", 3), ("more", 30)) for seed in range(4)
    ]
    final = compare(counts, metric="eval/failed").arms[0].final
    assert final.low is not None
    assert final.high is not None
    assert final.low < final.mean < final.high


def test_the_verdict_tells_what_the_seeds_could_have_shown() -> None:
    third = [curve("third", seed, [0.0, 0.2, 0.45 + 0.1 * seed + 0.05 * (-1) ** seed]) for seed in range(4)]
    comparison = compared(*BASE, *third)
    [difference] = comparison.differences
    # differences .10 .00 .10 .00: sd .057735; by scipy's nct, 4 pairs see 2.12795 sd, and 13 see .05 at power .8
    assert difference.seen == pytest.approx(2.12795 * 0.057735, rel=1e-3)
    assert verdict(difference, comparison).startswith("third against base: not told apart. 4 seeds see")
    assert "13 seeds to see 0.05" in verdict(difference, comparison)
