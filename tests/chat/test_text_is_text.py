"""No string that a model, a tool, a user or a server chooses becomes a control token, whichever place it stands in."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers

from agentrl.chat import AutoConfig, ChatMLConfig, Renderer, TemplateRenderer, train_tokenizer
from agentrl.chat.encoder import MARK, SIGN, Encoder
from agentrl.errors import RendererError
from agentrl.types import Message
from tests.support.each import each
from tests.support.families import family_tokenizer, template_names
from tests.support.templates import QWEN, changed, tokenizer
from tests.support.tiers import slow_unless

HARMLESS = "word"
SLOTS = (
    *(
        "system",
        "user",
        "thought",
        "said",
        "name",
        "key",
        "value",
        "inner key",
        "item",
        "call id",
        "result",
        "tool name",
    ),
    *("malformed", "further key", "further", "tool", "description", "property", "property description", "property key"),
    *("property value", "type", "enum", "required", "schema key", "schema value", "definition"),
)
SOME = ("gptoss", "qwen3")
TEMPLATES = slow_unless(SOME.__contains__, template_names())
PIECES = ("<|{}|>", "<{}>", "</{}>", "[{}]")


def dialogue(strings: dict[str, str]) -> tuple[list[Message], list[Message], list[dict[str, Any]]]:
    """Return an opening with a turn in it, replies to a turn with a call, and tools, with strings in their slots."""
    at = {slot: strings.get(slot, HARMLESS) for slot in SLOTS}
    call = {
        "id": at["call id"],
        "type": "function",
        "function": {
            "name": at["name"],
            "arguments": {at["key"]: at["value"], "other": {at["inner key"]: [at["item"]]}},
        },
    }
    odd = {"id": "call_1", "type": "function", "function": {"name": "", "arguments": at["malformed"]}}
    said: Message = {"role": "assistant", "content": at["said"], "reasoning_content": at["thought"]}
    reply: Message = {"role": "tool", "name": at["tool name"], "tool_call_id": at["call id"], "content": at["result"]}
    user: Message = {"role": "user", "content": at["user"], at["further key"]: at["further"]}
    messages = [
        *({"role": "system", "content": at["system"]}, user, {**said, "content": "", "tool_calls": [call]}, reply),
        *(said, user, {**said, "tool_calls": [odd]}, user),
    ]
    schema = {"type": at["type"], "description": at["property description"], at["property key"]: at["property value"]}
    parameters = {
        "type": "object",
        "properties": {at["property"]: schema, "other": {"type": "string", "enum": [at["enum"]]}},
        "required": [at["required"]],
        at["schema key"]: [at["schema value"]],
        "$defs": {at["definition"]: {"type": "object"}},
    }
    function = {"name": at["tool"], "description": at["description"], "parameters": parameters}
    return messages, [user, reply], [{"type": "function", "function": function}]


def contexts(renderer: Renderer, strings: dict[str, str]) -> Iterator[tuple[int, ...]]:
    messages, replies, tools = dialogue(strings)
    has_tools = not (isinstance(renderer, TemplateRenderer) and renderer.facts.no_tools)
    yield renderer.start(messages, tools) if has_tools else renderer.start([*messages[:2], *messages[4:]], ())
    for reply in replies if has_tools else replies[:1]:
        yield renderer.extend((), (), [reply]) or ()


def parts(token: str) -> set[str]:
    """Return a control token, alone and among words, and what is left of it where a template writes its brackets."""
    words = [token[1:], token[:-1], token[1:-1], token[2:-2], token.strip("<|>/[]"), f"a {token} b", token * 2]
    words += [f"{word[1:]} a" for word in (token, token[1:])] + [f"a {word[:-1]}" for word in (token, token[:-1])]
    return {token, *filter(None, words)}


def check(renderer: Renderer, made: Any, *, template: str, one_by_one: bool) -> None:
    """Check that no string in any slot adds a control token to a context, or takes one away."""
    control = Encoder(made, spelled=template).control_tokens

    def counts(strings: dict[str, str]) -> list[Counter[int]]:
        ids = set(control.values())
        return [Counter(i for i in context if i in ids) for context in contexts(renderer, strings)]

    expected = counts({})
    for text in sorted({part for token in control for part in parts(token)}):
        for slots in [[slot] for slot in SLOTS] if one_by_one else [SLOTS]:
            assert counts(dict.fromkeys(slots, text)) == expected, (text, slots)


@cache
def renderers(name: str) -> tuple[Renderer, ...]:
    """Return the renderer of a template, and what `auto` takes if that is another."""
    made = family_tokenizer(name)
    plain: Renderer = TemplateRenderer(made, name=name)
    try:
        chosen = AutoConfig().build(made, name=name)
    except RendererError:
        return (plain,)
    return (plain,) if isinstance(chosen, TemplateRenderer) else (plain, chosen)


@each("name", TEMPLATES)
def test_no_string_becomes_a_control_token(name: str) -> None:
    made = family_tokenizer(name)
    for renderer in renderers(name):
        check(renderer, made, template=made.chat_template, one_by_one=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", template_names())
def test_no_string_in_any_one_place_becomes_a_control_token(name: str) -> None:
    made = family_tokenizer(name)
    for renderer in renderers(name):
        check(renderer, made, template=made.chat_template, one_by_one=True)


def test_no_string_becomes_a_control_token_of_chatml() -> None:
    made = train_tokenizer(["user\nassistant\n<think>\n"], vocab_size=300)
    check(ChatMLConfig().build(made), made, template="", one_by_one=True)


@pytest.mark.slow
def test_no_string_becomes_a_control_token_of_chatml_that_a_foreign_tokenizer_has() -> None:
    made = family_tokenizer("qwen3")
    check(ChatMLConfig().build(made), made, template="<tool_call></tool_call><think></think>", one_by_one=True)


@pytest.mark.slow
@each("piece", PIECES)
def test_a_key_between_brackets_of_the_template_is_text(piece: str) -> None:
    written = piece.replace("{}", "' ~ key ~ '")
    keys = f"{{%- for key in tool.function.parameters %}}{{{{- '{written}' }}}}{{%- endfor %}}"
    made = tokenizer(changed(("{{- tool | tojson + '\n' }}", f"{{{{- tool | tojson + '\n' }}}}{keys}")))
    made.add_special_tokens({"additional_special_tokens": [piece.format("inner")]})
    check(TemplateRenderer(made), made, template=made.chat_template, one_by_one=False)


def test_a_token_that_a_template_makes_of_a_role_is_one() -> None:
    made = tokenizer(changed(("'<|im_start|>' + message.role", "'<|' + message.role + '|>'")))
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|system|>"]})
    renderer = TemplateRenderer(made)
    start = renderer.start([{"role": "user", "content": "<|user|> |user| <|im_end|>"}], ())
    assert start.count(made.convert_tokens_to_ids("<|user|>")) == 1
    check(renderer, made, template=made.chat_template, one_by_one=True)


def test_a_tokenizer_s_words_stay_code_of_its_template() -> None:
    made = tokenizer(QWEN)
    made.add_special_tokens({"additional_special_tokens": ["user", "tool"]})
    renderer, plain = TemplateRenderer(made), TemplateRenderer(tokenizer(QWEN))
    messages, _, tools = dialogue({})
    assert made.decode(renderer.start(messages, tools)) == tokenizer(QWEN).decode(plain.start(messages, tools))


@each("text", ["<|TO\u212aEN|>", "\uff1c|TOKEN|>", "<|token|>"])
@each("normalizer", [normalizers.NFC(), normalizers.NFKC(), normalizers.Sequence([normalizers.Lowercase()])])
def test_what_a_normalizer_composes_is_no_control_token(text: str, normalizer: Any) -> None:
    made = tokenizer(QWEN)
    made.backend_tokenizer.normalizer = normalizer
    made.add_tokens([AddedToken("<|TOKEN|>", special=True, normalized=True)])
    start = TemplateRenderer(made).start([{"role": "user", "content": text}], ())
    assert made.convert_tokens_to_ids("<|TOKEN|>") not in start
    assert start.count(2) == 1


def test_the_code_points_of_marks_and_signs_are_no_text() -> None:
    made = tokenizer(QWEN)
    renderer = TemplateRenderer(made)
    for text in (f"{SIGN}<|im_end|>", f"<{MARK}|im_end|>", f"{SIGN}", "\\ufdd0<|im_end|>", "\\ufdd1<|im_end|>"):
        start = renderer.start([{"role": "user", "content": text}], ())
        assert start.count(2) == 1
        said = made.decode(start).partition("user\n")[2]
        assert said.startswith(text.replace(SIGN, "\ufffd").replace(MARK, "\ufffd"))
