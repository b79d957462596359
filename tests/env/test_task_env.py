import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import EnvironmentFailure, Message, Need, TaskEnv, UserError, tool, tool_call
from agentrl.env import make_env
from agentrl.errors import ConfigError
from agentrl.testing import check_env
from tests.support.each import each

SUMS = [{"prompt": f"{a}+{b}=?", "answer": a + b, "difficulty": 1 + (a > 4)} for a in range(10) for b in range(10)]
HERE = "tests.support.task_functions"


def sums(**options: Any) -> TaskEnv:
    return TaskEnv(**({"tasks": SUMS, "answer": "answer", "rewards": ["exact_match"]} | options))


def components(env: TaskEnv, text: str = "5", **options: Any) -> dict[str, float]:
    env.reset(seed=0, options=options)
    info = env.step(text)[4]
    return dict(info["reward_components"])


def score(completion: str) -> float:
    return float(len(completion))


def refusal(**options: Any) -> str:
    with pytest.raises(UserError) as error:
        sums(**options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_recipe_names_tasks_columns_and_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text('{"question": "Capital of France?", "answer": "Paris"}\n' * 3)
    options = {
        "tasks": "my.jsonl",
        "prompt": "question",
        "answer": "answer",
        "rewards": ["exact_match"],
        "eval_share": 0,
    }
    env = make_env("agentrl.env.task_env:TaskEnv", options)
    assert env.reset(seed=0)[0] == ({"role": "user", "content": "Capital of France?"},)
    messages, reward, terminated, truncated, info = env.step(" paris.")
    assert (messages, reward, terminated, truncated) == ((), 1.0, True, False)
    assert (info["success"], info["score"], info["reward_components"]) == (True, 1.0, {"exact_match": 1.0})


def test_it_keeps_the_contract_of_environments() -> None:
    check_env(TaskEnv, tasks=SUMS, answer="answer", rewards=["exact_match"], seeds=range(10))
    options: dict[str, Any] = {
        "tools": [f"{HERE}:look_up", f"{HERE}:think"],
        "rewards": ["numeric", f"{HERE}:waits"],
        "max_answers": 3,
    }
    check_env(TaskEnv, tasks=SUMS, answer="answer", system="Add.", seeds=range(3), **options)


def test_the_task_is_the_one_of_the_split_that_is_asked_for() -> None:
    env = sums()
    assert env.num_tasks("train") + env.num_tasks("eval") == 100
    seen: dict[str, list[str]] = {
        split: [
            env.reset(options={"split": split, "task_index": k})[0][0]["content"] for k in range(env.num_tasks(split))
        ]
        for split in ("train", "eval")
    }
    assert sorted(seen["train"] + seen["eval"]) == sorted(str(row["prompt"]) for row in SUMS)
    drawn = {env.reset(seed=seed, options={"split": "eval"})[0][0]["content"] for seed in range(100)}
    assert drawn == set(seen["eval"])
    assert {env.reset(seed=seed)[0][0]["content"] for seed in range(100)} <= set(seen["train"])
    with pytest.raises(EnvironmentFailure, match="no longer a task 99: its train split has"):
        env.reset(options={"task_index": 99})
    with pytest.raises(EnvironmentFailure, match="no task of the split 'eval'"):
        sums(eval_share=0).reset(options={"split": "eval"})


def test_what_is_done_to_a_task_does_not_outlive_the_episode() -> None:
    env = sums(tasks=[{"prompt": [{"role": "user", "content": "hi"}], "answer": ["a"]}], eval_share=0)
    first, _ = env.reset(seed=0)
    first[0]["content"] = "no"
    env.task["answer"].append("b")
    assert env.reset(seed=0)[0][0]["content"] == "hi"
    assert env.task["answer"] == ["a"]


def test_copies_share_the_table_and_not_the_task() -> None:
    env = sums(rewards=["exact_match", {"reward": "matches", "pattern": "[0-9]+"}])
    env.reset(seed=0)
    other = env.fork()
    assert other._table is env._table
    other.task["answer"] = None
    assert env.task["answer"] is not None
    again = pickle.loads(pickle.dumps(env))
    assert again.step("7") == env.step("7")


def test_a_column_called_answer_needs_no_word() -> None:
    assert components(sums(answer=None, tasks=[{"prompt": "2+3=?", "answer": 5}], eval_share=0)) == {"exact_match": 1.0}
    named = sums(answer="right", tasks=[{"prompt": "2+3=?", "answer": 4, "right": 5}], eval_share=0)
    assert components(named) == {"exact_match": 1.0}


def test_a_prompt_of_messages_and_a_system_message() -> None:
    dialogue = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    env = sums(tasks=[{"prompt": dialogue, "answer": "d"}], eval_share=0, system="Be brief.")
    assert env.reset(seed=0)[0] == ({"role": "system", "content": "Be brief."}, *dialogue)
    mine = [{"role": "system", "content": "Mine."}, *dialogue]
    assert "system: the prompts of the table begin with system messages of their own; remove it" in refusal(
        tasks=[{"prompt": mine, "answer": "d"}], eval_share=0, system="Be brief."
    )


def test_rewards_are_named_weighted_and_called_by_name() -> None:
    given = [
        "numeric",
        {"reward": "matches", "pattern": "[0-9]+", "weight": 0.5, "name": "format"},
        {"reward": f"{HERE}:waits", "weight": -1},
        f"{HERE}:as_trl_has_it",
        f"{HERE}:of_one_column",
        f"{HERE}:spoils",
        f"{HERE}:counts_messages",
    ]
    env = sums(rewards=given, tasks=[{"prompt": "2+3=?", "answer": "5", "difficulty": 1}], eval_share=0)
    assert components(env) == {
        "numeric": 1.0,
        "format": 0.5,
        "waits": -1.0,
        "as_trl_has_it": 1.0,
        "of_one_column": 1.0,
        "spoils": 0.0,
        "counts_messages": 1.0,
    }
    # `spoils` has cleared what it was given, which was its own. A reward of None is none.
    hard = sums(rewards=given[4:], tasks=[{"prompt": "2+3=?", "answer": "5", "difficulty": 2}], eval_share=0)
    assert components(hard) == {"spoils": 0.0, "counts_messages": 1.0}


def test_trl_functions_get_completions_in_the_form_of_the_prompt() -> None:
    def last(completions: list[Any], **kwargs: Any) -> list[float]:
        assert kwargs["prompts"] == [[{"role": "user", "content": "a"}]]
        assert kwargs["level"] == [3]
        return [float(completions[0][-1]["content"] == "yes")]

    env = sums(
        tasks=[{"prompt": [{"role": "user", "content": "a"}], "level": 3}], answer=None, eval_share=0, rewards=[last]
    )
    assert components(env, "yes") == {"last": 1.0}


def test_a_table_sets_no_option_of_a_reward() -> None:
    rows = [{"prompt": "a", "answer": "b", "max_length": 1, "buffer": 1, "unit": "characters"}]
    env = sums(tasks=rows, eval_share=0, rewards=[{"reward": "overlong", "max_length": 9, "buffer": 3}])
    assert components(env, "one two three four five six") == {"overlong": 0.0}


def test_a_reward_may_leave_numbers_that_become_metrics() -> None:
    env = sums(rewards=["exact_match", f"{HERE}:tells"])
    env.reset(seed=0)
    assert env.step("four")[4]["letters"] == 4


def test_a_reward_may_ask_for_the_answer_by_keyword_alone() -> None:
    def right(completion: str, *, answer: int | None = None, factor: float = 1.0) -> float:
        return factor * (completion == str(answer))

    env = sums(rewards=[{"reward": right, "factor": 0.5}], tasks=[{"prompt": "2+3=?", "answer": 5}], eval_share=0)
    assert components(env, "5") == {"right": 0.5}


def test_what_rewards_tell_is_of_all_answers_to_a_task() -> None:
    def counts(completion: str, info: dict[str, Any]) -> float:
        info["asked"] = info.get("asked", 0.0) + 1
        return 0.0

    env = sums(rewards=[counts], max_answers=3)
    for seed in range(2):
        env.reset(seed=seed)
        assert [env.step("a")[4].get("asked") for _ in range(3)] == [None, None, 3.0]


def test_of_several_right_answers_the_first_is_said() -> None:
    tasks = [{"prompt": "Capital of France?", "answer": ["Paris", "City of Paris"]}]
    env = sums(tasks=tasks, eval_share=0)
    env.reset(seed=0)
    assert env.gold_answer() == "Paris"
    assert env.step(env.oracle())[1] == 1.0
    for reward in ("exact_match", "numeric"):
        env = sums(tasks=[{"prompt": "Boils, or freezes?", "answer": [0, 100]}], eval_share=0, rewards=[reward])
        env.reset(seed=0)
        assert env.gold_answer() == "0"
        assert env.step(env.oracle())[1] == 1.0


def test_schemes_may_read_an_answer_where_there_is_one() -> None:
    assert Need.ANSWER_LOGPROBS in sums().provides()
    assert Need.ANSWER_LOGPROBS not in sums(answer=None, rewards=[f"{HERE}:counts_messages"]).provides()


def test_a_reward_that_fails_fails_the_episode_and_is_no_zero() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a coroutine that was never awaited
        with pytest.raises(RuntimeError, match="the judge is ill"):
            components(sums(rewards=["exact_match", f"{HERE}:hangs", f"{HERE}:fails"]))
    with pytest.raises(
        EnvironmentFailure, match="reward 'no_number' returned float nan; return a finite number, or None"
    ):
        components(sums(rewards=[f"{HERE}:no_number"]))


def graded_by(*rewards: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    env = sums(rewards=list(rewards), tasks=[{"prompt": "2+3=?", "answer": 5}], eval_share=0, **options)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step("4")
    assert terminated
    return reward, {name: info[name] for name in ("success", "score", "reward_components")}


def cannot_tell(completion: str) -> None:
    """Return nothing: the judge had no opinion."""


def test_an_answer_that_no_reward_can_score_has_no_reward() -> None:
    nothing: dict[str, Any] = {"success": None, "score": None, "reward_components": {}}
    assert graded_by(cannot_tell) == (None, nothing)
    assert graded_by(cannot_tell, {"reward": cannot_tell, "name": "again"}) == (None, nothing)
    assert graded_by(cannot_tell, {"reward": "exact_match", "weight": 0}) == (None, nothing)  # which pays nothing
    # Whether it is right is not known, so nobody is asked to try again.
    assert graded_by(cannot_tell, max_answers=3) == (None, nothing)


def test_where_one_of_several_rewards_cannot_score_an_answer_the_rest_pay() -> None:
    fails = {"exact_match": 0.0}
    assert graded_by("exact_match", cannot_tell) == (0.0, {"success": False, "score": 0.0, "reward_components": fails})
    assert graded_by(cannot_tell, "exact_match") == (0.0, {"success": None, "score": None, "reward_components": fails})


def test_coroutines_have_a_deadline() -> None:
    with pytest.raises(EnvironmentFailure, match=r"rewards: hangs did not return within reward_timeout_s: 0.1 s"):
        components(sums(rewards=[f"{HERE}:hangs"], reward_timeout_s=0.1))


def test_success_is_what_the_first_reward_says() -> None:
    env = TaskEnv(
        tasks=[{"prompt": "?", "answer": "abcd"}],
        answer="answer",
        eval_share=0,
        rewards=[f"{HERE}:shares_letters"],
        success_at=0.5,
    )
    for text, success, score in (("ab", True, 0.5), ("a", False, 0.25), ("dcba", True, 1.0)):
        env.reset(seed=0)
        info = env.step(text)[4]
        assert (info["success"], info["score"]) == (success, score)


def test_several_answers_are_told_so_and_the_last_is_paid() -> None:
    env = sums(max_answers=3, retry="No.", tasks=[{"prompt": "2+3=?", "answer": 5}], eval_share=0)
    env.reset(seed=0)
    assert env.step("4")[:3] == (({"role": "user", "content": "No."},), 0.0, False)
    assert env.step("5")[1:3] == (1.0, True)
    env.reset(seed=0)
    assert [env.step("4")[2] for _ in range(3)] == [False, False, True]


def test_functions_are_tools_beside_those_of_a_subclass() -> None:
    env = Sums(tasks=SUMS, answer="answer", rewards=["numeric", f"{HERE}:counts_messages"], tools=[f"{HERE}:look_up"])
    assert [schema["function"]["name"] for schema in env.tools] == ["peek", "look_up"]
    assert env.tools[1]["function"]["parameters"]["properties"]["word"]["description"] == "to look up."
    env.reset(seed=0)
    assert env.step(tool_call("look_up", word="cat"))[0][0]["content"] == "an animal"
    assert env.step(tool_call("look_up", words="cat"))[0][0]["content"].startswith("Error: wrong arguments for look_up")
    answer = env.step(tool_call("peek"))[0][0]["content"]
    assert env.step(answer)[4]["reward_components"] == {"numeric": 1.0, "counts_messages": 7.0}


class Sums(TaskEnv):
    @tool
    def peek(self) -> str:
        """Look at the answer."""
        return str(self.task["answer"])


class Asked(TaskEnv):
    """Says the prompt itself, and pays by itself."""

    def opening(self) -> str:
        return f"What is {self.task['a']} squared?"

    def answer(self, text: str) -> None:
        self.reward(float(text == str(self.task["a"] ** 2)))
        self.finish()


def test_a_subclass_may_say_the_prompt_and_pay_by_itself() -> None:
    env = Asked(tasks=[{"a": 3}, {"a": 4}], prompt=None)
    env.reset(seed=0, options={"split": "eval"})
    held_out = env.task["a"]
    assert env.step(str(held_out**2))[1] == 1.0
    env.reset(seed=0)
    assert env.task["a"] != held_out


@each("split", ["train", "eval"])
def test_the_oracle_answers_as_the_table_does_and_errs_as_skill_says(split: str) -> None:
    env, rng, right = sums(), np.random.default_rng(0), 0
    for seed in range(200):
        env.reset(seed=seed, options={"split": split})
        assert env.oracle() == {"role": "assistant", "content": env.gold_answer()}
        right += env.oracle(skill=0.5, rng=rng)["content"] == env.gold_answer()
    assert 85 <= right <= 130  # half of them, and where two tasks have one answer
    shown = sums(demonstration="difficulty")
    shown.reset(seed=0)
    assert shown.oracle()["content"] in "12"
    with pytest.raises(NotImplementedError, match="set answer or demonstration"):
        sums(answer=None, rewards=[f"{HERE}:counts_messages"]).oracle()


@each(
    ("options", "words"),
    [
        ({"task": "x"}, "task: no such field. Did you mean 'tasks'?"),
        ({"rewards": []}, "rewards: there is none, so nothing is learned"),
        ({"rewards": "exact_match"}, "rewards: "),
        ({"rewards": ["exact_mach"]}, "rewards[0]: no 'exact_mach' is installed. Did you mean 'exact_match'?"),
        ({"rewards": [f"{HERE}:non"]}, f"rewards[0]: module '{HERE}' has no 'non'"),
        ({"rewards": ["os:system"]}, "rewards[0]: 'os:system' is "),
        ({"rewards": ["shutil:rmtree"]}, "rewards[0]: rmtree is no reward function; one takes completion"),
        ({"rewards": [f"{HERE}:no_reward"]}, "rewards[0]: no_reward is no reward function"),
        ({"rewards": [5]}, "rewards[0]: int 5 names no reward"),
        ({"rewards": [{"weight": 1}]}, "rewards[0]: dict {'weight': 1} names no reward"),
        ({"rewards": ["exact_match", "exact_match"]}, "rewards: two are called 'exact_match'; give one another name"),
        ({"rewards": [{"reward": "exact_match", "weight": "a lot"}]}, "rewards[0]: weight is str 'a lot'; give a number"),
        ({"rewards": [{"reward": "exact_match", "name": "success"}]}, "rewards[0]: every episode has a metric 'success'"),
        (
            {"rewards": [score]},
            "rewards[0]: every episode has a metric 'score', so a reward needs another name: rename the function, or give "
            "{reward: ..., name: my_score}",
        ),
        ({"rewards": [{"reward": "matches", "patern": "x"}]}, "rewards[0], matches has no option 'patern'. Did you mean"),
        ({"rewards": [{"reward": "matches", "pattern": "("}]}, "rewards[0], matches: pattern: Input should be a valid regular"),
        ({"rewards": ["matches"]}, "rewards[0]: matches asks for 'pattern', which is neither"),
        ({"rewards": [{"reward": "overlong", "max_length": 0, "buffer": 1}]}, "max_length: Input should be greater than 0"),
        ({"tasks": [{"prompt": "a"}], "eval_share": 0, "answer": None}, "rewards[0]: exact_match asks for 'answer', which is"),
        ({"tools": [f"{HERE}:unmarked"]}, f"tools[0]: '{HERE}:unmarked' is not marked with @agentrl.tool"),
        ({"tools": ["os:system"]}, "tools[0]: 'os:system' is not marked with @agentrl.tool"),
        ({"tools": [len]}, "tools[0]: "),
        ({"tools": [lambda word: word]}, "has no docstring"),
        ({"tools": [f"{HERE}:look_up"] * 2}, "tools[1]: there are two tools called 'look_up'; rename one"),
        ({"max_answers": 0}, "max_answers: Input should be greater than 0"),
        ({"eval_share": 1.0}, "eval_share: Input should be less than 1"),
        ({"demonstration": "solution"}, "demonstration: there is no column 'solution'; name one of prompt, answer"),
    ],
)  # fmt: skip
def test_what_cannot_be_played_is_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    assert words in refusal(**options)


def test_what_is_to_be_shown_is_there_in_every_row() -> None:
    tasks = [{"prompt": "a", "answer": 1, "said": "one"}, {"prompt": "b", "answer": 2}]
    sides = {"eval_share": 0, "demonstration": "said"}
    assert "tasks[1]: column 'said' is empty, and a warm-up shows it" in refusal(tasks=tasks, **sides)
    env = sums(tasks=tasks[:1], eval_tasks=tasks[1:], demonstration="said")
    for split, said in (("train", "one"), ("eval", "2")):  # held out: the answer
        env.reset(seed=0, options={"split": split})
        assert env.oracle()["content"] == said


def test_make_env_names_the_field_of_the_recipe() -> None:
    with pytest.raises(
        ConfigError, match=r"env\.options: .* could not be made: tasks: there is no file my\.jsonl \(in "
    ):
        make_env("agentrl.env.task_env:TaskEnv", {"tasks": "my.jsonl", "rewards": ["exact_match"]})


def test_messages_hold_all_that_was_said_since_the_prompt() -> None:
    heard: list[list[Message]] = []

    def listens(messages: list[Message]) -> float:
        heard.append(copy.deepcopy(messages))
        return 0.0

    env = sums(rewards=[listens], tools=[f"{HERE}:look_up"])
    for _ in range(2):  # nothing is left of the first time
        env.reset(seed=0)
        env.step(tool_call("look_up", word="cat"))
        env.step("an animal")
    assert heard[0] == heard[1]
    assert [message["role"] for message in heard[0]] == ["assistant", "tool", "assistant"]
