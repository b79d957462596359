"""A Hugging Face chat template, given its messages in the shape that it expects."""

import datetime as dt
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from agentrl.chat.encoder import Encoder
from agentrl.chat.forms import CallForm
from agentrl.chat.forms.hermes import format_reasoning
from agentrl.chat.renderer import Tools
from agentrl.errors import RendererError
from agentrl.types import Message

PROBE = "agentrl-probe"
"""A text that no template holds."""
_SAID = "agentrl-said"
_SETTING = frozenset({"system", "developer"})
USER: Message = {"role": "user", "content": "Hello."}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a template expects of its messages; families differ."""

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
    """Of these roles, those whose messages stand where they are said once the dialogue has begun. Some families move them to
    the beginning or leave them out: their text opens the next user message."""


def placed(messages: Sequence[Message], shape: Shape, *, has_begun: bool = False) -> list[Message]:
    """Return messages where the template writes them all: what it would leave out or move is said by the user.

    Args:
        messages: as they are said.
        shape: of the template.
        has_begun: something was said before them.
    """
    said: list[Message] = []
    held: list[str] = []

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
        said.append({**message, "role": role, "content": text})
    let_the_user_say()
    return said


class ChatTemplate:
    """Renders messages as text, whatever shape the template wants them in.

    What an environment, a user or the model said is marked (`Encoder.literal`), so that words which spell a control token
    are no control token. A malformed call, or one whose arguments are no object, is rendered as text within the message:
    templates may look into the arguments of a call. So are thoughts where the template knows none.
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
        self._tokenizer, self._encoder, self._template, self.name = tokenizer, encoder, template, name
        clock = dt.datetime.combine(date, dt.time())
        self._variables = {**variables, "strftime_now": clock.strftime}  # in place of the clock that transformers gives
        self.shape = self._find_shape()

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
        shape = shape or self.shape
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(self._shaped(messages, shape, form)),
                tools=[self._marked(tool) for tool in tools] or None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            raise RendererError(
                f"chat.renderer: the chat template of {self.name!r} cannot render a dialogue with the roles "
                f"{', '.join(m['role'] for m in messages)}: {error}"
            ) from error
        return self._encoder.marks(text)

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
        thought = {"role": "assistant", "reasoning_content": PROBE}
        for key in ("reasoning_content", "thinking", "reasoning", None):
            shape = replace(shape, thought_key=key)
            if self._holds([USER, {**thought, "content": "Yes."}], shape):
                break
            if key and self._holds([USER, {**thought, "content": "", "tool_calls": [call]}], shape):
                break
        return shape

    def _holds(self, messages: Sequence[Message], shape: Shape) -> bool:
        """Tell whether the template renders the probe that some message holds."""
        try:
            return PROBE in self.render(messages, shape=shape)
        except RendererError:
            return False

    def _stands(self, role: str, shape: Shape) -> bool:
        """Tell whether what this role says once the dialogue has begun follows a turn, which ends as it does for a user."""
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
            shaped, text = message.copy(), self._encoder.literal(message["content"])
            if shaped["role"] == "assistant":
                text = self._say(shaped, text, shape, form)
            shaped["content"] = [{"type": "text", "text": text}] if shape.parts else text
            yield shaped

    def _say(self, shaped: Message, text: str, shape: Shape, form: CallForm | None) -> str:
        """Give an assistant's message its thought and its calls; return what of both is text, with its own."""
        thought = self._encoder.literal(shaped.pop("reasoning_content", None) or "")
        calls = shaped.pop("tool_calls", None) or []
        regular = [call for call in calls if _is_regular(call)]
        odd = [_written(call) for call in calls if not _is_regular(call)]
        if regular:
            shaped["tool_calls"] = [self._call(call, shape) for call in regular]
        pieces = [form.write_malformed(self._encoder.literal(words)) for words in odd] if form else odd
        if thought and shape.thought_key:
            shaped[shape.thought_key] = thought
        elif thought:
            pieces, text = [text, *pieces], format_reasoning(thought).strip()
        return "\n".join(filter(None, [text, *pieces]))

    def _call(self, call: Any, shape: Shape) -> Any:
        if not isinstance(call.get("function"), dict):  # a form of the environment's own, for its own template
            return call
        arguments = self._marked(call["function"].get("arguments", {}))
        if shape.text_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _marked(self, data: Any) -> Any:
        if isinstance(data, str):
            return self._encoder.literal(data)
        if isinstance(data, list):
            return [self._marked(item) for item in data]
        return {key: self._marked(value) for key, value in data.items()} if isinstance(data, dict) else data


def _is_regular(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):  # a form of the environment's own, for its own template
        return isinstance(call, dict)
    return bool(function.get("name")) and isinstance(function.get("arguments", {}), dict)


def _written(call: Any) -> str:
    """Return a call that is none as it was sampled."""
    function = call["function"] if isinstance(call, dict) else {"arguments": str(call)}
    name, arguments = function.get("name"), function.get("arguments", {})
    if not name and isinstance(arguments, str):
        return arguments
    return json.dumps({"name": name or "", "arguments": arguments}, ensure_ascii=False)
