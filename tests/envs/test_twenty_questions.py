from typing import Any

import numpy as np
import pytest

from agentrl.env import tool_call
from agentrl.errors import UserError
from agentrl_envs.twenty_questions import TwentyQuestions, all_things


def thinking_of(name: str, **options: Any) -> TwentyQuestions:
    env = TwentyQuestions(**options)
    env.reset(seed=0)
    env.thing = all_things().names.index(name)
    return env


def said(env: TwentyQuestions, action: Any) -> tuple[str, float, bool]:
    observation, reward, terminated, _, _ = env.step(action)
    return observation[0]["content"], float(reward), terminated


def test_no_two_things_are_alike_and_no_name_is_an_attribute() -> None:
    names, attributes, holds = all_things()
    assert (len(names), len(attributes)) == (248, 58)
    assert len(np.unique(holds, axis=0)) == len(names)
    assert not set(names) & set(attributes)
    assert holds.sum(axis=0).min() >= 4


def test_questions_are_answered_from_the_table_and_pay_by_what_they_leave() -> None:
    env = thinking_of("penguin")
    birds = all_things().holds_WZ[:, all_things().attributes.index("bird")].sum()
    text, reward, _ = said(env, tool_call("ask", attribute="Bird"))
    assert text == "Yes. 19 left."
    assert reward == pytest.approx(0.5 * np.log2(248 / birds) / np.log2(248))
    assert said(env, tool_call("ask", attribute="bird")) == ("Yes. 18 left.", 0, False)
    assert said(env, tool_call("ask", attribute="wings")) == ("Ask about one of the attributes that I named.", 0, False)
    assert said(env, tool_call("guess", thing="dodo")) == ("I do not know this thing.", 0, False)
    text, reward, _ = said(env, tool_call("guess", thing="swan"))
    assert text == "No. 17 left."
    assert reward == pytest.approx(0.5 * np.log2(birds / (birds - 1)) / np.log2(248))
    assert env.state_key() == "penguin/bird,bird,swan"
    text, reward, terminated = said(env, tool_call("guess", thing="penguin"))
    assert (text, terminated) == ("Yes, that is it!", True)
    assert reward == pytest.approx(1 + 0.5 * np.log2(birds - 1) / np.log2(248))


def test_in_words_a_thing_is_a_guess_and_an_attribute_a_question() -> None:
    env = thinking_of("wine glass", text=True)
    assert env.tools == []
    assert said(env, "Is it made of GLASS?")[0] == "Yes. 19 left."
    assert env.asked == ["glass"]
    assert said(env, "Is it a polar bear?")[0] == "No. 18 left."
    assert env.asked == ["glass", "polar bear"]
    assert said(env, "Hm.")[0] == "Ask about one of the attributes that I named, or guess a thing."
    assert said(env, "A wine glass!")[2]
    assert said(thinking_of("cat"), "Is it a cat?")[0] == "Use ask or guess."


def test_the_last_question_ends_the_task() -> None:
    env = thinking_of("cat", num_questions=1)
    assert said(env, tool_call("ask", attribute="bird"))[0] == "No. It was: cat."
    assert thinking_of("cat", num_questions=1).step(tool_call("guess", thing="cat"))[4]["success"]


def test_things_of_training_and_evaluation_never_meet() -> None:
    env, seen = TwentyQuestions(num_things=40), []
    for split in ("train", "eval"):
        for index in range(env.num_tasks(split)):
            env.reset(seed=0, options={"split": split, "task_index": index})
            seen.append(env.gold_answer())
    assert sorted(seen) == sorted(all_things().names[:40])
    trained = set(seen[: env.num_tasks("train")])
    for seed in range(50):
        env.reset(seed=seed, options={"split": "eval"})
        assert env.gold_answer() not in trained


def test_the_oracle_finds_every_thing_in_far_fewer() -> None:
    env, lengths = TwentyQuestions(), []
    for thing in range(248):
        env.reset(seed=0)
        env.thing = thing
        while not (end := env.step(env.oracle()))[2]:
            pass
        assert end[4]["success"]
        lengths.append(len(env.asked))
    assert max(lengths) <= 14


def test_few_things_are_named() -> None:
    named = TwentyQuestions(num_things=10).reset(seed=0)[0][0]["content"]
    assert all(name in named for name in all_things().names[:10])


def test_too_many_things_are_refused() -> None:
    with pytest.raises(UserError, match="num_things: give a whole number from 10 to 248, got 249"):
        TwentyQuestions(num_things=249)
