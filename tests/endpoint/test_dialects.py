"""Requests and answers of the three dialects."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.endpoint import chat, messages, responses
from agentrl.endpoint.call import Asked, Form, RefusalKind, RefusedError, Said, TokenLogprob, too_long, wire_message
from agentrl.endpoint.reading import Dialect
from agentrl.types import Message
from benchmarks.endpoint_matching import DIALECTS
from tests.support.each import each

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}
CALL = {"id": "call_3_0", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}


def read(dialect: Dialect, **body: Any) -> Asked:
    return dialect.read(json.dumps(body).encode())


def refusal(dialect: Dialect, **body: Any) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        read(dialect, **body)
    return caught.value


def test_chat_completions_are_read() -> None:
    asked = read(
        chat,
        model="m",
        messages=[
            {"role": "system", "content": "S"},
            {"role": "developer", "content": [{"type": "text", "text": "D"}, {"type": "text", "text": "E"}]},
            {"role": "user", "content": "U", "name": "Ann"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "T",
                "tool_calls": [{"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "R"}]},
        ],
        tools=[TOOL, {"type": "web_search"}],
        max_completion_tokens=7,
        stop="end",
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.5,
        tool_choice="required",
        parallel_tool_calls=True,
        seed=None,
        logit_bias={},
        metadata=[],
        user="",
        top_p=0,
    )
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
    assert asked.messages == (
        {"role": "system", "content": "S\n\nD\nE"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "reasoning_content": "T", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "look", "tool_call_id": "x", "content": "R"},
    )
    assert asked.tools == (TOOL,)
    assert (asked.max_tokens, asked.stop, asked.n, asked.model) == (7, ("end",), 2, "m")
    assert asked.ignored == {"temperature": "0.5", "top_p": "0", "tools": '["web_search"]', "tool_choice": '"required"'}
    assert asked.form == Form(stream=True, with_usage=True)


def test_responses_are_read() -> None:
    asked = read(
        responses,
        model="m",
        instructions="S",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
            {"role": "user", "content": "U"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "T"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
            {"type": "function_call", "call_id": "x", "name": "look", "namespace": "eyes", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "R"}]},
            {"type": "custom_tool_call", "call_id": "y", "name": "patch", "input": "***"},
            {"type": "custom_tool_call_output", "call_id": "y", "output": "done"},
        ],
        tools=[
            {"type": "function", **TOOL["function"]},  # type: ignore[dict-item]
            {"type": "namespace", "name": "eyes", "tools": [{"type": "function", "name": "look"}]},
            {"type": "custom", "name": "patch", "format": {"type": "text"}},
            {"type": "web_search"},
        ],
        max_output_tokens=9,
        store=False,
        tool_choice="none",
        previous_response_id="resp_3",
    )
    eyes = {"id": "x", "type": "function", "function": {"name": "eyes.look", "arguments": {}}}
    patch = {"id": "y", "type": "function", "function": {"name": "patch", "arguments": {"input": "***"}}}
    assert asked.messages == (
        {"role": "system", "content": "S\n\nD"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "reasoning_content": "T", "content": "A", "tool_calls": [eyes]},
        {"role": "tool", "name": "eyes.look", "tool_call_id": "x", "content": "R"},
        {"role": "assistant", "content": "", "tool_calls": [patch]},
        {"role": "tool", "name": "patch", "tool_call_id": "y", "content": "done"},
    )
    assert [tool["function"]["name"] for tool in asked.tools] == ["look", "eyes.look", "patch"]
    assert (asked.max_tokens, asked.calls_as_text, asked.previous) == (9, True, "resp_3")
    assert asked.ignored == {"store": "false", "tools": '["web_search"]'}
    assert (asked.form.custom_tools, asked.form.namespaces) == (frozenset({"patch"}), ("eyes",))
    assert read(responses, input="U").messages == ({"role": "user", "content": "U"},)


def test_messages_are_read() -> None:
    asked = read(
        messages,
        model="m",
        max_tokens=9,
        system=[{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Z"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "U"}, {"type": "text", "text": "V"}]},
            {"role": "system", "content": "Later."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "T", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "A"},
                    {"type": "tool_use", "id": "x", "name": "look", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "R"}]},
                    {"type": "text", "text": "W"},
                ],
            },
        ],
        tools=[
            {
                "name": "look",
                "description": "Look.",
                "input_schema": PARAMETERS,
                "cache_control": {"type": "ephemeral"},
            },
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        stop_sequences=["end"],
        thinking={"type": "adaptive"},
        tool_choice={"type": "any"},
    )
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
    assert asked.messages == (
        {"role": "system", "content": "S\nZ"},
        {"role": "user", "content": "U\nV"},
        {"role": "system", "content": "Later."},
        {"role": "assistant", "reasoning_content": "T", "content": "A", "tool_calls": [call]},
        {"role": "tool", "name": "look", "tool_call_id": "x", "content": "R"},
        {"role": "user", "content": "W"},
    )
    assert (asked.tools, asked.max_tokens, asked.stop) == ((TOOL,), 9, ("end",))
    assert asked.ignored == {
        "thinking": '{"type": "adaptive"}',
        "tools": '["web_search_20250305"]',
        "tool_choice": '"any"',
    }
    assert asked.form.with_thoughts
    assert not read(messages, messages=[{"role": "user", "content": "U"}]).form.with_thoughts


@each(
    ("dialect", "body", "param"),
    [
        (chat, {"messages": []}, "messages"),
        (chat, {}, "messages"),
        (chat, {"messages": [{"role": "king", "content": ""}]}, "messages.0.role"),
        (chat, {"messages": [{"role": "user", "content": "U"}], "n": 1000}, "n"),
        (chat, {"messages": [{"role": "user", "content": "U"}], "max_tokens": 0}, "max_tokens"),
        (chat, {"messages": [{"role": "user", "content": "U"}], "top_logprobs": 3}, "top_logprobs"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
        ),
        (responses, {"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        (responses, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        (responses, {"input": [{"role": "king", "content": ""}]}, "input.0"),
        (
            messages,
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content",
        ),
        (
            messages,
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "document"}]}]}]},
            "messages.0.content",
        ),
        (messages, {"messages": [{"role": "user", "content": "U"}], "stop_sequences": ["x"] * 99}, "stop_sequences"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_with_its_field(
    dialect: Dialect, body: dict[str, Any], param: str
) -> None:
    refused = refusal(dialect, **body)
    assert (refused.kind, refused.param) == (RefusalKind.INVALID, param)
    assert refused.message.startswith(param)
    assert refused.message in json.dumps(dialect.error(refused))


@each("body", [b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b'"\\ud800"', b"[" * 5000, b"9" * 5000])
def test_a_body_that_is_no_object_of_json_is_refused(body: bytes) -> None:
    for dialect in DIALECTS.values():
        with pytest.raises(RefusedError):
            dialect.read(body)


def test_a_schema_that_nests_too_deep_is_refused_and_arguments_that_do_are_text() -> None:
    deep: dict[str, Any] = {}
    for _ in range(50):
        deep = {"properties": deep}
    said = [{"role": "user", "content": "U"}]
    assert refusal(chat, messages=said, tools=[{"function": {"name": "f", "parameters": deep}}]).param == "tools"
    call = {"id": "x", "function": {"name": "f", "arguments": json.dumps(deep)}}
    (message,) = read(chat, messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert message["tool_calls"][0]["function"]["arguments"] == json.dumps(deep)


def said(message: Message, **more: Any) -> Said:
    numbers = {"number": 3, "prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 6, "created": 9}
    return Said(message=message, **(numbers | more))


CALLS = {"role": "assistant", "reasoning_content": "T", "content": "A", "tool_calls": [CALL]}
TEXT = {"role": "assistant", "content": "A"}
ANSWERS = [said(CALLS), said(TEXT), said(TEXT, is_cut=True), said({"role": "assistant", "content": ""})]
FORM = Form(stream=True, with_usage=True)


def test_answers_of_chat_completions() -> None:
    asked = Asked(messages=(), model="m", form=FORM, n=2)
    logprobs = (TokenLogprob(text="A", logprob=-0.5),)
    body = chat.write(asked, [said(CALLS), said(TEXT, number=4, is_cut=True, logprobs=logprobs)])
    one, two = body["choices"]
    function = {"name": "look", "arguments": '{"a": 1}'}
    assert one["message"] == {
        "role": "assistant",
        "content": "A",
        "refusal": None,
        "reasoning_content": "T",
        "tool_calls": [{"id": "call_3_0", "type": "function", "function": function}],
    }
    assert [one["finish_reason"], two["finish_reason"]] == ["tool_calls", "length"]
    assert two["logprobs"]["content"] == [{"token": "A", "logprob": -0.5, "bytes": [65], "top_logprobs": []}]
    assert (body["id"], body["model"], body["created"]) == ("chatcmpl-3", "m", 9)
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["total_tokens"] == 18


def test_answers_of_messages() -> None:
    asked = Asked(messages=(), model="m")
    body = messages.write(asked, [said(CALLS)])
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use"]
    assert body["content"][2] == {"type": "tool_use", "id": "call_3_0", "name": "look", "input": {"a": 1}}
    assert (body["id"], body["stop_reason"], body["usage"]["input_tokens"]) == ("msg_3", "tool_use", 4)
    assert body["usage"]["cache_read_input_tokens"] == 6
    assert messages.write(asked, [said(TEXT, stopped_by="end")])["stop_sequence"] == "end"
    assert messages.write(asked, [said(TEXT, is_cut=True)])["stop_reason"] == "max_tokens"
    silent = Asked(messages=(), form=Form(with_thoughts=False))
    assert [block["type"] for block in messages.write(silent, [said(CALLS)])["content"]] == ["text", "tool_use"]


def test_answers_of_responses() -> None:
    echo = {"instructions": "S"}
    form = Form(custom_tools=frozenset({"patch"}), namespaces=("eyes",), echo=echo)
    asked = Asked(messages=(), model="m", form=form)
    functions = [{"name": "eyes.look", "arguments": {"a": 1}}, {"name": "patch", "arguments": {"input": "***"}}]
    calls = [{"id": f"call_3_{i}", "type": "function", "function": function} for i, function in enumerate(functions)]
    body = responses.write(asked, [said({**CALLS, "tool_calls": calls})])
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "custom_tool_call"]
    look, patch = body["output"][2:]
    assert (look["name"], look["namespace"], look["arguments"]) == ("look", "eyes", '{"a": 1}')
    assert (patch["name"], patch["input"], patch["call_id"]) == ("patch", "***", "call_3_1")
    assert (body["id"], body["status"], body["instructions"]) == ("resp_3", "completed", "S")
    cut = responses.write(asked, [said(TEXT, is_cut=True)])
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def data_of(events: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for event in events:
        assert event.endswith("\n\n")
        assert event.count("\n") == 2 + event.startswith("event: ")
        data = event.strip().rpartition("data: ")[2]
        found += [] if data == "[DONE]" else [json.loads(data)]
    return found


@each("answer", ANSWERS)
def test_events_of_chat_completions_make_the_same_answer(answer: Said) -> None:
    asked = Asked(messages=(), form=FORM)
    *chunks, usage = data_of(list(chat.events(asked, [answer])))
    whole = chat.write(asked, [answer])
    (choice,) = whole["choices"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == (choice["message"]["content"] or "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [{key: call[key] for key in call if key != "index"} for call in calls] == choice["message"].get(
        "tool_calls", []
    )
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == choice["finish_reason"]
    assert usage["usage"] == whole["usage"]
    assert usage["choices"] == []


@each("answer", ANSWERS)
def test_events_of_responses_make_the_same_answer(answer: Said) -> None:
    asked = Asked(messages=())
    events = data_of(list(responses.events(asked, [answer])))
    whole = responses.write(asked, [answer])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
    assert events[-1]["response"] == whole
    assert events[-1]["type"] == f"response.{whole['status']}"
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert deltas == answer.message["content"]


@each("answer", ANSWERS)
def test_events_of_messages_make_the_same_answer(answer: Said) -> None:
    asked = Asked(messages=())
    events = data_of(list(messages.events(asked, [answer])))
    whole = messages.write(asked, [answer])
    blocks: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"])
            case "content_block_delta":
                ((field, added),) = [(key, value) for key, value in event["delta"].items() if key != "type"]
                if field == "partial_json":
                    blocks[event["index"]]["input"] = json.loads(added)
                else:
                    blocks[event["index"]][field] += added
    assert blocks == whole["content"]
    assert events[0]["message"]["id"] == whole["id"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert events[-1]["type"] == "message_stop"


def test_a_prompt_that_is_too_long_is_refused_in_the_words_on_which_clients_compact() -> None:
    refused = too_long(num_tokens=9000, max_tokens=8192)
    assert refused.kind.status == 400
    for dialect in (chat, responses):
        assert dialect.error(refused)["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 8192 tokens" in dialect.error(refused)["error"]["message"]
    assert messages.error(refused)["error"]["type"] == "invalid_request_error"
    assert messages.error(refused)["error"]["message"].startswith("prompt is too long: 9000 tokens > 8192 maximum")
    (failed,) = data_of(list(responses.error_events(Asked(messages=()), refused)))
    assert (failed["type"], failed["response"]["error"]["code"]) == ("response.failed", "context_length_exceeded")


def test_no_refusal_has_a_status_that_clients_retry() -> None:
    retried = {408, 409, 429}
    assert all(kind.status < 500 and kind.status not in retried for kind in RefusalKind)
    for dialect in DIALECTS.values():
        assert all(dialect.error(RefusedError(kind, "no"))["error"]["message"] == "no" for kind in RefusalKind)


def test_calls_may_be_shown_as_text() -> None:
    message = {"role": "assistant", "content": "A", "tool_calls": [CALL]}
    assert wire_message(message, number=0, calls_as_text="A<call>") == {"role": "assistant", "content": "A<call>"}
    assert wire_message(TEXT, number=0, calls_as_text="A") == TEXT


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = ["role", "content", "type", "text", "tool_calls", "name", "input", "output", "function", "arguments", "tools"]
near = st.recursive(
    json_values | st.sampled_from(["user", "assistant", "tool", "message", "text", "tool_use", "function", "custom"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=40, deadline=None)
@given(items=st.lists(st.dictionaries(st.sampled_from(KEYS), near, max_size=5) | near, max_size=3), tools=near)
def test_whatever_comes_is_read_or_refused(items: list[Any], tools: Any) -> None:
    for dialect in DIALECTS.values():
        body = {"messages": items, "input": items, "tools": tools, "system": tools, "stop": tools}
        try:
            asked = dialect.read(json.dumps(body).encode())
        except RefusedError as refused:
            assert json.loads(json.dumps(dialect.error(refused)))["error"]["message"]  # noqa: PT017
        else:
            assert all(isinstance(message["content"], str) for message in asked.messages)
