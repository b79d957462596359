"""Results of the examples of docs/tasks.md; `test_docs.py` checks that all examples run."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl import TaskEnv, tool_call
from agentrl.recipe.config import load_recipe
from tests.support.docs import blocks

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = DOCS.parent / "examples"


def files() -> dict[str, str]:
    return {block.file: block.text for block in blocks(DOCS / "tasks.md") if block.file}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("my_rewards", "more_rewards", "shop"):
        sys.modules.pop(name, None)


def played(env: Any, *actions: Any) -> dict[str, float]:
    env.reset(seed=0)
    components: dict[str, float] = [env.step(action)[4] for action in actions][-1]["reward_components"]
    return components


def test_the_recipe_plays_its_table(here: Path) -> None:
    for name, text in files().items():
        (here / name).write_text(text)
    env = load_recipe(here / "recipe.yaml").env.make()
    env.reset(seed=0)
    right = env.unwrapped.gold_answer()  # type: ignore[attr-defined]
    assert played(env, right) == {"exact_match": 1, "brief": 0}


def test_the_class_plays_its_table(here: Path) -> None:
    (here / "shop.py").write_text(files()["shop.py"])
    shop: Any = importlib.import_module("shop")
    shop.env.reset(seed=0)
    price = shop.env.gold_answer()
    look = tool_call("price", item=shop.env.task["item"])
    assert played(shop.env, look, f"It costs {price} euros.") == {"numeric": 1}


def test_the_functions_are_rewards(here: Path) -> None:
    (here / "more_rewards.py").write_text(files()["more_rewards.py"])
    rewards = ["more_rewards:polite", {"reward": "more_rewards:close", "scale": 20}, "more_rewards:as_trl_calls_it"]
    env = TaskEnv(tasks=[{"prompt": "?", "answer": "please"}], answer="answer", eval_share=0, rewards=rewards)
    assert played(env, "Please!") == {"polite": 1, "close": -1 / 20, "as_trl_calls_it": 0}


def test_the_example_is_one_recipe_200_tasks_and_15_lines_of_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.syspath_prepend(str(EXAMPLES.parent))
    assert len((EXAMPLES / "colors.jsonl").read_text().splitlines()) == 200
    assert len((EXAMPLES / "color_rewards.py").read_text().splitlines()) == 15
    env: Any = load_recipe(EXAMPLES / "tasks.yaml").env.make()
    env.reset(seed=0)
    assert played(env, env.gold_answer()) == {"named": 1, "brief": 0}
    assert played(env, f"It is {env.gold_answer()}") == {"named": 0.3, "brief": pytest.approx(-0.1)}
    assert env.num_tasks("train") + env.num_tasks("eval") == 200
