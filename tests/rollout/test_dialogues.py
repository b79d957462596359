"""Dialogues of a file, in OpenAI's form, are the demonstrations that an oracle would have played."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.chat import ChatMLRenderer, HistoryConfig
from agentrl.env import make_env
from agentrl.errors import ConfigError
from agentrl.rollout.demonstrations import Demonstration, demonstrate, read_dialogues
from agentrl.rollout.tasks import Tasks
from agentrl.types import Message
from agentrl_envs.calculator import Calculator
from tests.support.baselines import oracle, play
from tests.support.each import each
from tests.support.played import TOKENIZER

RENDERER = ChatMLRenderer(TOKENIZER)
USER = {"role": "user", "content": "Go."}
SAID = {"role": "assistant", "content": "Yes."}


def call(arguments: Any, **further: Any) -> Message:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}],
        **further,
    }


def read(file: Path, *lines: Any, tools: Any = (), max_tokens: int = 2000) -> list[Demonstration]:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return read_dialogues(file, RENDERER, tools=tools, view=HistoryConfig(), max_tokens=max_tokens)


def test_what_an_oracle_said_is_read_back_as_its_demonstration(tmp_path: Path) -> None:
    task = Tasks(seed=3).train(0)
    expected = demonstrate(Calculator, RENDERER, task=task, skill=1.0, max_turns=8, view=HistoryConfig())
    env = make_env("calculator").unwrapped
    assert isinstance(env, Calculator)
    messages = list(play(env, oracle, seed=task.seed, max_turns=8, rng=np.random.default_rng(0)).messages)
    for message in messages:
        for made in message.get("tool_calls", ()):
            made["function"]["arguments"] = json.dumps(made["function"]["arguments"])  # as OpenAI has it
        message["content"] = message["content"] or None
    (own,) = read(tmp_path / "a.jsonl", {"messages": messages, "tools": env.tools, "source": "somewhere"})
    (given,) = read(tmp_path / "b.jsonl", {"messages": messages}, tools=env.tools)
    assert own.turns == given.turns == expected.turns
    assert len(own.turns) == 3
    assert read(tmp_path / "c.jsonl", {"messages": messages, "tools": []})[0].turns != expected.turns


def test_each_turn_of_the_assistant_is_an_action_and_what_follows_the_last_is_left_out(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Is it "}, {"type": "text", "text": "so?"}]
    messages = [USER, SAID, {"role": "user", "content": parts}, call({}), {"role": "tool", "content": "x"}]
    ((first, second),) = (each.turns for each in read(tmp_path / "a.jsonl", {"messages": messages}))
    decoded = [TOKENIZER.decode(list(ids)) for ids in (first.action_ids, second.observation_ids, second.action_ids)]
    assert decoded[0] == "Yes.<|im_end|>"
    assert decoded[1] == "\n<|im_start|>user\nIs it so?<|im_end|>\n<|im_start|>assistant\n"
    assert decoded[2] == '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'


@each(
    ("line", "words"),
    [
        ({}, "give a list of messages with role and content"),
        ({"messages": []}, "messages is list []; give a list"),
        ({"messages": [USER]}, "the assistant speaks after someone else, at least once"),
        ({"messages": [SAID]}, "the assistant speaks after someone else"),
        ({"messages": [USER, SAID, SAID]}, "never twice in a row"),
        (
            {"messages": [USER, {"role": "bot", "content": "Yes."}]},
            "is no message; give role (system, user, assistant, tool)",
        ),
        ({"messages": [USER, {"role": "assistant"}]}, "is no message"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "is no message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAID]}, "give text"),
        ({"messages": [USER, {**SAID, "weight": 0}]}, "a message has the key 'weight', which is not read; remove it"),
        ({"messages": [USER, call("{")]}, "arguments of look are not valid JSON"),
        ({"messages": [USER, call([1])]}, "arguments of look must be a JSON object, got list"),
        ({"messages": [USER, SAID], "tools": [{"name": "look"}]}, "tools[0] is"),
        (
            {"messages": [{**USER, "content": "so " * 700}, SAID]},
            "more than rollout.max_context_tokens: 2000; raise that",
        ),
        ([], "it is list []"),
    ],
)
def test_a_line_that_is_no_dialogue_is_named(tmp_path: Path, line: Any, words: str) -> None:
    file = tmp_path / "a.jsonl"
    with pytest.raises(ValueError, match="line 2") as raised:
        read(file, {"messages": [USER, SAID, {**USER, "refusal": None}, SAID]}, line)
    assert words in str(raised.value)


def test_a_file_without_dialogues_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"warmup\.dialogues: .*a\.jsonl holds no dialogue"):
        read(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"warmup\.dialogues: there is no file"):
        read_dialogues(tmp_path / "no.jsonl", RENDERER, tools=(), view=HistoryConfig(), max_tokens=9)
