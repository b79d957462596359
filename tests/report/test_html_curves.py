import json
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.report.html.report import MAX_POINTS, constants, curves, families, interval
from agentrl.report.html.runs import by_recipe, changed, open_runs
from tests.support.each import each
from tests.support.report_runs import make_run


def test_the_interval_of_a_mean_is_students() -> None:
    # Mean 2, standard deviation 1, and t = 4.30265 for 2 degrees of freedom: 2 +- 4.30265 / sqrt(3).
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert interval([5.0]) == (None, None)


@each(("num", "quantile"), [(16, 2.131), (17, 2.120), (31, 2.042), (101, 1.984)])
def test_of_many_values_the_quantile_is_students_too(num: int, quantile: float) -> None:
    values = [0.0, 1.0] * (num // 2) + [0.5] * (num % 2)
    mean = sum(values) / num
    error = (sum((value - mean) ** 2 for value in values) / (num - 1) / num) ** 0.5
    low, high = interval(values)
    assert low is not None
    assert high is not None
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
    assert first["low"][1:] == [2.0, None]
    assert first["low"][0] == pytest.approx(0.5 - 12.7062 * 0.5**0.5 / 2**0.5, rel=1e-5)  # written with six digits
    assert (second["mean"], second["color"], "low" in second) == ([7.0], 1, False)


def test_long_runs_are_averaged_over_neighbouring_steps(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rewards=[])
    lines = "".join(f'{{"step": {step}, "x": {step % 4}}}\n' for step in range(4 * MAX_POINTS))
    (folder.path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    (curve,) = curves(by_recipe(open_runs([folder.path])))["x"]
    assert len(curve["steps"]) == MAX_POINTS
    assert set(curve["mean"]) == {1.5}  # of 0, 1, 2 and 3


def test_of_what_is_measured_now_and_then_the_steps_are_those_of_long_runs_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rewards=[])
    rows = (
        {"step": step, "x": 0.0} | ({} if step % 100 else {"eval/reward": step}) for step in range(2 * MAX_POINTS + 1)
    )
    (folder.path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (curve,) = curves(by_recipe(open_runs([folder.path])))["eval/reward"]
    assert curve["steps"] == curve["mean"] == list(range(0, 2 * MAX_POINTS + 1, 100))


def test_a_seed_that_was_cut_off_everywhere_counts_as_one_without_success(tmp_path: Path) -> None:
    for seed, success in enumerate((0.9, 0.3, None)):
        folder = make_run(tmp_path / f"{seed}", seed=seed, rewards=[])
        told = {} if success is None else {"eval/success": success, "episode/score": success}
        folder.add_metrics({"step": 1.0, "reward/mean": 0.0, "eval/episodes": 4.0, "eval/pass@4": 0.5, **told})
        folder.add_metrics({"step": 2.0, "reward/mean": 0.0})  # was not evaluated
        folder.add_metrics({"step": 3.0, "eval/episodes": 0.0})  # every episode failed
    found = curves(by_recipe(open_runs(sorted(tmp_path.iterdir()))))
    [evaluated], [trained] = found["eval/success"], found["episode/score"]
    assert (evaluated["steps"], evaluated["mean"]) == ([1], [0.4])
    assert (trained["steps"], trained["mean"]) == ([1, 2], [0.4, 0.0])


def test_recipes_and_runs_have_names_that_tell_them_apart(tmp_path: Path) -> None:
    scheme = {"scheme": "gigpo", "gamma": 0.9, "omega": 0.5}
    for rate, credit in ((1, {"scheme": "uniform"}), (1, scheme), (3, scheme)):
        for seed in (0, 1):
            path = tmp_path / f"{credit['scheme']}-{rate}" / f"seed-{seed}"
            make_run(path, seed=seed, credit=credit, train={"learning_rate": rate})
    recipes = by_recipe(open_runs(sorted(tmp_path.glob("*/*"))))
    assert [recipe.name for recipe in recipes] == [
        "credit.scheme gigpo, credit.gamma 0.9, credit.omega 0.5, train.learning_rate 1",
        "credit.scheme gigpo, credit.gamma 0.9, credit.omega 0.5, train.learning_rate 3",
        "credit.scheme uniform, train.learning_rate 1",
    ]
    assert [run.name for run in recipes[0].runs] == ["gigpo-1/seed-0", "gigpo-1/seed-1"]
    for other in ("a", "b"):
        make_run(tmp_path / other / "gigpo-1" / "seed-0")
    found = open_runs([tmp_path / other / "gigpo-1" / "seed-0" for other in ("a", "b")])
    assert [run.name for run in found] == ["a/gigpo-1/seed-0", "b/gigpo-1/seed-0"]


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


def test_a_metric_of_one_value_is_a_constant(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    assert folder.last_written() is not None
    for step, value in enumerate((0.5, 0.5, 0.5), 4):
        folder.add_metrics({"step": float(step), "mine": value, "other": float(step)})
    folder.add_metrics({"step": 7.0, "once": 2.0})
    make_run(tmp_path / "b", seed=1, rewards=[0.0]).add_metrics({"step": 2.0, "mine": 0.5})
    found = curves(by_recipe(open_runs([tmp_path / "a", tmp_path / "b"])))
    assert constants(found) == {"mine": 0.5, "once": 2.0}
    short = curves(by_recipe(open_runs([make_run(tmp_path / "c", rewards=[0.0]).path])))
    assert constants(short) == {}  # of one step nothing is known


def test_a_recipe_is_its_difference_from_the_defaults() -> None:
    defaults = {"seed": 0, "run_dir": None, "env": {"id": "a", "options": {}}, "credit": {"scheme": "uniform"}}
    config = {"seed": 0, "run_dir": "runs/a", "env": {"id": "b", "options": {}}, "credit": {"scheme": "uniform"}}
    assert changed(config, defaults) == {"env": {"id": "b"}}
    assert changed({**config, "mine": {}}, {**defaults, "env": {}}) == {"env": {"id": "b", "options": {}}, "mine": {}}


def test_a_run_is_finished_once_it_has_taken_its_steps(tmp_path: Path) -> None:
    make_run(tmp_path / "whole", train={"steps": 3})
    make_run(tmp_path / "begun", train={"steps": 4})
    make_run(tmp_path / "empty", rewards=[], train={"steps": 0})
    found = open_runs([tmp_path / name for name in ("whole", "begun", "empty")])
    assert [run.is_finished for run in found] == [True, False, False]
