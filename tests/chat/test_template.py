import copy
import re
from typing import Any

import pytest

from agentrl.chat import AutoConfig, ChatMLConfig, TemplateConfig, TemplateRenderer
from agentrl.errors import RendererError
from agentrl.testing import check_renderer
from tests.support.templates import PROMPTS_THOUGHT, QWEN, THINKS, THOUGHT, changed, tokenizer

USER = {"role": "user", "content": "Hello."}
END = 2
RESTART = TemplateConfig(rewritten_history="restart")


def test_a_qwen_like_template_extends_as_it_would_render_the_whole() -> None:
    made = tokenizer(QWEN)
    renderer = AutoConfig().build(made)
    assert isinstance(renderer, TemplateRenderer)
    assert renderer.stop_token_ids == (END,)
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "a", "arguments": {"n": 1}}}]}
    reply = {"role": "tool", "content": "empty"}
    start, action = renderer.start([USER], []), renderer.encode(message)
    assert renderer.parse(action)["tool_calls"][0]["function"] == {"name": "a", "arguments": {"n": 1}}
    added = renderer.extend(start, action, [reply])
    assert added is not None
    assert start + action + added == renderer.start([USER, message, reply], [])
    assert renderer.extend(start, action[:-1], [reply]) == (END, *added)


def test_the_end_of_sequence_stops_a_turn_that_another_token_closes() -> None:
    made = tokenizer(QWEN)
    made.eos_token = "<|endoftext|>"
    renderer = TemplateRenderer(made)
    assert renderer.stop_token_ids == (END, 0)
    added = renderer.extend((), (65, END), [USER])
    assert added is not None
    assert renderer.extend((), (65, 0), [USER]) == (END, *added)
    assert renderer.parse((65, 0)) == renderer.parse((65, END)) == renderer.parse((65,))


REWRITES = ("+ message.content }}", "+ (message.content if loop.index > messages | length - 2 else '') }}")
REWRITING = changed(REWRITES)
LOOKS_INTO_ARGUMENTS = (
    "{{- call.function.arguments | tojson + '}",
    """{{- '{' }}{%- for key, value in call.function.arguments | items %}{{- '"' + key + '": ' + value | string }}
{%- endfor %}{{- '}' + '}""",
)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "has no chat template; set 'chatml'"),
        (REWRITING, "cannot extend a dialogue: turn 2 changes the text of the turns before it"),
        (
            changed(("message.role + '\n'", "message.role + loop.index | string + '\n'")),
            "depends on the messages before it",
        ),
        (changed(("message.role == 'tool'", "false")), "it leaves out messages of the role 'tool'"),
        (
            changed(
                ("message.role == 'tool'", "message.role == 'tool' and (loop.last or loop.nextitem.role != 'tool')")
            ),
            "it leaves out messages of the role 'tool'",
        ),
        (
            changed(("{%- elif message.role == 'tool' %}", "{%- else %}{{- raise_exception('no tools here') }}")),
            "no tools",
        ),
        (changed(("tool | tojson", "'tool'")), "it leaves out the tools"),
        (changed(("<tool_call>", "[CALL]"), ("</tool_call>", "[/CALL]")), "in the form of Hermes and Qwen"),
        (
            changed(("in message.tool_calls or []", "in (message.tool_calls or [])[:1]")),
            "in the form of Hermes and Qwen",
        ),
        (changed(("assistant\n' + message.content }}", "assistant\nSaid: ' + message.content }}")), "changes"),
        (changed(("{%- endfor %}{{- '<|im_end|>\n' }}\n{%- elif", "{%- endfor %}\n{%- elif")), "does not close"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template: str | None, problem: str) -> None:
    with pytest.raises(RendererError) as caught:
        TemplateRenderer(tokenizer(template), name="org/model")
    assert str(caught.value).startswith("chat.renderer: ")
    assert "'org/model'" in str(caught.value)
    assert problem in str(caught.value)
    is_about_history = "cannot extend a dialogue" in str(caught.value)
    assert ("chat.rewritten_history: restart" in str(caught.value)) == is_about_history
    made = tokenizer(template)
    if is_about_history:
        assert TemplateRenderer(made, RESTART).extend((), (65, END), [USER]) is None
    else:
        with pytest.raises(RendererError, match=re.escape(problem)):
            TemplateRenderer(made, RESTART, name="org/model")


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        ([("tool | tojson", "'tool'")], "it leaves out the tools"),
        ([("message.role == 'tool'", "false")], "it leaves out messages of the role 'tool'"),
        ([("<tool_call>", "[CALL]"), ("</tool_call>", "[/CALL]")], "in the form of Hermes and Qwen"),
        ([("in message.tool_calls or []", "in (message.tool_calls or [])[:1]")], "in the form of Hermes and Qwen"),
        ([("if loop.index > messages", "if loop.index < 3 and loop.index > messages")], "what the assistant said"),
    ],
)
def test_rendering_again_cannot_make_up_for_what_a_rewriting_template_leaves_out(
    pairs: list[tuple[str, str]], problem: str
) -> None:
    made = tokenizer(changed(REWRITES, *pairs))
    with pytest.raises(RendererError) as caught:
        TemplateRenderer(made, RESTART, name="org/model")
    assert problem in str(caught.value)
    assert "restart" not in str(caught.value)


