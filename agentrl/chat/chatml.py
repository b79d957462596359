"""A small ChatML form for models made locally, and for pretrained ones that have its tokens and no template.

`chatml.jinja` is the same form as a chat template: other programs render with it what `ChatMLRenderer` renders.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl.chat.encoder import Encoder
from agentrl.chat.forms.json_calls import CLOSE, OPEN, format_reasoning, format_tool_call, parse_assistant
from agentrl.chat.forms.tagged import END_THINK, THINK
from agentrl.chat.proof.template import prove
from agentrl.chat.renderer import Description, DialogueConfig, Renderer, Thinking, Tools, prepared, stop_ids
from agentrl.chat.template import TemplateConfig, TemplateRenderer, offering
from agentrl.errors import RendererError
from agentrl.types import Message

START, END = "<|im_start|>", "<|im_end|>"
_TAG = re.compile(f"({OPEN}|{CLOSE})")
_SPELLED = "".join((START, END, OPEN, CLOSE, THINK, END_THINK))


class ChatMLConfig(DialogueConfig):
    """agentrl's small ChatML form, for models made locally; to a pretrained model it shows the schemas of tools, whole."""

    renderer: str = "chatml"

    def build(self, tokenizer: Any, *, name: str = "") -> Renderer:
        """Return the renderer; that of a pretrained model after proving it."""
        if is_made_here(tokenizer):
            return ChatMLRenderer(tokenizer, self)
        _control_ids(tokenizer)
        renderer = self._with_schemas(tokenizer, name=name)
        prove(renderer, name=name)
        return renderer

    def exported_template(self, tokenizer: Any) -> str:
        """Return the form as a chat template."""
        if is_made_here(tokenizer):
            return _TEMPLATE.read_text(encoding="utf-8").removesuffix("\n")
        return self._with_schemas(tokenizer).text

    def _with_schemas(self, tokenizer: Any, *, name: str = "") -> TemplateRenderer:
        config = TemplateConfig(template=_TEMPLATE, system=self.system, thinking=self.thinking or "keep")
        return TemplateRenderer(tokenizer, config, name=name, offering=offering("hermes") + _NO_SIGNATURES)


_TEMPLATE = Path(__file__).with_name("chatml.jinja")
_NO_SIGNATURES = "{%- set tools = none -%}"
"""Between the two templates: the first has written the tools."""


def is_made_here(tokenizer: Any) -> bool:
    """Return whether a tokenizer is one of `train_tokenizer`: of a small model that learns its tools from demonstrations."""
    return [tokenizer.convert_tokens_to_ids(token) for token in (START, END, OPEN, CLOSE)] == [1, 2, 3, 4]


def _control_ids(tokenizer: Any) -> tuple[int, int]:
    """Return the ids of the tokens that begin and end a message.

    Raises:
        RendererError: if the tokenizer lacks them.
    """
    fast: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    start, end = (None, None) if fast is None else (fast.token_to_id(START), fast.token_to_id(END))
    if start is None or end is None:
        raise RendererError(
            f"chat.renderer: the tokenizer lacks {START} or {END}, with which 'chatml' marks messages. Set "
            "chat.template to a file with a chat template for this tokenizer, or chat.renderer to a renderer of your "
            "own ('module:Class')"
        )
    return start, end


_DEFAULT = ChatMLConfig()


