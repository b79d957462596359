"""Which renderer of the package `renderers` writes what the tokenizer's own template writes: proven by rendering."""

import datetime as dt
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from agentrl.chat.chat_template import ChatTemplate, Shape
from agentrl.chat.encoder import Encoder
from agentrl.chat.families import FamilyRenderer, Tokens
from agentrl.chat.forms import FORMS
from agentrl.chat.renderer import Tools
from agentrl.chat.thinking import Thinking
from agentrl.chat.turns import answers, call, says
from agentrl.errors import RendererError
from agentrl.types import Message

_HELLO: Message = {"role": "user", "content": "Hello."}
_MORE: Message = {"role": "user", "content": "  Two lines,\n\n鍵 and spaces. "}
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_DEVELOPER: Message = {"role": "developer", "content": "Be brief."}
_LOOK = call(0, "look", n=1, text="a b")
_NESTED = call(0, "look", n=-2, sure=True, text='say "é"\n', more=[1, 2.5, None, True, {"a": "b"}])
_THOUGHT = {"reasoning_content": "Hm, so."}
_MIXED = {"type": "array", "items": {"type": ["number", "boolean", "null", "object"]}}
_TOOLS: Tools = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {
                    "n": {"type": "integer"},
                    "text": {"type": "string"},
                    "sure": {"type": "boolean"},
                    "more": _MIXED,
                },
                "required": ["n"],
            },
        },
    }
    for name in ("look", "take")
)
_TOLD: tuple[tuple[tuple[Message, ...], Tools], ...] = (
    ((_HELLO,), ()),
    ((_MORE,), ()),
    (({"role": "user", "content": ""},), ()),
    ((_SYSTEM, _HELLO), ()),
    ((_HELLO,), _TOOLS),
    ((_SYSTEM, _HELLO), _TOOLS),
    ((_DEVELOPER, _HELLO), ()),
)
"""Dialogues in which only others have spoken."""
_SAID: tuple[tuple[tuple[Message, ...], Tools], ...] = (
    ((_HELLO, says("Yes."), _MORE), ()),
    ((_SYSTEM, _HELLO, says("Yes."), _HELLO, says(""), _MORE), ()),
    ((_HELLO, says("", _LOOK), *answers(1)), _TOOLS),
    ((_HELLO, says("I look.", _LOOK), *answers(1)), _TOOLS),
    ((_HELLO, says("", _NESTED), *answers(1)), _TOOLS),
    ((_HELLO, says("", call(0, "look")), *answers(1)), _TOOLS),
    *(
        ((_HELLO, says(words, _LOOK, call(1, "take", n=2)) | thought, *answers(2)), _TOOLS)
        for words in ("", "I look.")
        for thought in ({}, _THOUGHT)
    ),
    ((_HELLO, says("", _LOOK), *answers(1), says("", _NESTED), *answers(1), says("Done."), _MORE), _TOOLS),
    ((_HELLO, says("Yes.") | _THOUGHT, _MORE), ()),
    ((_HELLO, says("", _LOOK) | _THOUGHT, *answers(1)), _TOOLS),
    ((_HELLO, says("", _LOOK) | _THOUGHT, *answers(1), says("Done.") | _THOUGHT, _MORE), _TOOLS),
    ((_HELLO, says("Yes.") | _THOUGHT, _MORE, says("", _LOOK) | _THOUGHT, *answers(1)), _TOOLS),
)
"""Dialogues in which the assistant has spoken too."""
_ACTIONS = (
    says("Yes."),
    says("", _LOOK),
    says("", _NESTED),
    says("", _LOOK, call(1, "take", n=2)),
    says("I look.", _LOOK),
    says("Yes.") | _THOUGHT,
    says("", _LOOK) | _THOUGHT,
)
_HARMONY = {
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|call|>": 200012,
}
"""Control tokens of gpt-oss at their ids."""


