import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat import format_tool_call, parse_assistant
from tests.support.each import each

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def functions(text: str) -> list[dict[str, Any]]:
    return [call["function"] for call in parse_assistant(text).get("tool_calls", [])]


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.slow
@given(st.text(st.characters(codec="utf-8"), min_size=1), st.dictionaries(st.text(max_size=5), VALUES, max_size=3))
def test_every_call_is_read_as_it_was_written(name: str, arguments: dict[str, Any]) -> None:
    assert functions(format_tool_call(name, arguments)) == [{"name": name, "arguments": arguments}]


@each("tag", ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>"])
def test_tags_in_arguments_end_nothing(tag: str) -> None:
    written = f"Now {format_tool_call('write', {'text': f'a{tag}b'})}{format_tool_call('look', {})}"
    message = parse_assistant(written)
    assert [c["function"] for c in message["tool_calls"]] == [
        {"name": "write", "arguments": {"text": f"a{tag}b"}},
        {"name": "look", "arguments": {}},
    ]
    assert message["content"] == "Now"


@given(st.text())
def test_any_text_becomes_a_message_that_can_be_written_down(text: str) -> None:
    for sampled in (text, call(text), f"<tool_call>{text}", f"{text}</think>{text}"):
        message = parse_assistant(sampled)
        assert message["role"] == "assistant"
        assert message == json.loads(json.dumps(message))


@each(
    "body",
    [
        "",
        "{",
        "look(1)",
        "[1]",
        '{"arguments": {}}',
        '{"name": 3}',
        '{"name": ""}',
        '{"name": "a", "arguments": {}} more',
        '{"name": "a", "arguments": ' + "7" * 5000 + "}",
        '{"name": "a", "arguments": ' + "[" * 9000 + "}",
        '{"name": "a", "arguments": NaN}',
        '{"name": "a", "arguments": 1e999}',
        '{"name": "a", "arguments": {"text": "\\ud800"}}',
        '{"name": "a", "arguments": {"n": ' + "7" * 400 + "}}",
        '{"name": "a", "arguments": ' + "[" * 300 + "]" * 300 + "}",
        '<tool_call>{"name": "a"}',
    ],
)
def test_a_malformed_call_is_data_and_is_written_again_as_it_was_sampled(body: str) -> None:
    malformed = {"name": "", "arguments": body}
    assert functions(call(body)) == [malformed]
    assert functions(f"<tool_call>{body}") == [malformed]
    assert functions(format_tool_call("", body)) == [malformed]


def test_a_call_that_was_not_closed_but_is_whole_is_a_call() -> None:
    assert functions('<tool_call>{"name": "a"}') == [{"name": "a", "arguments": {}}]


def test_text_around_calls_is_content_and_calls_are_numbered() -> None:
    message = parse_assistant(f" First {call('{}')} then\n{call('x')}")
    assert message["content"] == "First  then"
    assert [c["id"] for c in message["tool_calls"]] == ["call_0", "call_1"]


@each("tag", ["<tool_call>", "</tool_call>", "<think>", "</think>"])
def test_a_call_may_hold_tags_that_are_not_escaped(tag: str) -> None:
    arguments = {"text": f"a{tag}b"}
    written = json.dumps({"name": "write", "arguments": arguments})
    message = parse_assistant(f"<think>hm</think>Now {call(written)}{call('{')}")
    assert (message["reasoning_content"], message["content"]) == ("hm", "Now")
    found = [c["function"] for c in message["tool_calls"]]
    assert found == [{"name": "write", "arguments": arguments}, {"name": "", "arguments": "{"}]
    assert functions(f"<tool_call>{written}") == functions(call(written)) == found[:1]


@each(
    ("text", "reasoning", "content"),
    [
        (f"<think>I could {call('{}')}", f"I could {call('{}')}", ""),
        (f"Well. <think>I could {call('{}')}", f"I could {call('{}')}", "Well."),
        (f"<think>I could {call('{}')}</think>No.", f"I could {call('{}')}", "No."),
        ("<think>one</think>two<think>three</think>four", "one\nthree", "twofour"),
        ("one</think>two</think>three", "one", "two</think>three"),
        ("<think>\n\n</think>\n\nYes.", None, "Yes."),
        ("<think>", None, ""),
    ],
)
def test_what_is_drafted_in_a_thought_is_not_carried_out(text: str, reasoning: str | None, content: str) -> None:
    expected = {"role": "assistant", "content": content}
    assert parse_assistant(text) == (expected if reasoning is None else expected | {"reasoning_content": reasoning})


def test_after_a_prompt_that_begins_a_thought_everything_is_thought_up_to_its_end() -> None:
    drafted = f"I could {call('{}')}"
    for text in (drafted, f"\n<think>{drafted}"):
        expected = {"role": "assistant", "reasoning_content": drafted, "content": ""}
        assert parse_assistant(text, is_thinking=True) == expected
        assert parse_assistant(f"{text}</think> No.", is_thinking=True) == expected | {"content": "No."}


@each("text", ["<think>\nhm\n</think>\n\nyes", "hm</think>yes", " <think>hm</think> yes "])
def test_text_up_to_the_end_of_thinking_is_reasoning(text: str) -> None:
    assert parse_assistant(text) == {"role": "assistant", "reasoning_content": "hm", "content": "yes"}


def test_parsing_takes_time_in_proportion_to_the_text() -> None:
    tags = ("<think>", "<tool_call>", "\n<think>\n", "<think></think>", "</think>", "<tool_call>[")
    bodies = ("[", '"', '\\"', '["', '["</tool_call>"')
    begin = time.process_time()
    for piece in (" " * 20, *tags, *map(call, bodies)):
        parse_assistant(piece * 30_000)
    assert time.process_time() - begin < 20  # takes one or two; quadratic: minutes
