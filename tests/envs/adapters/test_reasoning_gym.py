import random
from typing import Any

import pytest

from agentrl import EnvironmentFailure, UserError
from agentrl.testing import check_env

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install 'agentrl[reasoning-gym]'")

from agentrl_envs.adapters.reasoning_gym import ReasoningGym


@pytest.mark.parametrize("dataset", ["chain_sum", "list_functions", "pool_matrix"])  # two draw from global generators
def test_its_tasks_keep_the_contract(dataset: str) -> None:
    check_env(ReasoningGym, seeds=range(50), dataset=dataset)


@pytest.mark.parametrize("dataset", ["chain_sum", "countdown", "word_sorting"])
def test_the_oracle_solves_every_task(dataset: str) -> None:
    env = ReasoningGym(dataset=dataset)
    for seed in range(10):
        env.reset(seed=seed)
        _, reward, terminated, _, info = env.step(env.oracle())
        assert (terminated, info["success"]) == (True, True), f"seed {seed}: {reward}"


def test_what_is_tagged_is_the_answer() -> None:
    env = ReasoningGym(dataset="chain_sum")
    for text, reward in (("I think {}", None), ("<answer>{}</answer>, not <answer>0.5</answer>", 0.0), ("{}", 1.0)):
        env.reset(seed=1)
        got = env.step(text.format(env.gold_answer()))[1]
        assert got == reward if reward is not None else got < 1.0


def test_train_and_eval_never_share_a_question() -> None:
    env = ReasoningGym(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    asked = {}
    for split in ("train", "eval"):
        asked[split] = {env.reset(seed=s, options={"split": split})[0][0]["content"] for s in range(150)}
    assert not asked["train"] & asked["eval"]


def test_seeds_that_lie_close_ask_different_questions() -> None:
    env = ReasoningGym(dataset="chain_sum", config={"min_terms": 5, "min_digits": 4})
    assert len({env.reset(seed=s)[0][0]["content"] for s in range(100)}) == 100


class Scorer:
    def __init__(self, raises_on: set[str]) -> None:
        self.raises_on = raises_on

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        random.random()
        if answer in self.raises_on:
            raise ZeroDivisionError("division by zero")
        return float(answer == entry["answer"])


def test_an_answer_that_the_scorer_cannot_read_is_wrong_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ReasoningGym(dataset="chain_sum")
    env.reset(seed=0)
    monkeypatch.setattr(env, "_data_set", lambda seed: Scorer({"1/0"}))
    _, reward, _, _, info = env.step("1/0")
    assert (reward, info["success"], info["scorer_errors"]) == (0.0, False, 1)


def test_a_scorer_that_raises_on_the_right_answer_too_fails_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ReasoningGym(dataset="chain_sum")
    env.reset(seed=0)
    monkeypatch.setattr(env, "_data_set", lambda seed: Scorer({"1/0", str(env.gold_answer())}))
    with pytest.raises(
        EnvironmentFailure, match="the scorer of chain_sum raises on the right answer too: ZeroDivision"
    ):
        env.step("1/0")


def test_the_global_random_numbers_stay_as_they_are() -> None:
    random.seed(5)
    expected = random.Random(5).random()
    env = ReasoningGym(dataset="pool_matrix")
    env.reset(seed=0)
    env.step("x")
    assert random.random() == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": "no_such"}, "dataset: reasoning-gym has no 'no_such'; it has ab, acre"),
        ({"dataset": "chain_sum", "config": {"seed": 1}}, "config: seed follows from the task's seed"),
        ({"dataset": "chain_sum", "config": {"terms": 1}}, "config: .*unexpected keyword argument 'terms'"),
        ({"dataset": "chain_sum", "config": {"min_terms": 9, "max_terms": 2}}, "config: "),
    ],
)
def test_what_it_does_not_have_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ReasoningGym(**options)
