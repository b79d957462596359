from pathlib import Path

import pytest
import yaml

from agentrl.compare.curves import identity
from agentrl.compare.runner import Arm, make_arms, parse_varied, write_recipe
from agentrl.errors import ConfigError
from agentrl.recipe.config import load_recipe
from tests.support.each import each


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "doors.yaml"
    path.write_text(
        yaml.safe_dump(
            {"env": {"id": "key_door"}, "train": {"steps": 40}, "credit": {"scheme": "gigpo", "step_weight": 2.0}}
        )
    )
    return path


def arms(
    tmp_path: Path, *paths: Path, vary: list[str] | None = None, overrides: tuple[str, ...] = (), control: bool = False
) -> list[Arm]:
    varied = parse_varied(vary or [], option="--vary")
    return make_arms(paths, varied=varied, overrides=overrides, folder=tmp_path / "runs", control=control)[0]


def test_all_recipes_and_seeds_share_their_evaluation_tasks_and_are_evaluated_on_the_way(
    tmp_path: Path, recipe: Path
) -> None:
    one, other = arms(tmp_path, recipe, vary=["credit.scheme=uniform,gigpo"], overrides=("--seed", "7"))
    for arm in (one, other):
        assert (arm.recipe.evaluation.seed, arm.recipe.evaluation.every) == (7, 4)
    assert (one.name, other.name) == ("uniform", "gigpo")
    assert other.recipe.credit == {"scheme": "gigpo", "step_weight": 2.0}
    own = arms(tmp_path, recipe, overrides=("--evaluation.seed", "1", "--evaluation.every", "20"))[0]
    assert (own.recipe.evaluation.seed, own.recipe.evaluation.every) == (1, 20)


def test_a_recipe_finds_its_runs_again_in_another_comparison(tmp_path: Path, recipe: Path) -> None:
    alone = arms(tmp_path, recipe)[0]
    among = arms(tmp_path, recipe, vary=["credit.step_weight=1.0,2.0"])
    assert among[1].folder == alone.folder != among[0].folder
    assert arms(tmp_path, recipe, overrides=("--train.steps", "50"))[0].folder != alone.folder


def test_recipes_of_one_name_are_told_apart_by_their_folders(tmp_path: Path, recipe: Path) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / recipe.name
    other.write_text(recipe.read_text(encoding="utf-8").replace("40", "50"))
    found = arms(tmp_path, recipe, other, control=True)
    names = [str(recipe), str(other)]
    assert [arm.name for arm in found] == [*names, *(f"{name}, shuffled" for name in names)]
    with pytest.raises(ConfigError, match="are the same recipe"):
        arms(tmp_path, recipe, recipe, vary=["train.steps=40,50"])


def test_what_is_written_is_the_recipe(tmp_path: Path, recipe: Path) -> None:
    [arm] = arms(tmp_path, recipe)
    write_recipe(arm)
    assert identity(load_recipe(arm.folder / "recipe.yaml")) == identity(arm.recipe)
    planned = arm.run(3)
    assert planned.arguments() == [
        "train",
        f"{arm.folder}/recipe.yaml",
        "--seed",
        "3",
        "--run_dir",
        f"{arm.folder}/seed-3",
    ]
    planned.folder.mkdir()
    (planned.folder / "config.yaml").write_text("{}")
    assert planned.arguments() == ["train", str(planned.folder)], "it is resumed"


def test_combinations_are_named_by_file_and_values(tmp_path: Path, recipe: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("train: {steps: 40}")
    found = arms(tmp_path, recipe, other, vary=["train.learning_rate=1e-4,3e-4", "loss.unit=turn"])
    assert [arm.name for arm in found] == [
        f"{name}, learning_rate={rate}, unit=turn" for name in ("doors", "other") for rate in ("1e-4", "3e-4")
    ]
    assert found[0].recipe.train.learning_rate == 1e-4


def test_a_control_shuffles_the_credit_of_its_recipe(tmp_path: Path, recipe: Path) -> None:
    found, controls = make_arms(
        [recipe], varied={}, overrides=["--credit.fallback", "uniform"], folder=tmp_path, control=True
    )
    assert controls == {found[0].name: found[1].name}
    assert found[1].recipe.credit == {"scheme": "shuffled", "of": {"scheme": "gigpo", "step_weight": 2.0}}


@each(
    ("text", "values"),
    [
        ("a=1,2", ["1", "2"]),
        ("a=1e-4, x", ["1e-4", "x"]),
        ("a=[1,2],[3]", ["[1,2]", "[3]"]),
        ("a={b: 1},c", ["{b: 1}", "c"]),
    ],
)
def test_values_are_those_of_yaml(text: str, values: list[str]) -> None:
    assert parse_varied([text], option="--vary") == {"a": values}


@each("given", [["a"], ["=1,2"], ["a="], ["a=[1"], ["a=1,2", "a=3"]])
def test_other_words_are_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="--over: expected each field once, as FIELD=VALUE,VALUE"):
        parse_varied(given, option="--over")


def test_the_same_recipe_twice_is_refused(tmp_path: Path, recipe: Path) -> None:
    with pytest.raises(ConfigError, match="are the same recipe"):
        arms(tmp_path, recipe, vary=["credit.step_weight=2.0,2.0"])
    with pytest.raises(ConfigError, match="--folder says where"):
        arms(tmp_path, recipe, overrides=("--run_dir", "x"))