def test_a_template_that_drops_thoughts_when_a_user_speaks_is_refused_or_begins_again_there() -> None:
    made = tokenizer(changed(THINKS, THOUGHT))
    with pytest.raises(
        RendererError, match=r"turn 7 drops what the assistant thought in it\. Set chat\.rewritten_history"
    ):
        AutoConfig().build(made)
    renderer = AutoConfig(rewritten_history="restart").build(made)
    check_renderer(renderer)
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    message = {"role": "assistant", "reasoning_content": "Hm.", "content": "", "tool_calls": [{"id": "call_0", **call}]}
    result = {"role": "tool", "content": "empty"}
    start, action = renderer.start([USER], []), renderer.encode(message)
    assert renderer.parse(action) == message
    added = renderer.extend(start, action, [result])
    assert added is not None
    assert start + action + added == renderer.start([USER, message, result], [])
    assert renderer.extend(start, action, [USER]) is None
    assert renderer.extend(start, action, [result, USER]) is None
    assert "Hm." not in made.decode(renderer.start([USER, message, result, USER], []))


@pytest.mark.parametrize("condition", ["false", "loop.last"])
def test_a_template_that_drops_thoughts_before_the_results_of_tools_begins_again_each_turn(condition: str) -> None:
    made = tokenizer(changed(THINKS, (THOUGHT[0], THOUGHT[1].replace("loop.index0 > last.user", condition))))
    if condition == "false":  # it knows no thoughts: they are a part of the text
        check_renderer(AutoConfig().build(made))
        return
    renderer = AutoConfig(rewritten_history="restart").build(made)
    check_renderer(renderer)
    assert renderer.extend((), (65, END), [{"role": "tool", "content": "empty"}]) is None


def test_a_template_that_cuts_thoughts_out_of_the_text_begins_again_each_turn() -> None:
    cuts = (THOUGHT[0], THOUGHT[0].replace("message.content", "message.content.split('</think>')[-1]"))
    with pytest.raises(RendererError, match="turn 7 drops what the assistant thought in it"):
        AutoConfig().build(tokenizer(changed(cuts)))
    renderer = AutoConfig(rewritten_history="restart").build(tokenizer(changed(cuts)))
    assert renderer.extend((), (65, END), [{"role": "tool", "content": "empty"}]) is None


