"""Any Hugging Face chat template that leaves earlier turns alone."""

import datetime as dt
from collections.abc import Sequence
from typing import Any, Literal

from jinja2 import TemplateError

from agentrl.chat.encoder import Encoder
from agentrl.chat.forms.hermes import format_reasoning, format_tool_call, parse_assistant
from agentrl.chat.forms.tagged import END_THINK, THINK
from agentrl.chat.renderer import Renderer, RendererConfig, Tools
from agentrl.errors import RendererError
from agentrl.types import Message

_SENTINEL = "agentrl\u2063sentinel"
_USER: Message = {"role": "user", "content": "Hello."}


class TemplateConfig(RendererConfig):
    """The tokenizer's own chat template."""

    renderer: str = "template"
    rewritten_history: Literal["error", "restart"] = "error"
    """What to do with a chat template that changes earlier turns. `error`: refuse it. `restart`: render the whole
    dialogue again at each turn; every turn is then trained in the context in which it was sampled, as a row of its own.
    A template that drops thoughts only when a user speaks (Qwen3's) is rendered again only there."""
    date: dt.date = dt.date(2026, 1, 1)
    """What a chat template that asks for the time (`strftime_now`) is told: midnight of this day. Fixed, so that a dialogue
    is the same tokens on every day of a run, after a restart, and in the next run of the recipe."""

    def build(self, tokenizer: Any, *, name: str = "") -> Renderer:
        """Return the renderer, after probing the template."""
        return TemplateRenderer(tokenizer, self, name=name)


_DEFAULT = TemplateConfig()


