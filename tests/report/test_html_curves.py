from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.report.html.curves import MAX_POINTS, curves, families, interval
from agentrl.report.html.runs import by_recipe, open_runs
from tests.support.report_runs import make_run


def test_the_interval_of_a_mean_is_students() -> None:
    # Mean 2, standard deviation 1, and t = 4.30265 for 2 degrees of freedom: 2 +- 4.30265 / sqrt(3).
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert interval([5.0]) == (5.0, 5.0)


@pytest.mark.parametrize(("num", "quantile"), [(16, 2.131), (17, 2.120), (31, 2.042), (101, 1.984)])
def test_of_many_values_the_quantile_is_students_too(num: int, quantile: float) -> None:
    values = [0.0, 1.0] * (num // 2) + [0.5] * (num % 2)
    mean = sum(values) / num
    error = (sum((value - mean) ** 2 for value in values) / (num - 1) / num) ** 0.5
    low, high = interval(values)
    assert (high - low) / 2 == pytest.approx(quantile * error, rel=4e-4)  # quantiles to three digits


def test_bands_of_shares_end_where_shares_do(tmp_path: Path) -> None:
    for seed, success in enumerate((1.0, 1.0, 0.6)):
        make_run(tmp_path / f"{seed}", seed=seed).add_metrics({"step": 4.0, "eval/success": success})
    [curve] = curves(by_recipe(open_runs(sorted(tmp_path.iterdir()))))["eval/success"]
    assert curve["high"] == [1.0]
    assert curve["low"][0] < 0.7


def test_seeds_of_a_recipe_become_one_curve_and_other_recipes_others(tmp_path: Path) -> None:
    make_run(tmp_path / "a0", seed=0, rewards=[0.0, 2.0])
    make_run(tmp_path / "a1", seed=1, rewards=[1.0, 2.0, 3.0])
    make_run(tmp_path / "b", seed=0, rewards=[7.0], credit={"scheme": "gigpo"})
    recipes = by_recipe(open_runs([tmp_path / "a0", tmp_path / "a1", tmp_path / "b"]))
    assert [(recipe.name, [run.name for run in recipe.runs]) for recipe in recipes] == [
        ("credit.scheme uniform", ["a0", "a1"]),
        ("credit.scheme gigpo", ["b"]),
    ]
    first, second = curves(recipes)["reward/mean"]
    assert first["steps"] == [1, 2, 3]
    assert first["mean"] == [0.5, 2.0, 3.0]  # of the third step, the one run that has it
    assert [run["values"] for run in first["runs"]] == [[0.0, 2.0, None], [1.0, 2.0, 3.0]]
    assert first["low"][1:] == [2.0, 3.0]
    assert first["low"][0] == pytest.approx(0.5 - 12.7062 * 0.5**0.5 / 2**0.5, rel=1e-5)  # written with six digits
    assert (second["mean"], second["color"], "low" in second) == ([7.0], 1, False)


def test_long_runs_are_averaged_over_neighbouring_steps(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rewards=[])
    lines = "".join(f'{{"step": {step}, "x": {step % 4}}}\n' for step in range(4 * MAX_POINTS))
    (folder.path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    (curve,) = curves(by_recipe(open_runs([folder.path])))["x"]
    assert len(curve["steps"]) == MAX_POINTS
    assert set(curve["mean"]) == {1.5}  # of 0, 1, 2 and 3


def test_every_metric_is_in_one_family() -> None:
    names = ["reward/mean", "reward/answer", "clip/tokens", "loss", "mine", "stop/max_turns", "eval/reward"]
    found = families(names)
    assert sorted(name for family in found for name in family["metrics"]) == sorted(names)
    of = {name: family["name"] for family in found for name in family["metrics"]}
    assert (of["reward/mean"], of["reward/answer"], of["mine"]) == ("Reward", "Components of the reward", "Others")


def test_a_folder_that_is_no_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    make_run(tmp_path / "run")
    for path, words in (("none", "there is none"), ("file", "it is a file"), (".", "it has no config.yaml")):
        with pytest.raises(ConfigError, match=words):
            open_runs([tmp_path / path])
    with pytest.raises(ConfigError, match="named twice"):
        open_runs([tmp_path / "run", tmp_path / "run" / ".." / "run"])
