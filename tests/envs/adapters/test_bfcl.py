import decimal
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("bfcl_eval", reason="needs BFCL: pip install --no-deps bfcl-eval")

import mpmath

from agentrl import Message, UserError, tool_call
from agentrl.testing import check_env
from agentrl_envs.adapters.bfcl import (
    BFCL,
    CATEGORIES,
    Call,
    Task,
    check_calls,
    expected_turns,
    load_tasks,
    make_apis,
    split_tasks,
)
from benchmarks.bfcl_agreement import change_calls, compared
from tests.support.each import each


def begun(task: str, **options: Any) -> BFCL:
    """Return an environment in which a task has begun."""
    env = BFCL(category=task.rpartition("_")[0], **options)
    for split in ("train", "eval"):
        ids = [each.id for each in split_tasks(env.category, split)]
        if task in ids:
            env.reset(seed=0, options={"split": split, "task_index": ids.index(task)})
    assert env.task.id == task
    return env


def solve(env: BFCL) -> tuple[list[float], dict[str, Any]]:
    """Let the oracle end the episode; return rewards and the last info."""
    rewards = []
    while True:
        _, reward, is_over, _, info = env.step(env.oracle())
        rewards.append(reward)
        if is_over:
            return rewards, info


def answered(env: BFCL, name: str, /, **arguments: Any) -> str:
    """Return what a call is answered with."""
    return str(env.step(tool_call(name, **arguments))[0][0]["content"])


@pytest.mark.slow
@pytest.mark.process  # takes seconds of its own
@each("category", ["multi_turn", "single_turn", "live"])
def test_its_tasks_keep_the_contract(category: str) -> None:
    check_env(BFCL, seeds=range(2), category=category)


def solved(category: str, every: int) -> tuple[int, list[str]]:
    """Return how many tasks the oracle played, and those that it failed."""
    env, failed, num = BFCL(category=category), [], 0
    for split in ("train", "eval"):
        for index in range(0, env.num_tasks(split), every):
            env.reset(seed=0, options={"split": split, "task_index": index})
            rewards, info = solve(env)
            num += 1
            if not info["success"] or sum(rewards) != pytest.approx(1.0):
                failed.append(env.task.id)
    return num, failed


@each("category", [*CATEGORIES["multi_turn"], "single_turn"])
def test_the_oracle_solves_tasks_of_each_category(category: str) -> None:
    num, failed = solved(category, every=29)
    assert (num > 5, failed) == (True, [])


@pytest.mark.slow
@each(("category", "num"), [("multi_turn", 800), ("single_turn", 1240)])
def test_the_oracle_solves_every_task(category: str, num: int) -> None:
    assert solved(category, every=1) == (num, [])


def test_the_verdict_and_the_kind_of_error_are_those_of_bfcls_checker() -> None:
    env, rng = BFCL(category="multi_turn"), np.random.default_rng(5)
    verdicts = set()
    for index in rng.permutation(env.num_tasks("train"))[:60].tolist():
        options = {"split": "train", "task_index": index}
        env.reset(seed=0, options=options)
        _, episode = change_calls(env, rng)
        ours, theirs = compared(env, options, episode)
        assert ours == theirs, env.task.id
        verdicts.add(ours)
    assert len(verdicts) >= 4  # right, and three kinds of wrong


def test_each_right_turn_is_paid_and_the_first_wrong_one_ends_the_episode() -> None:
    env = begun("multi_turn_base_3")
    num = len(expected_turns(env.task))
    assert num == 2
    assert env.step(env.oracle())[1] == 0.0
    messages, reward, is_over, _, _ = env.step("Found them.")
    assert (messages[0]["role"], reward, is_over) == ("user", 0.5, False)
    env.step(tool_call("cd", folder="projects"))
    messages, reward, is_over, _, info = env.step("Done.")
    assert (messages, reward, is_over) == ((), 0.0, True)
    assert (info["success"], info["score"], info["bfcl_error"]) == (
        False,
        0.5,
        "multi_turn:instance_state_mismatch",
    )
    env = begun("multi_turn_base_3")
    env.step(tool_call("pwd"))
    assert env.step("Done.")[4]["bfcl_error"] == "multi_turn:execution_response_mismatch"


def test_without_turn_rewards_success_is_paid_at_the_end() -> None:
    rewards, info = solve(begun("multi_turn_base_3", turn_rewards=False))
    assert (set(rewards[:-1]), rewards[-1], info["success"]) == ({0.0}, 1.0, True)