def test_thoughts_are_text_to_a_template_that_knows_none() -> None:
    renderer = TemplateRenderer(tokenizer(QWEN))
    message = {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."}
    assert renderer.parse(renderer.encode(message)) == message


def test_where_the_prompt_begins_a_thought_nothing_is_carried_out_before_it_ends() -> None:
    made = tokenizer(changed(THINKS, THOUGHT, PROMPTS_THOUGHT))
    renderer = TemplateRenderer(made, RESTART)
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'

    def parsed(sampled: str) -> Any:
        return renderer.parse((*made.encode(sampled, add_special_tokens=False), END))

    assert parsed(f"Shall I {call}") == {"role": "assistant", "reasoning_content": f"Shall I {call}", "content": ""}
    message = parsed(f"Shall I {call}\n</think>\n\nYes. {call}")
    assert (message["reasoning_content"], message["content"]) == (f"Shall I {call}", "Yes.")
    assert len(message["tool_calls"]) == 1
    assert renderer.parse(renderer.encode(message)) == message


def test_a_template_that_rewrites_history_can_be_rendered_again_each_turn() -> None:
    config = AutoConfig(rewritten_history="restart")
    renderer = config.build(tokenizer(REWRITING), name="org/model")
    start = renderer.start([USER], [])
    assert renderer.extend(start, (65, END), [USER]) is None
    said = [USER, {"role": "assistant", "content": "Text."}, USER, {"role": "assistant", "content": "More."}, USER]
    whole = tokenizer(None).decode(renderer.start(said, []), skip_special_tokens=False)
    assert "Text." not in whole
    assert "More." in whole


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "look", "arguments": {"n": 1}',
        "nothing",
        '{"name": "look", "arguments": "{}"}',
        '{"name": "look", "arguments": [1, 2]}',
        '{"name": "look", "arguments": 3}',
        '{"name": "look", "arguments": null}',
    ],
)
def test_a_call_that_is_none_is_text_to_a_template_that_looks_into_arguments(body: str) -> None:
    made = tokenizer(changed(REWRITES, LOOKS_INTO_ARGUMENTS))
    renderer = TemplateRenderer(made, RESTART)
    good = '<tool_call>\n{"name": "take", "arguments": {"n": 7}}\n</tool_call>'
    bad = f"<tool_call>\n{body}\n</tool_call>"
    reply = {"role": "tool", "name": "", "content": "no such call"}

    def context(sampled: str) -> str:
        message = renderer.parse((*made.encode(sampled, add_special_tokens=False), END))
        before = copy.deepcopy(message)
        text: str = made.decode(renderer.start([USER, message, reply], []), skip_special_tokens=False)
        assert message == before
        return text

    replied = "<|im_end|>\n<|im_start|>user\n<tool_response>\nno such call\n</tool_response><|im_end|>\n"
    opening = "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
    for sampled, rendered in [
        (bad, bad),
        (f"I look.\n{bad}", f"I look.\n{bad}"),
        (f"{bad}\n{bad}", f"{bad}\n{bad}"),
        (good, good),
        (f"{good}\n{bad}", f"{bad}\n{good}"),  # the template writes calls after all text
    ]:
        assert context(sampled) == f"{opening}{rendered}{replied}<|im_start|>assistant\n"


def test_a_template_with_a_clock_says_the_same_at_any_time() -> None:
    clock = "{{- '<|im_start|>system\n' + strftime_now('%Y-%m-%d %H:%M:%S %f') + '<|im_end|>\n' }}"
    made = tokenizer(clock + QWEN)
    renderer = AutoConfig().build(made)
    ids = renderer.start([USER], [])
    assert "2026-01-01 00:00:00 000000" in made.decode(ids, skip_special_tokens=False)
    assert AutoConfig().build(made).start([USER], []) == renderer.start([USER], []) == ids
    later = AutoConfig.model_validate({"date": "2031-05-17"}).build(made)
    assert "2031-05-17 00:00:00 000000" in made.decode(later.start([USER], []), skip_special_tokens=False)


def test_chatml_can_be_asked_for_in_place_of_the_template() -> None:
    renderer = ChatMLConfig().build(tokenizer(REWRITING))
    assert renderer.extend((), (65, END), [USER]) is not None
