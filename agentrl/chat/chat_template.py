"""A Hugging Face chat template, its messages in the shape that it expects, and the end of an assistant's turn in it."""

import datetime as dt
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from agentrl.chat.encoder import MARK, Encoder, map_strings
from agentrl.chat.forms import CallForm
from agentrl.chat.forms.json_calls import format_reasoning
from agentrl.chat.forms.tagged import END_THINK, THINK
from agentrl.chat.limits import render_limited
from agentrl.chat.renderer import Tools
from agentrl.errors import RendererError, TemplateLimitError
from agentrl.types import Message

PROBE = "agentrl-probe"
"""A text that no template holds."""
_SAID = "agentrl-said"
_SETTING = frozenset({"system", "developer"})
USER: Message = {"role": "user", "content": "Hello."}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Messages that a template expects; families differ."""

    parts: bool = False
    """Content is a list of parts, each a mapping with its type."""
    text_arguments: bool = False
    """Arguments of a call are JSON text, no mapping."""
    thought_key: str | None = "reasoning_content"
    """The key under which a thought is written. None: the template knows no thoughts; they are text of the message."""
    system: bool = True
    """There is a system message. False: its text opens the first user message."""
    developer: bool = True
    """There is a developer message. False: it is a system message."""
    later: frozenset[str] = _SETTING
    """Those of these roles whose messages stay in their place once the dialogue has begun. Some families move them to
    the beginning or leave them out: their text opens the next user message."""
    loose_results: bool = True
    """A tool's result may follow a turn without a call, as after a malformed one. False: the user says it."""


def placed(messages: Sequence[Message], shape: Shape, *, has_begun: bool = False) -> list[Message]:
    """Return messages where the template writes them all: what it would leave out or move is said by the user.

    Args:
        messages: as they are said.
        shape: of the template.
        has_begun: something was said before them.
    """
    said: list[Message] = []
    held: list[str] = []
    has_call = True

    def let_the_user_say() -> None:
        if held:
            last = said.pop() if said and said[-1]["role"] == "user" else {"role": "user", "content": ""}
            said.append({**last, "content": "\n\n".join(filter(None, [last["content"], *held]))})
            held.clear()

    for message in messages:
        role, text = message["role"], message.get("content") or ""
        if role == "developer" and not shape.developer:
            role = "system"
        has_begun = has_begun or role not in _SETTING
        if (role == "system" and not shape.system) or (has_begun and role in _SETTING - shape.later):
            held.append(text)
            continue
        if role == "user":
            text = "\n\n".join(filter(None, [*held, text]))
            held.clear()
        elif role == "assistant":
            let_the_user_say()
            has_call = any(map(_is_regular, message.get("tool_calls") or ()))
        elif role == "tool" and not (has_call or shape.loose_results):
            role = "user"
        said.append({**message, "role": role, "content": text})
    let_the_user_say()
    return said


