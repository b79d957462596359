"""Renderers of the package `renderers`, one for each model family that it knows, behind agentrl's seam.

A renderer is chosen if it is proven to write what the tokenizer's own template writes.
"""

import datetime as dt
import importlib.util
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agentrl.chat.chat_template import ChatTemplate, Shape, answers, call, placed, says
from agentrl.chat.encoder import MARK, Encoder, map_strings, unmarked
from agentrl.chat.forms import FORMS, CallForm
from agentrl.chat.forms.form import Function, assistant, check_written, function, malformed
from agentrl.chat.forms.tagged import END_THINK, THINK
from agentrl.chat.renderer import Description, Thinking, Tools, prepared, stop_ids
from agentrl.errors import RendererError
from agentrl.types import Message

_USER: Message = {"role": "user", "content": "Hello."}
_YES: Message = {"role": "assistant", "content": "Yes."}
_TOOL = {"type": "function", "function": {"name": "look", "description": "A tool.", "parameters": {"type": "object"}}}
_END_THOUGHT = ("</think>", "<channel|>", "<|end_message|>")
"""Spellings of the end of a thought."""


class Tokens:
    """Tokenizer as the package expects it, with text encoded as agentrl's renderers do.

    It has no name: the package chooses defaults by a model's name, and would ask a network for a processor of that name.
    """

    name_or_path = ""

    def __init__(self, tokenizer: Any, encode: Encoder, *, template: str) -> None:
        self._tokenizer, self._encode = tokenizer, encode
        self._size = len(tokenizer)
        self.chat_template = template
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Return the tokens of a text; what `Encoder.literal` marked in it is none of the control tokens."""
        return list(self._encode(self._encode.marks(text)))

    def decode(self, token_ids: Sequence[int], *_: Any, **__: Any) -> str:
        """Return the text of tokens, control tokens spelled out; a model can have more tokens than its tokenizer."""
        known = [i for i in token_ids if 0 <= i < self._size]
        return str(self._tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def sampled(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens, with marks in what spells a control token in letters."""
        return self._encode.decode([i for i in token_ids if 0 <= i < self._size])

    def stop_ids(self, closing_ids: Sequence[int]) -> tuple[int, ...]:
        """Return every token at which sampling ends, those with which a turn is closed among them."""
        return stop_ids(self._tokenizer, template=closing_ids)

    def convert_tokens_to_ids(self, token: str) -> Any:
        """Return the id of a token; None, or that of the unknown token, if there is none."""
        return self._tokenizer.convert_tokens_to_ids(token)


