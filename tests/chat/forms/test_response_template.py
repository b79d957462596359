"""A tokenizer's own `response_template` obeys the same rules, whatever transformers does with a text."""

import random
import time
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.types import Message
from tests.support.hostile_forms import FAMILIES, TOOLS, faults, outputs
from tests.support.response_templates import FORMS

EACH = pytest.mark.parametrize("name", FORMS)


def functions(message: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", [])]


def call(name: str, arguments: dict[str, Any]) -> str:
    return FAMILIES[name].write([("look", arguments)])


@EACH
def test_calls_are_read_with_the_types_that_they_have(name: str) -> None:
    arguments = {"n": 7, "what": "7", "flag": False}
    message = FORMS[name].parse(f"Well. {call(name, arguments)}", TOOLS, is_thinking=False)
    assert repr(functions(message)) == repr([{"name": "look", "arguments": arguments}])
    assert (message["content"], message["tool_calls"][0]["id"]) == ("Well.", "call_0")


@pytest.mark.parametrize("name", ["hermes", "qwen-xml"])
def test_thoughts_are_told_apart_and_nothing_in_them_is_carried_out(name: str) -> None:
    form, drafted = FORMS[name], call(name, {"n": 1})
    for text, is_thinking in ((f"Maybe {drafted}", True), (f"Maybe {drafted}</think>Hello.", True)):
        content = "Hello." if "Hello." in text else ""
        expected = {"role": "assistant", "reasoning_content": f"Maybe {drafted}", "content": content}
        assert form.parse(text, TOOLS, is_thinking=is_thinking) == expected
    (found,) = functions(form.parse(f"Maybe {drafted}</think>{call(name, {'n': 2})}", TOOLS, is_thinking=True))
    assert found["arguments"] == {"n": 2}
    assert "reasoning_content" in FORMS["hermes"].parse(f"<think>{drafted}", TOOLS, is_thinking=False)


@EACH
def test_a_call_that_is_cut_is_malformed_and_written_again_as_it_was_sampled(name: str) -> None:
    text = call(name, {"what": "key", "n": 12})
    for length in range(len(text)):
        message = FORMS[name].parse(f"Well. {text[:length]}", TOOLS, is_thinking=False)
        for found in functions(message):
            assert found["name"] == "" or found["arguments"] == {"what": "key", "n": 12}
            if not found["name"]:
                again = FORMS[name].parse(FORMS[name].write_malformed(found["arguments"]), TOOLS, is_thinking=False)
                assert functions(again) == [found]


@EACH
def test_what_no_file_can_carry_is_no_argument(name: str) -> None:
    for value in ("NaN", "1e999", "7" * 400, "7" * 5000, "[" * 90 + "]" * 90, "[" * 9000):
        text = call(name, {"items": [9876]}).replace("9876", value)
        (found,) = functions(FORMS[name].parse(text, TOOLS, is_thinking=False))
        assert found["name"] == "" or isinstance(found["arguments"]["items"], str), value[:10]


@EACH
@given(seed=st.integers(0, 2**32))
def test_any_output_is_a_message_with_no_call_that_was_not_written(name: str, seed: int) -> None:
    for text in islice(outputs(FAMILIES[name], random.Random(seed)), 6):
        for is_thinking in (False, True):
            message = FORMS[name].parse(text, TOOLS, is_thinking=is_thinking)
            wrong = [fault for fault in faults(message, text, FAMILIES[name]) if fault != "a call of nothing"]
            assert not wrong


@EACH
def test_a_text_too_long_for_transformers_takes_a_few_seconds(name: str) -> None:
    begin = time.process_time()
    for piece in (*FAMILIES[name].pieces, call(name, {"n": 1}), "text "):
        FORMS[name].parse(piece * (10**6 // len(piece)), TOOLS, is_thinking=False)
    assert time.process_time() - begin < 60
    thought = f"{'hm ' * 10**5}</think>{call(name, {'n': 1})}"
    if name != "llama-json":
        assert functions(FORMS[name].parse(thought, TOOLS, is_thinking=True)) == [
            {"name": "look", "arguments": {"n": 1}}
        ]
