"""What holds for every form: nothing is raised, nothing invented, and arguments keep their types."""

import json
import random
import time
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat.forms import FORMS
from agentrl.chat.forms.form import CallForm
from agentrl.data.plain import MAX_DEPTH
from agentrl.types import Message
from tests.support.hostile_forms import FAMILIES, TOOLS, Functions, faults, outputs
from tests.support.rules import Rules

EACH = pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
LISTS = ("lfm", "lfm-raw", "minimax", "mistral", "llama-json", "pythonic")
"""Forms in which all calls of a turn are one list, which is malformed as a whole."""
TEXT = ("qwen-xml", "glm", "minimax", "atem")
"""Forms whose arguments are only text."""
CALLS: Functions = [("look", {"n": 1, "flag": False}), ("take_it", {"what": "it's", "items": [1, "a"]}), ("look", {})]
rule = Rules[CallForm]()


def parse(form: CallForm, text: str, *, is_thinking: bool = False) -> Message:
    message = form.parse(text, TOOLS, is_thinking=is_thinking)
    assert not list(faults(message, text, FAMILIES[form.name]))
    return message


def functions(message: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", [])]


def write(form: CallForm, *calls: tuple[str, dict[str, Any]]) -> str:
    return FAMILIES[form.name].write(calls)


def as_dicts(calls: Functions) -> list[dict[str, Any]]:
    return [{"name": name, "arguments": arguments} for name, arguments in calls]


@rule
def calls_are_read_as_they_were_written(form: CallForm) -> None:
    message = parse(form, FAMILIES[form.name].write(CALLS))
    assert functions(message) == as_dicts(CALLS)
    assert (message["role"], message["content"]) == ("assistant", "")
    assert [call["id"] for call in message["tool_calls"]] == ["call_0", "call_1", "call_2"]


@rule
def text_is_content(form: CallForm) -> None:
    for text in ("", "Hello.", 'Say {"name": "look"} or [look].', "a < b, [1, 2] and {3}"):
        assert parse(form, f" {text}\n") == {"role": "assistant", "content": text}


@rule
def what_is_drafted_in_a_thought_is_not_carried_out(form: CallForm) -> None:
    begin, end = FAMILIES[form.name].think
    drafted, real = write(form, ("look", {"n": 1})), write(form, ("take_it", {"what": "key"}))
    if form.name in ("harmony", "atem"):
        drafted = drafted.partition("<|message|>")[2]  # a message of its own is no draft
    for text, is_thinking in ((f"{begin}Maybe {drafted}", False), (f"Maybe {drafted}", True)):
        message = parse(form, text, is_thinking=is_thinking)
        assert (functions(message), message["content"]) == ([], "")
        assert message["reasoning_content"] == f"Maybe {drafted}".strip()
        message = parse(form, f"{text}{end}{real}", is_thinking=is_thinking)
        assert functions(message) == [{"name": "take_it", "arguments": {"what": "key"}}]
        assert message["reasoning_content"] == f"Maybe {drafted}".strip()


@rule
def a_tag_of_thoughts_within_an_argument_is_part_of_it(form: CallForm) -> None:
    for text in ("a</think>b", "<think>", "</think>"):
        call = ("take_it", {"what": text})
        message = parse(form, write(form, call))
        assert functions(message) == as_dicts([call])
        assert "reasoning_content" not in message


@rule
def a_call_that_is_cut_is_never_a_call_with_other_arguments(form: CallForm) -> None:
    call = ("take_it", {"what": "some key", "n": 12345, "flag": True})
    text = write(form, call)
    for length in range(len(text)):
        for found in functions(parse(form, text[:length])):
            assert found["name"] == "" or found == as_dicts([call])[0], text[:length]


@rule
def a_call_that_is_cut_leaves_the_one_before_it(form: CallForm) -> None:
    if form.name in LISTS:
        return
    calls: Functions = [("look", {"n": 1}), ("take_it", {"what": "key"})]
    found = functions(parse(form, FAMILIES[form.name].write(calls)[:-30]))
    assert found[0] == as_dicts(calls)[0]


def bodies(form: CallForm) -> list[str]:
    """Return calls whose `n` or `what` is something that no call may hold."""
    number, text = write(form, ("look", {"x": 123})), write(form, ("take_it", {"what": "wxyz", "items": [9876]}))
    values = ("NaN", "Infinity", "-Infinity", "1e999", "7" * 400, "7" * 5000, "[" * 90 + "]" * 90, "[" * 9000)
    return [
        *(number.replace("123", value) for value in values if form.name not in TEXT or value[0] != "["),
        *(text.replace("9876", value) for value in values),
    ]


@rule
def what_no_file_can_carry_is_a_malformed_call(form: CallForm) -> None:
    for text in bodies(form):
        found = functions(parse(form, text))
        assert [f["name"] for f in found] == [""] or (
            form.name in TEXT and isinstance(found[0]["arguments"]["items"], str)
        )


@rule
def half_a_surrogate_pair_is_no_argument(form: CallForm) -> None:
    for half in ("\ud800", "\\ud800"):
        message = parse(form, write(form, ("take_it", {"what": "wxyz"})).replace("wxyz", half))
        json.dumps(message, ensure_ascii=False).encode()  # and `parse` has seen that it is plain data


@rule
def a_malformed_call_is_written_again_as_it_was_sampled(form: CallForm) -> None:
    text = write(form, ("take_it", {"what": "wxyz", "n": 7}))
    broken = [text.replace("n", "n\n<", 1), text[: text.index("wxyz")], text.replace("wxyz", 'w"\'<|"|>')]
    for sampled in broken:
        for found in functions(parse(form, sampled)):
            if not found["name"]:
                again = parse(form, form.write_malformed(found["arguments"]))
                assert (functions(again), again["content"]) == ([found], "")


@rule
def text_gets_the_types_of_the_schema(form: CallForm) -> None:
    if form.name not in TEXT:
        return
    texts = {"n": "7", "x": "0.5", "what": "7", "flag": "true", "maybe": "null", "items": "[1]", "table": '{"a": null}'}
    typed = {"n": 7, "x": 0.5, "what": "7", "flag": True, "maybe": None, "items": [1], "table": {"a": None}}
    (found,) = functions(parse(form, write(form, ("look", texts))))
    assert repr(found["arguments"]) == repr(typed)
    other = {"n": "many", "flag": "7", "items": "{}", "maybe": "[]", "unknown": "7"}
    assert functions(parse(form, write(form, ("look", other))))[0]["arguments"] == other
    assert functions(parse(form, write(form, ("nobody", texts))))[0]["arguments"] == texts


@rule
def parsing_takes_time_in_proportion_to_the_text(form: CallForm) -> None:
    family = FAMILIES[form.name]
    call = write(form, ("take_it", {"what": "x"}))
    half = call[: call.index("x")]
    beginnings = ("", half, write(form, ("look", {})), family.think[0])
    pieces = (
        *family.pieces,
        half,
        call,
        call[::-1],
        f"{half}{family.pieces[-1]}",
        " ",
        "\\",
        '"',
        "[",
        "{",
        "',",
        '\\"',
    )
    begin = time.process_time()
    for beginning in beginnings:
        for piece in pieces:
            form.parse(beginning + piece * (60_000 // len(piece)), TOOLS, is_thinking=False)
    assert time.process_time() - begin < 30  # takes a few; quadratic: minutes


@rule
def arguments_nest_as_deep_as_an_environment_may_quote_them(form: CallForm) -> None:
    def nested(depth: int) -> Any:
        return [nested(depth - 1)] if depth else 1

    for depth in (1, 10, MAX_DEPTH // 2 - 2):
        call = ("look", {"items": nested(depth)})
        assert functions(parse(form, write(form, call))) == as_dicts([call])
    assert functions(parse(form, write(form, ("look", {"items": nested(MAX_DEPTH // 2 - 1)}))))[0]["name"] == ""


@EACH
def test_a_form_keeps_to_the_rules(form: CallForm, subtests: pytest.Subtests) -> None:
    rule.check(form, subtests)


@EACH
@given(seed=st.integers(0, 2**32))
def test_any_output_is_a_message_with_no_call_that_was_not_written(form: CallForm, seed: int) -> None:
    for text in islice(outputs(FAMILIES[form.name], random.Random(seed)), 6):
        parse(form, text)
        thought = parse(form, text, is_thinking=True)
        assert FAMILIES[form.name].end_thought in text or not functions(thought)


@EACH
@given(text=st.text(st.characters(), max_size=60), is_thinking=st.booleans())
def test_any_text_is_a_message(form: CallForm, text: str, is_thinking: bool) -> None:
    parse(form, text, is_thinking=is_thinking)