def find_family(
    tokenizer: Any,
    *,
    template: str,
    variables: Mapping[str, Any],
    date: dt.date,
    name: str = "",
    system: str | None = None,
    thinking: Thinking | None = None,
    encode: Encoder | None = None,
) -> FamilyRenderer | None:
    """Return the renderer of the package that is proven to fit, or None.

    A renderer is taken for what it writes, never for a model's name: on dialogues that end with what the assistant is to
    answer, its tokens are those of the template, where both render them; what it writes for the assistant it reads back, or
    one of agentrl's call forms does (the package takes white space off arguments); and what it appends after that is what the
    template has there. In the words of the assistant itself the same text in other tokens will do: what is sampled stays as
    it was sampled.

    Without the package the answer is None; `missing_package` tells whether it might have been another.

    Args:
        tokenizer: of the policy.
        template: its chat template.
        variables: what the template is told beside the messages.
        date: what a template that asks for the time is told.
        name: of the model, for error messages.
        system: a system prompt.
        thinking: which thoughts a context holds; None: as the family does.
        encode: made for this tokenizer and template, where there is one: for a large vocabulary making it takes seconds.
    """
    if importlib.util.find_spec("renderers") is None:
        return None
    encode = encode or Encoder(tokenizer, spelled=template)
    try:
        own = ChatTemplate(tokenizer, encode, template=template, variables=variables, date=date, name=name)
    except RendererError:
        return None
    reference = {
        number: ids
        for number, (messages, tools, prompt) in enumerate(_dialogues())
        if (ids := _ids_of_template(own, encode, messages, tools, prompt=prompt)) is not None
    }
    tokens = Tokens(tokenizer, encode, template=template)
    for family in _candidates(tokens, variables, date):
        make = partial(FamilyRenderer, family, tokens, encode, shape=own.shape, system=system, thinking=thinking)
        try:
            if _writes(make(), reference, own.shape, encode, tokens):
                found = next((made for form in (None, *FORMS) if _plays(made := make(form=form), tokens)), None)
                if found is not None:
                    return found
        except RendererError:
            continue
    return None


def missing_package(tokenizer: Any, template: str) -> str | None:
    """Return what to install, where the package might help: it is missing, and has a family with these control tokens."""
    if importlib.util.find_spec("renderers") is not None:
        return None
    control = Encoder(tokenizer, spelled=template).control_tokens.keys()
    if not any(marks <= control for marks in _MARKS):
        return None
    return "the package renderers may know this family: pip install 'agentrl[renderers]'"


_MARKS = (
    {"<|im_start|>", "<|im_end|>", "<tool_call>", "</think>"},  # Qwen3 and later, Nemotron 3
    {"<|start_header_id|>", "<|eot_id|>", "<|eom_id|>"},  # Llama 3.1
    {"<|turn>", "<turn|>"},  # Gemma 4
    {"<|observation|>", "<arg_key>"},  # GLM
    {"<｜User｜>", "<｜tool▁calls▁begin｜>"},  # DeepSeek
    {"<|im_middle|>", "<|tool_calls_section_begin|>"},  # Kimi
    {"<|channel|>", "<|constrain|>", "<|return|>"},  # gpt-oss
)
"""Control tokens of families that the package knows, and agentrl's own forms know less well or not."""


def _dialogues() -> Iterator[tuple[tuple[Message, ...], Tools, bool]]:
    for messages, tools in (*_TOLD, *_SAID):
        yield messages, tools, True
        yield messages, tools, False


def _ids_of_template(
    template: ChatTemplate, encode: Encoder, messages: Sequence[Message], tools: Tools, *, prompt: bool
) -> tuple[int, ...] | None:
    if template.shape.thought_key is None:  # the family's models have none
        messages = [
            {key: value for key, value in message.items() if key != "reasoning_content"} for message in messages
        ]
    try:
        return encode(template.render(messages, tools, prompt=prompt))
    except RendererError:
        return None