class ChatTemplate:
    """Renders messages as text, whatever shape the template wants them in.

    A control token is one that the template itself spells, which is signed for it (`Encoder.signed`), or makes of pieces
    and a role (`'<|' + message.role + '|>'`), which is found out with harmless messages. Whatever else spells one is text,
    wherever it comes from: words, names, keys, or a key within brackets of the template. A malformed call, or one whose
    arguments are no object, is rendered as text within the message: templates may look into the arguments of a call. So are
    thoughts if the template knows none.
    """

    def __init__(
        self,
        tokenizer: Any,
        encoder: Encoder,
        *,
        template: str,
        variables: Mapping[str, Any],
        date: dt.date,
        name: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._template = encoder.signed(template)
        self.name = name
        clock = dt.datetime.combine(date, dt.time())
        self._variables = map_strings({**tokenizer.special_tokens_map, **variables}, encoder.signed)
        self._variables["strftime_now"] = clock.strftime  # in place of the clock that transformers gives
        self._assembled: frozenset[str] = frozenset(encoder.control_tokens)  # the messages of the probes spell none
        self.shape = self._find_shape()
        self._assembled = frozenset(self._find_assembled())

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        prompt: bool = False,
        form: CallForm | None = None,
        shape: Shape | None = None,
    ) -> str:
        """Return the text of a dialogue.

        Args:
            messages: what was said.
            tools: what may be called.
            prompt: end with the generation prompt.
            form: in which malformed calls are written; None: there are none.
            shape: of the messages, in place of what was found out.

        Raises:
            RendererError: when the template cannot render it.
        """
        text = self._signed_text(messages, tools, prompt=prompt, form=form, shape=shape or self.shape)
        return self._encoder.trusted(text, assembled=self._assembled)

    def _signed_text(
        self, messages: Sequence[Message], tools: Tools, *, prompt: bool, form: CallForm | None, shape: Shape
    ) -> str:
        whose = f"chat.renderer: the chat template of {self.name!r}"
        try:
            return render_limited(
                self._template,
                messages=list(self._shaped(messages, shape, form)),
                tools=self._marked(tools) or None,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except (TemplateLimitError, MemoryError) as error:
            raise TemplateLimitError(
                f"{whose} {error or 'needs more memory than there is'}. Set chat.template to a file with another"
            ) from None
        except Exception as error:  # a stranger's program may raise anything
            roles = ", ".join(m["role"] for m in messages)
            words = " ".join(str(error).split())[:1000]
            raise RendererError(f"{whose} cannot render a dialogue with the roles {roles}: {words}") from error

    def _find_assembled(self) -> Iterator[str]:
        """Yield the control tokens that the template makes of pieces."""
        heard = answers(1)
        dialogues: list[list[Message]] = [
            [{**USER, "role": "system"}, USER],
            [{**USER, "role": "developer"}, USER],
            [USER, says("Yes.") | {"reasoning_content": "Hm."}, USER],
            [USER, says("", *_calls(1)) | {"reasoning_content": "Hm."}, *heard],
            [USER, says("", *_calls(1)), *heard, says("Yes."), USER],
        ]
        for messages, tools, prompt in product(dialogues, ((), TOOLS), (False, True)):
            with suppress(RendererError):
                text = self._signed_text(messages, tools, prompt=prompt, form=None, shape=self.shape)
                yield from self._encoder.unsigned(text)

    def _find_shape(self) -> Shape:
        """Find out what the template expects, by rendering one thing after the other."""
        shape = Shape()
        probe: Message = {"role": "user", "content": PROBE}
        for candidate in (shape, replace(shape, parts=True)):
            if self._holds([probe], candidate) and self._holds([USER, {**probe, "role": "assistant"}], candidate):
                shape = candidate
                break
        else:
            self.render([probe, {**USER, "role": "assistant"}], shape=shape)  # raises where it cannot
            raise RendererError(
                f"chat.renderer: the chat template of {self.name!r} leaves out what a user says. Set chat.template to a file "
                "with another"
            )
        shape = replace(shape, system=self._holds([{**probe, "role": "system"}, USER], shape))
        shape = replace(shape, developer=self._holds([{**probe, "role": "developer"}, USER], shape))
        shape = replace(shape, later=frozenset(role for role in _SETTING if self._stands(role, shape)))
        call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"text": PROBE}}}
        calls: list[Message] = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        if not self._holds(calls, shape) and self._holds(calls, replace(shape, text_arguments=True)):
            shape = replace(shape, text_arguments=True)
        call["function"] = {"name": "look", "arguments": {"n": 1}}
        result: Message = {**probe, "role": "tool", "name": "look", "tool_call_id": "call00000"}
        if not self._holds([USER, says("Yes."), result], shape) and self._holds([*calls, result], shape):
            shape = replace(shape, loose_results=False)
        thought = {"role": "assistant", "reasoning_content": PROBE}
        for key in ("reasoning_content", "thinking", "reasoning", None):
            shape = replace(shape, thought_key=key)
            if self._holds([USER, {**thought, "content": "Yes."}], shape):
                break
            if key and self._holds([USER, {**thought, "content": "", "tool_calls": [call]}], shape):
                break
        return shape

    def _holds(self, messages: Sequence[Message], shape: Shape) -> bool:
        """Return whether the template renders the probe that some message holds."""
        try:
            return PROBE in self.render(messages, shape=shape)
        except RendererError:
            return False

    def _stands(self, role: str, shape: Shape) -> bool:
        """Return whether what this role says once the dialogue has begun follows a turn, which ends as it does for a user."""
        control = set(self._encoder.control_tokens.values())
        said: Message = {"role": "assistant", "content": _SAID}

        def after(role: str) -> tuple[bool, int | None]:
            try:
                text = self.render([USER, said, {"role": role, "content": PROBE}], shape=shape).partition(_SAID)[2]
            except RendererError:
                return False, None
            return PROBE in text, next((i for i in self._encoder(text) if i in control), None)

        return after(role) == (True, after("user")[1])

    def _shaped(self, messages: Sequence[Message], shape: Shape, form: CallForm | None) -> Iterator[Message]:
        for message in placed(messages, shape):
            shaped = self._marked(message) | {"role": message["role"]}
            text = shaped["content"]
            if shaped["role"] == "assistant":
                text = self._say(shaped, text, shape, form)
            shaped["content"] = [{"type": "text", "text": text}] if shape.parts else text
            yield shaped

    def _marked(self, data: Any) -> Any:
        return map_strings(data, self._encoder.literal, key=self._encoder.literal_key)

    def _say(self, shaped: Message, text: str, shape: Shape, form: CallForm | None) -> str:
        """Give an assistant's message its thought and its calls; return what of both is text, with its own."""
        thought = shaped.pop("reasoning_content", None) or ""
        calls = shaped.pop("tool_calls", None) or []
        regular = [call for call in calls if _is_regular(call)]
        odd = [_written(call) for call in calls if not _is_regular(call)]
        if regular:
            shaped["tool_calls"] = [_with_text(call) for call in regular] if shape.text_arguments else regular
        pieces = [self._encoder.signed(form.write_malformed(words)) for words in odd] if form else odd
        if thought and shape.thought_key:
            shaped[shape.thought_key] = thought
        elif thought:
            pieces, text = [text, *pieces], self._encoder.signed(format_reasoning(thought).strip())
        return "\n".join(filter(None, [text, *pieces]))


