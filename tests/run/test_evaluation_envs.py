"""Evaluation in other environments than that of training."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.api.training import summary
from agentrl.errors import ConfigError, UserError
from agentrl.recipe.config import Recipe
from agentrl.run.build import build
from tests.support.each import each
from tests.support.runs import recipe, train

pytestmark = pytest.mark.process

TABLE = "tests.support.table:Table"


def settings(tmp_path: Path, env: Any, **evaluation: Any) -> Recipe:
    return recipe(tmp_path, evaluation={"num_tasks": 5, "env": env, **evaluation}, train={"steps": 1})


def test_several_are_evaluated_by_name(tmp_path: Path) -> None:
    envs = {
        "short": {"id": TABLE, "options": {"num_eval": 3}},
        "long": {"id": TABLE, "options": {"num_eval": 40, "log": str(tmp_path / "log")}},
    }
    told: list[str] = []
    folder, rows = train(settings(tmp_path, envs), on_warning=told.append)
    for row in rows:
        assert row["eval/short/episodes"] + row["eval/short/failed"] == 3
        assert row["eval/long/episodes"] + row["eval/long/failed"] == 5
        assert not any(name.startswith("eval/") and name.count("/") == 1 for name in row)
    assert not [words for words in told if "also occur" in words]
    lines = (tmp_path / "log").read_text().splitlines()
    assert {f"eval {index} 0" for index in (0, 8, 16, 24, 32)} <= {*lines}
    short, long = summary(folder.metrics(), 1).splitlines()
    assert (short.startswith("short: "), "on 3 evaluation tasks, 1 steps" in short) == (True, True)
    assert (long.startswith("long: "), "on 5 evaluation tasks, 1 steps" in long) == (True, True)
    # It is a field that may change on resume.
    _, rows = train(settings(tmp_path, {}).model_copy(update={"run_dir": folder.path}), folder)
    assert [row["step"] for row in rows] == [0, 1]


def test_another_one_takes_the_place_of_that_of_training(tmp_path: Path) -> None:
    given = settings(tmp_path, {"id": TABLE, "options": {"num_train": 0}})
    with build(given) as parts:
        assert [words for words in parts.warnings if "evaluation.num_tasks: 5 were asked" in words]
    _, rows = train(given)
    assert [row["eval/episodes"] + row["eval/failed"] for row in rows] == [3, 3]


@each(
    ("env", "words"),
    [
        ({"id": TABLE, "options": {"num_eval": 0}}, r"^evaluation\.env: env: the environment has no evaluation tasks"),
        ({"hard": {"id": "no_such_env", "options": {}}}, r"^evaluation\.env\.hard: env\.id: "),
        ({"hard": {"id": TABLE, "options": {"size": 3}}}, r"^evaluation\.env\.hard: env\.options\.size: "),
    ],
)
def test_one_that_cannot_be_evaluated_in_is_named(tmp_path: Path, env: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(settings(tmp_path, env))
    assert not (tmp_path / "run").exists()


def test_that_of_training_may_have_no_evaluation_tasks_then(tmp_path: Path) -> None:
    own = {"id": TABLE, "options": {"num_eval": 0}}
    with pytest.raises(ConfigError, match=r"num_tasks\('eval'\) returned 0"):
        train(recipe(tmp_path, env=own))
    given = settings(tmp_path, {"id": "key_door"}).model_dump(mode="json")
    _, rows = train(Recipe.model_validate({**given, "env": own}))
    assert rows[-1]["eval/episodes"] + rows[-1]["eval/failed"] == 5