class ChatMLRenderer:
    r"""`<|im_start|>role\ncontent<|im_end|>\n` for each message; tools as one line of signatures in the system message.

    Signatures instead of full JSON schemas, because a model made locally learns its tools from demonstrations, and
    every token of a prompt costs. What environments and users say cannot become control tokens: it is encoded with
    special tokens switched off. In an assistant message only the tags of tool calls are control tokens.
    """

    def __init__(self, tokenizer: Any, config: ChatMLConfig = _DEFAULT) -> None:
        """Take a transformers fast tokenizer that has the two ChatML tokens."""
        self._system, self._thinking = config.system, config.thinking or "keep"
        self._start_id, self._end_id = _control_ids(tokenizer)
        self._control: Tokenizer = tokenizer.backend_tokenizer
        self._encode = Encoder(tokenizer, control=False, spelled=_SPELLED)
        self._stop_ids = stop_ids(tokenizer, template=(self._end_id,))
        self._newline = self._encode("\n")
        self._prompt = (self._start_id, *self._encode("assistant\n"))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token that ends a turn, and those of `stop_ids`."""
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
        """Return what the form is, in words."""
        return Description(
            facts={
                "calls": "hermes, several in a turn, also after text; tools are a line of signatures",
                "end of a turn": END,
                "thoughts": f"{self._thinking}; text of the message, between tags",
                "history": "never rewritten, but for thoughts that are dropped",
                "system messages": "messages of their own",
                "developer messages": "messages of their own",
                "system prompt": "none but chat.system",
                "BOS": "none",
                "variables": "none are read",
            }
        )

    def start(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """Return a whole context; the tools come first, in a system message of their own."""
        system = [{"role": "system", "content": "\n".join(map(signature, tools))}] if tools else []
        said = prepared(messages, system=self._system, thinking=self._thinking)
        return self._messages([*system, *said]) + self._prompt

    def extend(
        self,
        context_ids: Sequence[int],  # noqa: ARG002 - ChatML never looks back
        action_ids: Sequence[int],
        messages: Sequence[Message],
    ) -> tuple[int, ...]:
        """Return the end of the turn where it was not sampled, the new messages, and the generation prompt."""
        is_closed = bool(action_ids) and action_ids[-1] == self._end_id
        close = self._newline if is_closed else (self._end_id, *self._newline)
        return close + self._messages(messages) + self._prompt

    def parse(
        self,
        action_ids: Sequence[int],
        context_ids: Sequence[int] = (),  # noqa: ARG002 - no prompt opens a thought
        tools: Tools = (),  # noqa: ARG002 - arguments are JSON
    ) -> Message:
        """Return the assistant message of sampled tokens."""
        ids = action_ids[:-1] if action_ids and action_ids[-1] in self._stop_ids else action_ids
        return parse_assistant(self._control.decode(list(ids), skip_special_tokens=False))

    def encode(self, message: Message) -> tuple[int, ...]:
        """Return an assistant message as an action."""
        ids: list[int] = []
        for part in _TAG.split(self._assistant_text(message)):
            tag_id = self._control.token_to_id(part) if _TAG.fullmatch(part) else None
            ids.extend(self._encode(part) if tag_id is None else (tag_id,))
        return (*ids, self._end_id)

    def _assistant_text(self, message: Message) -> str:
        """Return the text of a turn, marked but for the tags of the form."""
        literal = self._encode.literal
        calls = [call["function"] for call in message.get("tool_calls", [])]
        written = [format_tool_call(function["name"], function["arguments"]) for function in calls]
        bodies = [call.removeprefix(OPEN).removesuffix(CLOSE) for call in written]
        thought = literal(message.get("reasoning_content") or "")
        texts = [format_reasoning(thought) if thought else "", literal(message.get("content") or "")]
        return "\n".join(filter(None, [*texts, *(f"{OPEN}{literal(body)}{CLOSE}" for body in bodies)]))

    def _text(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text: merges of a tokenizer that has read control tokens would end in one."""
        return self._encode(self._encode.literal(text))

    def _messages(self, messages: Sequence[Message]) -> tuple[int, ...]:
        ids: list[int] = []
        for message in messages:
            ids.append(self._start_id)
            if message["role"] == "assistant":
                ids.extend((*self._encode("assistant\n"), *self.encode(message)))
            else:
                ids.extend((*self._text(f"{message['role']}\n{message.get('content') or ''}"), self._end_id))
            ids.extend(self._newline)
        return tuple(ids)


def signature(tool: dict[str, Any]) -> str:
    """Return a tool's schema as one line: `open_box(box: integer)`."""
    function = tool["function"]
    properties = function.get("parameters", {}).get("properties", {})
    return f"{function['name']}({', '.join(f'{name}: {_type(schema)}' for name, schema in properties.items())})"


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return "|".join(json.dumps(value) for value in schema["enum"])
    return str(schema.get("type", "any"))