class TemplateRenderer:
    """Renders new messages with the tokenizer's own template, behind a stand-in dialogue, and keeps what they added.

    At construction the template is probed: over ten turns with thoughts and tool results each context must begin with the
    one before it, and the tokens that `extend` appends must be those of the template itself. `rewritten_history: restart`
    does without these two, and refuses whatever rendering again cannot mend. A template that rewrites only when a user
    speaks, as Qwen3's does with thoughts, is extended by tool results all the same. As with the template itself, text that
    spells a control token becomes one, whoever wrote it.

    A malformed call, or one whose arguments are no object, is rendered as text within the message: templates may look
    into the arguments of a call. So are thoughts where the template does not write `reasoning_content`.
    """

    def __init__(self, tokenizer: Any, config: TemplateConfig = _DEFAULT, *, name: str = "") -> None:
        if not tokenizer.chat_template:
            raise RendererError(
                f"chat.renderer: the tokenizer {name!r} has no chat template; set 'chatml' for a model made locally, "
                "or use the instruction-tuned version of the model"
            )
        self._tokenizer, self._encode = tokenizer, Encoder(tokenizer)
        self._name = name
        self._clock = dt.datetime.combine(config.date, dt.time())
        self._keeps_thoughts = True  # so that the next line asks the template itself
        self._keeps_thoughts = self._writes_a_thought()
        self._is_thinking = self._prompts_a_thought()
        self._tail = self._close()
        tail_ids = self._encode(self._tail)
        self._stop_ids = tuple(dict.fromkeys(i for i in (*tail_ids[:1], tokenizer.eos_token_id) if i is not None))
        unusable, rewriting = self._probe()
        if unusable:
            raise RendererError(
                f"chat.renderer: the chat template of {name!r} cannot be used: {unusable}. Use another template, or set "
                "chat.renderer: chatml"
            )
        if rewriting and config.rewritten_history == "error":
            raise RendererError(
                f"chat.renderer: the chat template of {name!r} cannot extend a dialogue: "
                f"{next(iter(rewriting.values()))}. Set "
                "chat.rewritten_history: restart to render every turn again, or use a template that leaves earlier turns alone"
            )
        self._extends = not rewriting
        self._extends_by_tools = self._keeps_thoughts and "tool" not in rewriting

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token with which the template closes an assistant turn, and the tokenizer's end of sequence."""
        return self._stop_ids

    @property
    def max_token_chars(self) -> int | None:
        """Longest text that one token stands for."""
        return self._encode.max_chars

    def start(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """Return a whole context."""
        return self._encode(self._render(messages, tools=tools, prompt=True))

    def extend(
        self,
        context_ids: Sequence[int],  # noqa: ARG002 - the probe has shown that history does not matter
        action_ids: Sequence[int],
        messages: Sequence[Message],
    ) -> tuple[int, ...] | None:
        """Return the tokens to append, or None where the template rewrites history."""
        if not self._extends and not (self._extends_by_tools and all(m["role"] == "tool" for m in messages)):
            return None
        ids = self._encode(self._extension(messages))
        is_closed = bool(action_ids) and ids[:1] == tuple(action_ids[-1:])
        return ids[1:] if is_closed else ids

    def parse(self, action_ids: Sequence[int]) -> Message:
        """Return the assistant message of sampled tokens."""
        ids = action_ids[:-1] if action_ids and action_ids[-1] in self._stop_ids else action_ids
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return parse_assistant(text, is_thinking=self._is_thinking)

    def encode(self, message: Message) -> tuple[int, ...]:
        """Return an assistant message as an action."""
        before = self._render([_USER], prompt=True)
        after = self._render([_USER, message])
        if not (after.startswith(before) and after.endswith(self._tail)):
            raise RendererError(f"chat.renderer: the template of {self._name!r} cannot write demonstrations")
        text = after[len(before) : len(after) - len(self._tail)]
        return (*self._encode(text), *self._encode(self._tail)[:1])

    def _render(self, messages: Sequence[Message], *, tools: Tools = (), prompt: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [self._renderable(m) for m in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=prompt,
                strftime_now=self._clock.strftime,  # in place of the clock that transformers gives to templates
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise RendererError(
                f"chat.renderer: the chat template of {self._name!r} cannot render a dialogue with the roles "
                f"{', '.join(m['role'] for m in messages)}: {error}"
            ) from error
        return text

    def _close(self) -> str:
        """Return the text with which the template closes an assistant turn."""
        text = self._render([_USER, {"role": "assistant", "content": _SENTINEL}])
        _, found, tail = text.partition(_SENTINEL)
        if not found or not tail:
            raise RendererError(f"chat.renderer: the chat template of {self._name!r} does not close assistant turns")
        return tail

    def _writes_a_thought(self) -> bool:
        """Tell whether the template writes what was thought in the last turn, in the form in which it is read."""
        message: Message = {"role": "assistant", "content": _SENTINEL, "reasoning_content": "A thought."}
        text = self._render([_USER, message]).removeprefix(self._render([_USER]))
        return bool(parse_assistant(text).get("reasoning_content") == message["reasoning_content"])

    def _prompts_a_thought(self) -> bool:
        """Tell whether the generation prompt ends within a thought."""
        prompt = self._render([_USER], prompt=True).removeprefix(self._render([_USER]))
        return prompt.rfind(THINK) > prompt.rfind(END_THINK)

    def _renderable(self, message: Message) -> Message:
        """Return the message with each thought and call that the template might stumble over as text, as it was sampled."""
        thought = None if self._keeps_thoughts else message.get("reasoning_content")
        calls = message.get("tool_calls") or []
        odd = [call["function"] for call in calls if not _is_regular(call)]
        if not (thought or odd):
            return message
        texts = [format_tool_call(function.get("name") or "", function.get("arguments", {})) for function in odd]
        thoughts = [format_reasoning(thought)] if thought else []
        replaced = ("tool_calls", "reasoning_content") if thought else ("tool_calls",)
        plain = {key: value for key, value in message.items() if key not in replaced}
        plain["content"] = "\n".join(filter(None, [*thoughts, message.get("content"), *texts]))
        regular = [call for call in calls if _is_regular(call)]
        return plain | ({"tool_calls": regular} if regular else {})

    def _extension(self, messages: Sequence[Message]) -> str:
        """Return what the template adds after an assistant's text: its close, the messages and the prompt."""
        stand_in = [_USER, {"role": "assistant", "content": _SENTINEL}]
        return self._render([*stand_in, *messages], prompt=True).partition(_SENTINEL)[2]

    def _probe(self) -> tuple[str | None, dict[str, str]]:
        """Return why the template cannot be used at all, and why it cannot extend a dialogue, by the role that it hears."""
        tools = [_tool("look"), _tool("take")]
        messages: list[Message] = [_USER]
        opening, context = self._render(messages, tools=tools), self._render(messages, tools=tools, prompt=True)
        if not all(tool["function"]["name"] in context for tool in tools):
            return "it leaves out the tools", {}
        rewriting: dict[str, str] = {}
        for turn in range(10):
            message, replies = self._probe_turn(turn)
            messages += [message, *replies]
            # Without the generation prompt, which may end some reasoning, and the tools, which may come with examples.
            if unusable := _left_out(self._render(messages, tools=tools).removeprefix(opening), message, replies):
                return unusable, {}
            whole = self._render(messages, tools=tools, prompt=True)
            if reason := self._rewriting(context, whole, turn):
                rewriting.setdefault(replies[0]["role"], reason)
            context = whole
        return None, rewriting

    def _probe_turn(self, turn: int) -> tuple[Message, list[Message]]:
        """Return a turn; three of them begin with a thought, one of each kind.

        Where a thought is a part of the text, only plain turns have one: many templates drop text beside calls.
        """
        message, replies = _probe_turn(turn)
        if 6 <= turn < 9 and (self._keeps_thoughts or not message.get("tool_calls")):
            message["reasoning_content"] = f"Thought {turn}."
        return message, replies

    def _rewriting(self, context: str, whole: str, turn: int) -> str | None:
        """Return how the context after a turn differs from the one before it with the turn appended."""
        message, replies = self._probe_turn(turn)
        if not whole.startswith(context):
            return f"turn {turn + 1} changes the text of the turns before it"
        added, extension = whole[len(context) :], self._extension(replies)
        if not added.endswith(extension):
            return f"after turn {turn + 1} the text of a new message depends on the messages before it"
        parsed = parse_assistant(added[: len(added) - len(extension)], is_thinking=self._is_thinking)
        if parsed.get("reasoning_content") != message.get("reasoning_content"):
            return f"turn {turn + 1} drops what the assistant thought in it"
        if _functions(parsed) != _functions(message) or parsed["content"] != message["content"]:
            return f"turn {turn + 1} changes what the assistant said in it"
        return None


def _left_out(text: str, message: Message, replies: Sequence[Message]) -> str | None:
    """Return what the text of a dialogue lacks of its last turn."""
    if lost := [reply["role"] for reply in replies if reply["content"] not in text]:
        return f"it leaves out messages of the role {lost[0]!r}"
    calls = _functions(message)
    if calls and _functions(parse_assistant(text))[-len(calls) :] != calls:
        return "it does not write tool calls in the form of Hermes and Qwen (<tool_call>{...}</tool_call>)"
    return None if message["content"] in text else "it leaves out what the assistant said"


def _is_regular(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):  # a form of the environment's own, for its own template
        return True
    return bool(function.get("name")) and isinstance(function.get("arguments", {}), dict)


def _functions(message: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", [])]


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


def _probe_turn(turn: int) -> tuple[Message, list[Message]]:
    """Alternate plain turns, turns with one call and turns with two."""
    if turn % 3 == 0:
        return {"role": "assistant", "content": f"Text {turn}."}, [{"role": "user", "content": f"Go on, {turn}."}]
    names = ("look", "take")[: turn % 3]
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": {"n": turn}}}
        for i, name in enumerate(names)
    ]
    replies = [
        {"role": "tool", "name": name, "tool_call_id": f"call_{i}", "content": f"result {turn} of {name}"}
        for i, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}, replies