def _candidates(tokens: Tokens, variables: Mapping[str, Any], date: dt.date) -> Iterator[Any]:
    """Yield the package's renderers that can be made of a tokenizer; most lack a control token and cannot.

    `import renderers` takes seconds (it imports openai). gpt-oss's asks openai_harmony for a vocabulary that is downloaded,
    and hangs without a network: it is made only where the tokenizer has harmony's control tokens at their ids. DeepSeek-V4
    has no chat template to be compared with.
    """
    from renderers.base import RENDERER_REGISTRY, _populate_registry
    from renderers.configs import _config_class_for

    _populate_registry()
    for name, made_by in RENDERER_REGISTRY.items():
        if name in ("default", "deepseek-v4") or (name == "gpt-oss" and not _is_harmony(tokens)):
            continue
        config_class = _config_class_for(name)
        known = config_class.template_field_names()
        told = {key: value for key, value in variables.items() if key in known}
        ways: list[dict[str, Any]] = [told]
        others = {
            "enable_thinking": False,
            "thinking": False,
            "date_string": f"{date:%d %b %Y}",
            "conversation_start_date": date.isoformat(),
        }
        ways += [told | {key: value} for key, value in others.items() if key in known - told.keys()]
        for way in ways:
            try:
                yield made_by(tokens, config_class(**way, thinking_retention="all"))
            except (AssertionError, ValueError, TypeError, KeyError, AttributeError):
                break  # it has not the tokens, whichever way


def _is_harmony(tokens: Tokens) -> bool:
    return all(tokens.convert_tokens_to_ids(token) == i for token, i in _HARMONY.items())


def _writes(
    found: FamilyRenderer, reference: Mapping[int, tuple[int, ...]], shape: Shape, encode: Encoder, tokens: Tokens
) -> bool:
    """Tell whether a renderer writes what the template writes."""
    control, num_told = set(encode.control_tokens.values()), 2 * len(_TOLD)
    for number, (messages, tools, prompt) in enumerate(_dialogues()):
        expected = reference.get(number)
        is_unlike = shape.developer and not found.has_developer and messages[0]["role"] == "developer"
        if expected is None or is_unlike:
            continue
        try:
            ids = found.whole(messages, tools, prompt=prompt)
        except RendererError:
            return False
        if ids != expected and (number < num_told or not _same(ids, expected, control, tokens)):
            return False
    return True


def _same(ids: Sequence[int], others: Sequence[int], control: set[int], tokens: Tokens) -> bool:
    """Tell whether tokens are the same text with the same control tokens, split otherwise."""
    return [i for i in ids if i in control] == [i for i in others if i in control] and tokens.decode(
        ids
    ) == tokens.decode(others)


def _plays(found: FamilyRenderer, tokens: Tokens) -> bool:
    """Tell whether a renderer reads what it writes, and appends what stands there in the whole."""
    before = found.whole([_HELLO], _TOOLS, prompt=True)
    for message in _ACTIONS:
        try:
            action = found.write(message)
        except RendererError:
            if message == _ACTIONS[0]:
                return False
            continue  # it says that it cannot
        read = found.parse(action, before, _TOOLS)
        if read != message or (message is _ACTIONS[1] and not _notices_the_end(found, action)):
            return False
        replies = answers(len(message.get("tool_calls") or ())) or [_MORE]
        added = found.extend(before, action, replies)
        whole = found.whole([_HELLO, message, *replies], _TOOLS, prompt=True)
        if added is None or not tokens.decode(whole).endswith(tokens.decode(added)):
            return False
    return True


def _notices_the_end(found: FamilyRenderer, action: Sequence[int]) -> bool:
    """Tell whether a call that breaks off is read as one, for the environment to answer."""
    cut = (found.parse(action[:length], (), _TOOLS) for length in range(len(action) // 2, len(action) - 1))
    return any(call["function"]["name"] == "" for message in cut for call in message.get("tool_calls", ()))