def test_a_turn_without_calls_is_wrong_only_if_the_ground_truth_has_some() -> None:
    assert begun("multi_turn_base_3").step("Hello.")[4]["bfcl_error"] == "multi_turn:empty_turn_model_response"
    _, reward, is_over, _, _ = begun("multi_turn_miss_func_3").step("There is no tool for it.")
    assert (reward, is_over) == (0.0, False)  # BFCL does not check such a turn, and it is not paid


def test_functions_that_are_missing_come_with_a_later_turn_and_are_callable_before() -> None:
    env = begun("multi_turn_miss_func_3")
    missing = env.task.row["missed_function"]["1"]
    assert missing == ["find", "ls"]
    assert {tool["function"]["name"] for tool in env.tools}.isdisjoint(missing)
    assert "matches" in answered(env, "find", path=".", name="test")  # as in BFCL
    env = begun("multi_turn_miss_func_3")
    ((message,), *_) = env.step("There is no tool for it.")
    *schemas, last = message["content"].splitlines()
    assert [json.loads(schema)["function"]["name"] for schema in schemas] == missing
    assert last == "I have updated some more functions you can choose from. What about now?"


def test_a_turn_takes_max_steps_messages_with_calls() -> None:
    env = begun("multi_turn_base_3", max_steps=2)
    assert [env.step(tool_call("ls"))[2] for _ in range(2)] == [False, False]
    _, _, is_over, _, info = env.step(tool_call("ls"))
    assert (is_over, info["bfcl_error"]) == (True, "multi_turn:force_terminated")


@each(
    ("name", "arguments", "words"),
    [
        ("cat", {"no_file": "x"}, "Error: GorillaFileSystem.cat() got an unexpected keyword argument 'no_file'"),
        ("ls", {"self": 1}, "Error: bound method"),
        ("cat", {"file_name": 5}, "Error: argument of type 'int' is not iterable"),
        ("_load_scenario", {"scenario": {}}, "Error: name '_load_scenario' is not defined"),
        ("deepcopy", {"x": 1}, "Error: name 'deepcopy' is not defined"),
        ("cat", {"file_name": "no.txt"}, '{"error": "cat: \'no.txt\': No such file or directory"}'),
    ],
)
def test_wrong_arguments_are_answered(name: str, arguments: dict[str, Any], words: str) -> None:
    message: Message = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }
    ((reply,), *_) = begun("multi_turn_base_3").step(message)
    assert words.partition("bound method")[0] in reply["content"]


def with_calculator() -> BFCL:
    (task, *_) = [task for task in load_tasks("multi_turn_base") if "MathAPI" in task.row["involved_classes"]]
    return begun(task.id)


@each(
    ("name", "arguments"),
    [
        ("power", {"base": 10, "exponent": 10**12}),
        ("power", {"base": 10**4000, "exponent": 2}),
        ("logarithm", {"value": 2, "base": 10, "precision": "9999999999"}),
        ("square_root", {"number": 2, "precision": 10**12}),
        ("round_number", {"number": 5, "decimal_places": -(10**12)}),
    ],
)
def test_calculations_without_end_are_refused(name: str, arguments: dict[str, Any]) -> None:
    env, began = with_calculator(), time.monotonic()
    assert answered(env, name, **arguments) == "Error: the numbers are too large"
    assert time.monotonic() - began < 5


def test_a_calculator_leaves_the_precision_of_the_process_as_it_was() -> None:
    before = mpmath.mp.dps, decimal.getcontext().prec
    env = with_calculator()
    assert "mpf('2.0')" in answered(env, "logarithm", value=100, base=10, precision=3)
    assert "Decimal('1.414')" in answered(env, "square_root", number=2, precision=4)
    assert (mpmath.mp.dps, decimal.getcontext().prec) == before


def test_arguments_that_an_api_keeps_are_not_the_callers() -> None:
    """BFCL's `mention` adds to the list that `post_tweet` was given."""
    rewards, info = solve(begun("multi_turn_base_147"))
    assert (sum(rewards), info["success"]) == (1.0, True)
    (calls, *_) = expected_turns(begun("multi_turn_base_147").task)
    assert calls.calls[-1].arguments["mentions"] == ["@industryexperts"]