def _is_regular(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):  # a form of the environment's own, for its own template
        return isinstance(call, dict)
    return bool(function.get("name")) and isinstance(function.get("arguments", {}), dict)


def _with_text(call: Any) -> Any:
    """Return a call whose arguments are JSON text."""
    if not isinstance(call.get("function"), dict):  # a form of the environment's own, for its own template
        return call
    arguments = json.dumps(call["function"].get("arguments", {}), ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _written(call: Any) -> str:
    """Return a call that is none as it was sampled."""
    function = call["function"] if isinstance(call, dict) else {"arguments": str(call)}
    name, arguments = function.get("name"), function.get("arguments", {})
    if not name and isinstance(arguments, str):
        return arguments
    return json.dumps({"name": name or "", "arguments": arguments}, ensure_ascii=False)


LOOK, TAKE = (
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
                    "a": {"type": "array"},
                    "b": {"type": "object"},
                },
                "required": ["n"],
            },
        },
    }
    for name in ("look", "take")
)
TOOLS: Tools = (LOOK, TAKE)


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The one token that ends an assistant's turn."""

    stop_id: int
    """Token that is sampled."""
    closing_id: int
    """Token in its place once the dialogue has moved on; in most families the same."""
    is_written: bool
    """The template writes it where the turn is the last. False: what opens the next turn ends this one."""