class FamilyRenderer:
    """A renderer of the package: it writes the tokens of a family's template, and parses by control tokens.

    Only `find_family` makes one, after it has proven that it writes what the tokenizer's own template writes. What tools and
    users say is appended behind a stand-in of the dialogue: it depends on who speaks, and not on what was sampled.
    """

    def __init__(
        self,
        family: Any,
        tokens: Tokens,
        encode: Encoder,
        *,
        shape: Shape,
        form: CallForm | None = None,
        system: str | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        """Take a renderer of the package, made of `tokens`.

        Args:
            family: the package's renderer.
            tokens: of the tokenizer.
            encode: of the tokenizer.
            shape: what the template has: a developer's message, thoughts.
            form: reads what was sampled, in place of the package.
            system: a system prompt.
            thinking: which thoughts a context holds; None: as the family does.
        """
        self._family = family
        self._tokens = tokens
        self._encode = encode
        self._system = system
        self._form = form
        self._shape = shape
        self._closing_ids = tuple(dict.fromkeys(family.get_stop_token_ids()))
        """Tokens with which the family closes a turn."""
        self._stop_ids = tokens.stop_ids(self._closing_ids)
        self.has_developer = True
        """There are messages of a developer; if there are none, they are system messages."""
        told = [{"role": "developer", "content": "Be brief."}, _USER]
        self.has_developer = shape.developer and self._can_render(told) and self._can_render(told, [_TOOL])
        self._shape = replace(shape, later=frozenset(role for role in shape.later if self._writes_later(role)))
        self._prompt = self._render([_USER], prompt=True)
        own: Thinking = "keep" if shape.thought_key is None else self._find_thinking()
        self._thinking = thinking or own
        self._taken_out: Thinking = "keep" if self._thinking == own else self._thinking  # the family takes out its own

    @property
    def name(self) -> str:
        """Name of the family, as the package has it."""
        return str(self._family.config.name)

    @property
    def form_name(self) -> str | None:
        """Name of the call form that reads what was sampled; None: the package does."""
        return self._form.name if self._form else None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens with which the family closes a turn, and those of `stop_ids`."""
        return self._stop_ids

    @property
    def max_token_chars(self) -> int | None:
        """Longest text that one token stands for."""
        return self._encode.max_chars

    @property
    def thinking(self) -> Thinking:
        """Return which thoughts of earlier turns a context holds."""
        return self._thinking

    def describe(self) -> Description:
        """Return what it says of itself."""
        form = self.form_name or "as the package reads them"
        return Description(
            facts={"family": f"{self.name}, of the package renderers", "calls": form, "thoughts": self.thinking}
        )

    def whole(self, messages: Sequence[Message], tools: Tools, *, prompt: bool) -> tuple[int, ...]:
        """Return the tokens of a dialogue, with or without the generation prompt."""
        return tuple(self._render(messages, tools, prompt=prompt))

    def start(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """Return a whole context."""
        return tuple(
            self._render(prepared(messages, system=self._system, thinking=self._taken_out), tools, prompt=True)
        )

    def extend(
        self,
        context_ids: Sequence[int],  # noqa: ARG002 - what is appended does not depend on history
        action_ids: Sequence[int],
        messages: Sequence[Message],
    ) -> tuple[int, ...] | None:
        """Return the tokens to append, or None if the family cannot."""
        stand_in = self._stand_in(messages)
        is_closed = bool(action_ids) and action_ids[-1] in self._closing_ids
        closed = [*stand_in[:-1], action_ids[-1] if is_closed else stand_in[-1]]
        replies = [self._shaped(message) for message in placed(messages, self._shape, has_begun=True)]
        bridged = self._family.bridge_to_next_turn(self._prompt, closed, replies)
        if bridged is None:
            return None
        added = tuple(bridged.token_ids[len(self._prompt) + len(closed) :])
        return added if is_closed else (closed[-1], *added)

    def parse(self, action_ids: Sequence[int], context_ids: Sequence[int] = (), tools: Tools = ()) -> Message:
        """Return the assistant message of sampled tokens."""
        ids, prompt = list(action_ids), list(context_ids) or self._prompt
        body = ids[:-1] if ids and ids[-1] in self._stop_ids else ids
        ids = ids if ids[len(body) :] and ids[-1] in self._closing_ids else body  # the package knows no other
        if self._form is not None:
            text = self._tokens.sampled(body)
            message = self._form.parse(text, tools, is_thinking=self._opens_thought(prompt))
            return unmarked(message) if MARK in text else message
        try:
            parsed = self._family.parse_response(ids, tools=list(tools) or None, prompt_ids=prompt)
        except Exception:  # noqa: BLE001 - it raises where JSON has numbers of 5,000 digits or nests too deep
            return assistant("", (), [malformed(self._tokens.decode(body))])
        thought = parsed.reasoning_content
        if thought is not None and parsed.tool_calls:
            text = self._tokens.decode(body)
            if not any(
                end in text for end in _END_THOUGHT
            ):  # a call within a thought that does not end is only thought of
                return assistant("", [text], ())
        return assistant(parsed.content, [thought or ""], [_function(call) for call in parsed.tool_calls])

    def _opens_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether the last turn of a context has begun a thought."""
        begins = next((n + 1 for n in range(len(prompt) - 1, -1, -1) if prompt[n] in self._closing_ids), 0)
        text = self._tokens.decode(prompt[begins:])
        return text.rfind(THINK) > text.rfind(END_THINK)

    def encode(self, message: Message) -> tuple[int, ...]:
        """Return an assistant message as an action.

        Raises:
            RendererError: if the family does not write a part of it, or not so that it would be read again.
        """
        action = self.write(message)
        check_written(message, partial(self.parse, action, ()), by=f"{self.name} of the package renderers")
        return action

    def write(self, message: Message) -> tuple[int, ...]:
        """Return an assistant message as an action, however it is read.

        Raises:
            RendererError: if the family does not write a part of it.
        """
        ids, prompt = self._written(message), self._prompt
        common = next(
            (i for i, (a, b) in enumerate(zip(ids, prompt, strict=False)) if a != b), min(len(ids), len(prompt))
        )
        action, opened = ids[common:], self._tokens.decode(prompt[common:])
        if opened:  # the end of the prompt is merged with the beginning of the action
            lengths = range(1, len(action) + 1)
            length = next((n for n in lengths if self._tokens.decode(action[:n]).startswith(opened)), 0)
            if length:
                rest = self._tokens.decode(action[:length])[len(opened) :]
                action = [*self._tokens.encode(self._encode.literal(rest)), *action[length:]]
            elif not (opened.isspace() and self._opens_thought(prompt)):  # a thought that holds nothing ends at once
                raise RendererError(f"chat.renderer: {self.name} of the package renderers cannot write such a turn")
        thought, written = message.get("reasoning_content"), self._tokens.decode(action)
        lost = [
            text
            for text in (thought, message.get("content"))
            if text and not text.isspace() and _composed(text.split()[0]) not in _composed(written)
        ]
        if lost:
            raise RendererError(
                f"chat.renderer: {self.name} of the package renderers does not write {lost[0][:40]!r} in such a turn"
            )
        return (*action, self._stop_after(message))

    def _written(self, message: Message) -> list[int]:
        """Return the tokens of a first answer, from the beginning of the dialogue to before its stop token."""
        rendered = self._rendered([_USER, message])
        ids: list[int] = rendered.token_ids
        marked = zip(rendered.message_indices, rendered.sampled_mask, strict=False)
        sampled = [place for place, (index, is_sampled) in enumerate(marked) if is_sampled and index == 1]
        ids = ids[: sampled[-1] + 1] if sampled else ids
        return ids[:-1] if ids[-1] in self._closing_ids else ids

    def _stop_after(self, message: Message) -> int:
        """Return the token that ends a turn, by what follows: the results of its calls, or a user."""
        plain = {key: value for key, value in message.items() if key != "reasoning_content"}
        written, whole = self._written(plain), self._render([_USER, plain, *_replies(plain)], prompt=True)
        if plain.get("tool_calls") and plain.get("content") and whole[: len(written)] != written:
            raise RendererError(
                f"chat.renderer: {self.name} of the package renderers moves what is said beside a call behind its result"
            )
        return next((i for i in whole[len(written) :] if i in self._closing_ids), self._closing_ids[0])

    def _stand_in(self, replies: Sequence[Message]) -> tuple[int, ...]:
        heard = [reply for reply in replies if reply["role"] == "tool"]
        if not heard:
            return self.write(_YES)
        calls: list[dict[str, Any]] = [
            {
                "id": reply.get("tool_call_id") or f"call_{number}",
                "type": "function",
                "function": {"name": reply.get("name") or "tool", "arguments": {}},
            }
            for number, reply in enumerate(heard)
        ]
        try:
            return self.write({"role": "assistant", "content": "", "tool_calls": calls})
        except RendererError:  # one call in a turn, at most
            return self.write({"role": "assistant", "content": "", "tool_calls": calls[:1]})

    def _find_thinking(self) -> Thinking:
        thought = {"reasoning_content": "agentrl-probe"}
        call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {}}}
        said: Message = {"role": "assistant", "content": "", "tool_calls": [call], **thought}
        for thinking, messages in (
            ("keep", [_USER, {**_YES, **thought}, _USER]),
            ("drop_at_user", [_USER, said, *_replies(said)]),
        ):
            if "agentrl-probe" in self._tokens.decode(self._render(messages, prompt=True)):
                return "keep" if thinking == "keep" else "drop_at_user"
        return "drop"

    def _writes_later(self, role: str) -> bool:
        said: Message = {"role": role, "content": "agentrl-probe"}
        try:
            return "agentrl-probe" in self._tokens.decode(self._render([_USER, _YES, said]))
        except RendererError:
            return False

    def _can_render(self, messages: Sequence[Message], tools: Tools = ()) -> bool:
        try:
            self._render(messages, tools, prompt=True)
        except RendererError:
            return False
        return True

    def _render(self, messages: Sequence[Message], tools: Tools = (), *, prompt: bool = False) -> list[int]:
        return list(self._rendered(messages, tools, prompt=prompt).token_ids)

    def _rendered(self, messages: Sequence[Message], tools: Tools = (), *, prompt: bool = False) -> Any:
        said = [self._shaped(message) for message in placed(messages, self._shape)]
        try:
            return self._family.render(
                said, tools=map_strings(tools, self._encode.literal_within) or None, add_generation_prompt=prompt
            )
        except (
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            AssertionError,
            NotImplementedError,
        ) as error:
            raise RendererError(
                f"chat.renderer: {self.name} of the package renderers cannot render a dialogue with the roles "
                f"{', '.join(m['role'] for m in messages)}: {error}"
            ) from error

    def _shaped(self, message: Message) -> Message:
        """Return a message as the package takes it: marked, and with what is no call as text."""
        role = message["role"]
        if role == "developer" and not self.has_developer:
            role = "system"
        shaped: Message = map_strings(message, self._encode.literal_within)
        shaped |= {"role": role, "content": self._encode.literal(message.get("content") or "")}
        if thought := message.get("reasoning_content"):
            shaped["reasoning_content"] = self._encode.literal(thought)
        calls = shaped.pop("tool_calls", None) or []
        regular = [call for call in calls if _is_regular(call)]
        odd = [str(call["function"].get("arguments")) for call in calls if not _is_regular(call)]
        shaped["content"] = "\n".join(filter(None, [shaped["content"], *odd]))
        if regular:
            shaped["tool_calls"] = regular
        return shaped