def test_no_episode_sees_what_another_did() -> None:
    """In long contexts BFCL's booking API holds credit cards of its module, whose balance a booking would lower for ever."""
    (task, *_) = [task for task in load_tasks("multi_turn_long_context") if "TravelAPI" in task.row["involved_classes"]]
    one, other = make_apis(task)["TravelAPI"], make_apis(task)["TravelAPI"]
    cards = other.credit_card_list
    before = json.dumps(cards, sort_keys=True)
    for card in one.credit_card_list.values():
        card["balance"] = -1
    assert json.dumps(cards, sort_keys=True) == before
    assert json.dumps(make_apis(task)["TravelAPI"].credit_card_list, sort_keys=True) == before


def test_a_fork_goes_its_own_way() -> None:
    env = begun("multi_turn_base_3")
    fork = env.fork()
    answered(fork, "mkdir", dir_name="new")
    assert "new" in answered(fork, "ls")
    assert "new" not in answered(env, "ls")
    rewards, info = solve(env)
    assert (sum(rewards), info["success"]) == (1.0, True)


def test_the_state_key_is_blind_to_calls_that_change_nothing_and_are_not_asked_for() -> None:
    env = begun("multi_turn_base_3")
    begin = env.state_key()
    answered(env, "pwd")
    called = env.state_key()
    assert called != begin  # a turn without any call is wrong
    answered(env, "pwd")
    assert env.state_key() == called
    answered(env, "find", path=".", name="test")
    found = env.state_key()
    assert found != called  # it is asked for
    answered(env, "mkdir", dir_name="new")
    assert env.state_key() != found
    answered(env, "rmdir", dir_name="new")
    assert env.state_key() == found


def test_train_and_eval_share_no_task_and_no_variant_of_one() -> None:
    env = BFCL(category="multi_turn")
    found = {split: [task.id for task in split_tasks("multi_turn", split)] for split in ("train", "eval")}
    assert [env.num_tasks(split) for split in found] == [len(ids) for ids in found.values()] == [576, 224]
    for split, ids in found.items():
        env.reset(seed=0, options={"split": split, "task_index": 100})
        assert env.task.id == ids[100]
    numbers = [{name.rpartition("_")[2] for name in ids} for ids in found.values()]
    assert numbers[0].isdisjoint(numbers[1])
    assert list(map(len, numbers)) == [144, 56]
    assert env.tasks_hash("train") != env.tasks_hash("eval")
    with pytest.raises(UserError, match="category: BFCL has no 'base'; give one of multi_turn, "):
        BFCL(category="base")


def first(category: str) -> Task:
    return load_tasks(category)[0]


@each(
    ("category", "calls", "error"),
    [
        ("simple_python", [Call(name="calculate_triangle_area", arguments={"base": 10, "height": 5})], None),
        (
            "simple_python",
            [Call(name="calculate_triangle_area", arguments={"base": 10, "height": 6})],
            "value_error:others",
        ),
        ("simple_python", [], "simple_function_checker:wrong_count"),
        ("irrelevance", [], None),
        ("irrelevance", [Call(name="determine_body_mass_index", arguments={})], "irrelevance_error"),
        ("live_relevance", [], "relevance_error"),
        ("live_relevance", [Call(name="", arguments={})], "relevance_error"),
    ],
)
def test_calls_of_a_single_turn_are_judged_together(category: str, calls: Sequence[Call], error: str | None) -> None:
    assert check_calls(first(category), calls) == error


def test_a_single_turn_is_one_message_whose_names_have_no_dots() -> None:
    env = begun("parallel_0")
    right = env.oracle()
    names = [call["function"]["name"] for call in right["tool_calls"]]
    assert names == ["spotify_play", "spotify_play"]
    replies, reward, is_over, _, info = env.step(right)
    assert (len(replies), reward, is_over, info["success"]) == (2, 1.0, True, True)
    half = {**right, "tool_calls": right["tool_calls"][:1]}
    assert begun("parallel_0").step(half)[1] == 0.0
    broken = {"role": "assistant", "tool_calls": [*right["tool_calls"], {"function": {"arguments": "{"}}]}
    assert begun("parallel_0").step(broken)[4]["success"] is False


def test_a_call_that_cannot_be_read_is_a_call_where_none_is_right() -> None:
    env = begun("irrelevance_0")
    ((reply,), reward, is_over, _, _) = env.step(
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}
    )
    assert reply["content"].startswith("Error: malformed")
    assert (reward, is_over) == (0.0, True)