class Turns:
    """Takes the turns of a template apart.

    Messages are rendered behind a stand-in of the assistant's turn: what follows it is what they add.
    """

    def __init__(self, template: ChatTemplate, encode: Encoder, *, name: str) -> None:
        self._template = template
        self._encode = encode
        self._name = name
        self._control = {i: text for text, i in encode.control_tokens.items()}
        self.first = template.render([USER], prompt=True)
        """A first context."""
        self.said = self._end(says(PROBE), [USER])
        """End of a turn without calls."""
        self.parallel = self._count([USER, says("", *_calls(2))], PROBE) == 2
        """A turn may hold several calls."""
        self.called: TurnEnd | None = None
        """End of a turn with calls. None: the template writes none, or no replies to them."""
        stand_in, replies = says("", *_calls(1)), answers(1)
        if self._count([USER, stand_in], PROBE) and self._count([USER, stand_in, *replies], replies[0]["content"]):
            self.called = self._end(stand_in, replies)

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the spelling of the tokens that end a turn."""
        return tuple(self._control[end.stop_id] for end in (self.said, self.called) if end)

    def extension(self, replies: Sequence[Message]) -> tuple[int, ...]:
        """Return what replies add after an assistant's words: the token that closes the turn, replies, generation prompt."""
        heard_by_tools = [reply for reply in replies if reply["role"] == "tool"]
        end = self.called if heard_by_tools and self.called else self.said
        stand_in = says("", *self._stand_in_calls(heard_by_tools)) if end is self.called else says(PROBE)
        ids = self._encode(self._after_stand_in(stand_in, replies))
        closing = (i for i, token in enumerate(ids) if token in self._control)
        return ids[ids.index(end.closing_id) if end.closing_id in ids else next(closing) :]

    def added_text(self, replies: Sequence[Message]) -> str:
        """Return the text of replies and generation prompt, after whatever closes the turn before them."""
        stand_in = says("", *self._stand_in_calls(replies)) if replies[0]["role"] == "tool" else says(PROBE)
        text = self._after_stand_in(stand_in, replies)
        return text[text.find(self._control[self.end_of(stand_in).closing_id]) :]

    def written(self, message: Message) -> str:
        """Return the text of a turn as it is sampled, without the token that ends it.

        Raises:
            RendererError: if the template leaves out a part of it.
        """
        end, calls = self.end_of(message), message.get("tool_calls") or []
        text = self._beyond_prompt(message)
        if end.is_written:
            text = text[: text.rfind(self._control[end.stop_id])]
        words, told = text.replace(MARK, ""), (message.get("content"), message.get("reasoning_content"))
        lost = [part for part in told if part and part.split()[0] not in words]
        if lost or (calls and self.called is None) or (len(calls) > 1 and not self.parallel):
            what = "a call" if calls and self.called is None else repr(lost[0][:40]) if lost else "several calls"
            raise RendererError(
                f"chat.renderer: the chat template of {self._name!r} does not write {what} in such a turn"
            )
        return text if end.is_written else text.rstrip()

    def end_of(self, message: Message) -> TurnEnd:
        """Return how a turn ends."""
        return self.called if message.get("tool_calls") and self.called else self.said

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the generation prompt after some messages."""
        without, whole = self._template.render(messages), self._template.render(messages, prompt=True)
        common = next((i for i, (a, b) in enumerate(zip(without, whole, strict=False)) if a != b), len(without))
        return whole[common:]

    def _count(self, messages: Sequence[Message], text: str) -> int:
        """Return how often a dialogue holds a text; 0 if it cannot be rendered."""
        try:
            return self._template.render(messages).count(text)
        except RendererError:
            return 0

    def _end(self, stand_in: Message, replies: Sequence[Message]) -> TurnEnd:
        """Find the token that ends the stand-in's turn."""
        last, within = self._control_after_probe([USER, stand_in]), list[int]()
        if stand_in.get("tool_calls"):
            if last and self.said.stop_id in last:
                last = [self.said.stop_id]
            else:  # the tags of a call, written once for each, end no turn
                within = self._control_within_calls()
                last = [i for i in last[-1:] if i not in within]
        following = [i for i in self._control_after_probe([USER, stand_in, *replies], prompt=True) if i not in within]
        if not following:
            text = self._template.render([USER, stand_in, *replies], prompt=True).rpartition(PROBE)[2]
            raise RendererError(
                f"chat.renderer: the chat template of {self._name!r} ends a turn of the assistant with {text[:40]!r}, which "
                "begins with no special token of the tokenizer: a turn must end by one token. Use the template that belongs "
                "to the tokenizer, or set chat.template to a file with one"
            )
        if not last:
            return TurnEnd(following[0], following[0], is_written=False)
        closing = last[0] if last[0] in following else following[0]
        return TurnEnd(last[0], closing, is_written=True)

    def _control_after_probe(self, messages: Sequence[Message], *, prompt: bool = False) -> list[int]:
        """Return the control tokens after the probe; a text without one ends nothing by one token."""
        text = self._template.render(messages, prompt=prompt).rpartition(PROBE)[2]
        ids = [i for i in self._encode(text) if i in self._control]
        is_plain = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        if is_plain and text.strip() and not (ids and text.lstrip().startswith(self._control[ids[0]])):
            return []
        return ids

    def _control_within_calls(self) -> list[int]:
        """Return the control tokens with which calls are written, and no turn ends."""
        if not self.parallel:
            return []
        _, _, text = self._template.render([USER, says("", *_calls(2))]).partition(PROBE)
        return [i for i in self._encode(text[: text.rfind("take")]) if i in self._control]

    def _stand_in_calls(self, replies: Sequence[Message]) -> list[Message]:
        calls = [
            {
                "id": reply.get("tool_call_id") or f"call_{number}",
                "type": "function",
                "function": {"name": reply.get("name") or "tool", "arguments": {"text": PROBE}},
            }
            for number, reply in enumerate(replies)
        ]
        return calls if self.parallel else calls[:1]

    def _after_stand_in(self, stand_in: Message, replies: Sequence[Message]) -> str:
        """Return the text behind the probes of a stand-in; replies may spell the probe too."""
        text = self._template.render([USER, stand_in, *replies], prompt=True)
        return text.split(PROBE, max(1, len(stand_in.get("tool_calls") or ())))[-1]

    def _beyond_prompt(self, message: Message) -> str:
        """Return what a message adds to the generation prompt, which may have opened a thought."""
        before, whole = self.first, self._template.render([USER, message])
        for start in (before, before.rstrip()):
            if whole.startswith(start):
                return whole[len(start) :]
        opened = before.rfind(THINK)
        if opened < 0 or not whole.startswith(before[:opened]):
            raise RendererError(
                f"chat.renderer: the chat template of {self._name!r} does not continue its prompt where it writes a "
                "turn, so it cannot write demonstrations. Set chat.template to a file with another, or warmup.steps to 0"
            )
        thought = message.get("reasoning_content") or ""
        if END_THINK in before[opened:]:  # the prompt has thought already, of nothing
            if thought:
                raise RendererError(
                    f"chat.renderer: the prompt of the chat template of {self._name!r} ends the thought: a turn has none"
                )
            return whole[opened:].rpartition(END_THINK)[2].lstrip()
        return f"{thought}\n{END_THINK}\n\n{whole[opened:].rpartition(END_THINK)[2].lstrip()}"


def says(content: str, *calls: Message) -> Message:
    """Return an assistant's message."""
    message: Message = {"role": "assistant", "content": content}
    return message | {"tool_calls": list(calls)} if calls else message


def call(number: int, name: str, **arguments: object) -> Message:
    """Return a call as messages hold it."""
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def answers(count: int) -> list[Message]:
    """Return what the tools say to the first calls of a turn."""
    return [
        {"role": "tool", "name": name, "tool_call_id": f"call_{number}", "content": f"Result {number} of {name}."}
        for number, name in enumerate(("look", "take")[:count])
    ]


def _calls(count: int) -> list[Message]:
    return [call(number, name, n=number, text=PROBE) for number, name in enumerate(("look", "take")[:count])]