def _replies(message: Message) -> list[Message]:
    calls = message.get("tool_calls") or []
    return [
        {"role": "tool", "name": call["function"]["name"], "tool_call_id": call.get("id"), "content": "Done."}
        for call in calls
    ] or [_USER]


def _is_regular(call: dict[str, Any]) -> bool:
    return bool(call["function"].get("name")) and isinstance(call["function"].get("arguments", {}), dict)


def _function(parsed: Any) -> Function:
    """Return a call that was read, or that something was no call; a tool that nobody has is the environment's to answer."""
    if parsed.status in ("ok", "unknown_tool") and isinstance(parsed.arguments, dict):
        return function(parsed.name or "", parsed.arguments) or malformed(parsed.raw or "")
    return malformed(parsed.raw or "")


def _composed(text: str) -> str:
    """Return a text as some tokenizers compose it (NFC)."""
    return unicodedata.normalize("NFC", text)


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
    answer, its tokens are those of the template, if both render them; what it writes for the assistant it reads back, or
    one of agentrl's call forms does (the package takes white space off arguments); and what it appends after that is what the
    template has there. In the words of the assistant itself the same text in other tokens will do: what is sampled stays as
    it was sampled.

    Without the package the answer is None; `missing_package` says whether it might have been another.

    Args:
        tokenizer: of the policy.
        template: its chat template.
        variables: passed to the template beside the messages.
        date: answer to a template that asks for the time.
        name: of the model, for error messages.
        system: a system prompt.
        thinking: which thoughts a context holds; None: as the family does.
        encode: of this tokenizer and template, if there is one: for a large vocabulary, making it takes seconds.
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
    """Return what to install, if the package might help: it is missing, and has a family with these control tokens."""
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
    """Return whether a renderer writes what the template writes."""
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
    """Return whether tokens are the same text with the same control tokens, split otherwise."""
    return [i for i in ids if i in control] == [i for i in others if i in control] and tokens.decode(
        ids
    ) == tokens.decode(others)


def _plays(found: FamilyRenderer, tokens: Tokens) -> bool:
    """Return whether a renderer reads what it writes, and appends what stands there in the whole."""
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
    """Return whether a call that breaks off is read as one, for the environment to answer."""
    cut = (found.parse(action[:length], (), _TOOLS) for length in range(len(action) // 2, len(action) - 1))
    return any(call["function"]["name"] == "" for message in cut for call in message.get("tool_calls", ()))
