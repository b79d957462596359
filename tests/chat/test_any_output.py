"""Whatever a model samples, `parse` makes an assistant message of it that every file can hold."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat import AutoConfig, parse_assistant, train_tokenizer
from agentrl.data.plain import MAX_DEPTH, plain_data
from tests.support.templates import PROMPTS_THOUGHT, QWEN, THINKS, THOUGHT, changed, tokenizer

WORDS = ["user\nassistant\ntool\n", '<think>\n</think>\n{"name": "look", "arguments": {"n": 1}}']
TOKENIZERS = {
    "chatml": train_tokenizer(WORDS, vocab_size=300),
    "template": tokenizer(QWEN),
    "drops thoughts": tokenizer(changed(THINKS, THOUGHT)),
    "begins a thought": tokenizer(changed(THINKS, THOUGHT, PROMPTS_THOUGHT)),
}
RENDERERS = {name: AutoConfig().build(tokenizer) for name, tokenizer in TOKENIZERS.items()}
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "<|im_start|>", "<tool_", "call>", "</")
JSON = (
    '{"name": "look", "arguments": ',
    '{"n": 1}',
    '{"name": "',
    '"',
    "\\",
    "\\ud800",
    "\\u0000",
    "}",
    "[",
    "]",
    "NaN",
)
NUMBERS = ("1e999", "-0", "7" * 400, "9" * 5000)
DEEP = st.integers(1, 400).map(lambda n: "[" * n + "]" * n) | st.integers(1, 400).map(lambda n: '{"a":' * n)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.builds(
    lambda name, arguments: f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>",
    st.text(max_size=3),
    VALUES,
)
PIECES = st.sampled_from((*TAGS, *JSON, *NUMBERS)) | CALLS | DEEP | st.text(st.characters(), max_size=5)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def depth(value: Any) -> int:
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + max(map(depth, members), default=0)


def check_message(message: Any) -> None:
    assert set(message) <= {"role", "content", "reasoning_content", "tool_calls"}
    assert message["role"] == "assistant"
    assert isinstance(message["content"], str)
    assert message.get("reasoning_content", "some")
    for number, call in enumerate(message.get("tool_calls", ())):
        assert (call["id"], call["type"], set(call)) == (f"call_{number}", "function", {"id", "type", "function"})
        assert set(call["function"]) == {"name", "arguments"}
        assert call["function"]["name"] or isinstance(call["function"]["arguments"], str)
    assert depth(message) <= MAX_DEPTH
    assert plain_data(message) == message
    assert json.loads(json.dumps(message, ensure_ascii=False, allow_nan=False).encode()) == message


def is_regular(message: Any) -> bool:
    """Tell whether a message can be written so that it is read again: no tag in its text, no call that is none."""
    texts = [message["content"], message.get("reasoning_content", "")]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return all(_is_regular(**call) for call in calls) and not any(
        tag in text for tag in (*TAGS, "<|endoftext|>") for text in texts
    )


def _is_regular(name: str, arguments: Any) -> bool:
    """Templates write names as they are, and arguments that are no object as text."""
    return bool(name) and json.dumps(name, ensure_ascii=False) == f'"{name}"' and isinstance(arguments, dict)


@pytest.mark.parametrize("is_thinking", [False, True])
@given(text=TEXTS)
def test_any_text_becomes_plain_data_of_bounded_depth(is_thinking: bool, text: str) -> None:
    check_message(parse_assistant(text, is_thinking=is_thinking))


@pytest.mark.parametrize("name", RENDERERS)
@given(output=TEXTS | st.lists(st.integers(0, 400) | st.integers(0, 5), max_size=30), is_closed=st.booleans())
def test_any_tokens_become_a_message_that_is_read_again_as_it_was_written(
    name: str, output: str | list[int], is_closed: bool
) -> None:
    renderer, encode = RENDERERS[name], TOKENIZERS[name].encode
    ids = (
        encode(output.encode(errors="replace").decode(), add_special_tokens=False)
        if isinstance(output, str)
        else output
    )
    message = renderer.parse([*ids, *renderer.stop_token_ids[:is_closed]])
    check_message(message)
    if is_regular(message):
        assert renderer.parse(renderer.encode(message)) == message
    renderer.start([{"role": "user", "content": "Hello."}, message, {"role": "tool", "content": "no"}], [])
